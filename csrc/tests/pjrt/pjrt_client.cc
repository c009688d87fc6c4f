#include "pjrt_client.h"

#include <dlfcn.h>
#include <pjrt_c_api.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace dfx::test {

struct PjrtClient::Impl {
  const PJRT_Api* api;
  PJRT_Client* client;

  void Check(PJRT_Error* error) const {
    if (error == nullptr) return;
    PJRT_Error_Message_Args message{};
    message.struct_size = PJRT_Error_Message_Args_STRUCT_SIZE;
    message.error = error;
    api->PJRT_Error_Message(&message);
    std::string text(message.message, message.message_size);
    PJRT_Error_Destroy_Args destroy{};
    destroy.struct_size = PJRT_Error_Destroy_Args_STRUCT_SIZE;
    destroy.error = error;
    api->PJRT_Error_Destroy(&destroy);
    throw std::runtime_error(text);
  }
};

PjrtClient& PjrtClient::Get() {
  static PjrtClient* client = new PjrtClient;
  return *client;
}

PjrtClient::PjrtClient() : impl_(new Impl) {
  void* library = dlopen(DFX_PJRT_PLUGIN, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  impl_->api = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(library, "GetPjrtApi"))();
  PJRT_Plugin_Initialize_Args initialize{};
  initialize.struct_size = PJRT_Plugin_Initialize_Args_STRUCT_SIZE;
  impl_->Check(impl_->api->PJRT_Plugin_Initialize(&initialize));
  PJRT_Client_Create_Args create{};
  create.struct_size = PJRT_Client_Create_Args_STRUCT_SIZE;
  impl_->Check(impl_->api->PJRT_Client_Create(&create));
  impl_->client = create.client;
}

const void* PjrtClient::api() const { return impl_->api; }
void* PjrtClient::client() const { return impl_->client; }

std::shared_ptr<void> PjrtClient::Compile(const std::string& stablehlo) {
  // A CompileOptionsProto with executable_build_options {num_replicas: 1, num_partitions: 1}.
  static const char options[] = "\x1a\x04\x20\x01\x28\x01";
  PJRT_Program program{};
  program.struct_size = PJRT_Program_STRUCT_SIZE;
  program.code = const_cast<char*>(stablehlo.data());
  program.code_size = stablehlo.size();
  program.format = "mlir";
  program.format_size = 4;
  PJRT_Client_Compile_Args compile{};
  compile.struct_size = PJRT_Client_Compile_Args_STRUCT_SIZE;
  compile.client = impl_->client;
  compile.program = &program;
  compile.compile_options = options;
  compile.compile_options_size = sizeof(options) - 1;
  impl_->Check(impl_->api->PJRT_Client_Compile(&compile));
  return {compile.executable, [impl = impl_](void* executable) {
            PJRT_LoadedExecutable_Destroy_Args destroy{};
            destroy.struct_size = PJRT_LoadedExecutable_Destroy_Args_STRUCT_SIZE;
            destroy.executable = static_cast<PJRT_LoadedExecutable*>(executable);
            impl->api->PJRT_LoadedExecutable_Destroy(&destroy);
          }};
}

std::string StableHlo(const std::string& shape, size_t n_ins, size_t n_outs, bool in_place,
                      const std::string& body) {
  const std::string type = "tensor<" + shape + ">";
  std::string parameters, types, values;
  auto add = [](std::string& list, const std::string& item) {
    list += (list.empty() ? "" : ", ") + item;
  };
  for (size_t i = 0; i < n_ins; ++i) add(parameters, "%" + std::to_string(i) + ": " + type);
  for (size_t i = 0; i < n_outs; ++i) {
    add(types, type);
    add(values, "%r");
    if (!in_place) continue;
    add(parameters, "%o" + std::to_string(i) + ": " + type +
                        " {tf.aliasing_output = " + std::to_string(i) + " : i32}");
  }
  return "module @m { func.func public @main(" + parameters + ") -> (" + types + ") {\n" + body +
         "\n return " + values + " : " + types + "\n} }";
}

PjrtSpec MakeStep(const std::string& stablehlo, PjrtTensor tensor, size_t n_ins, size_t n_outs,
                  bool in_place, std::shared_ptr<PjrtCounters> counters) {
  PjrtClient& client = PjrtClient::Get();
  PjrtSpec step;
  step.api = client.api();
  step.client = client.client();
  step.owner = client.Compile(stablehlo);
  step.executable = step.owner.get();
  step.ins.assign(n_ins, tensor);
  step.outs.assign(n_outs, tensor);
  step.in_place.assign(n_outs, in_place);
  step.counters = std::move(counters);
  return step;
}

LaunchDesc PjrtLanes::Compute(const std::string& name, const Affine& of, std::vector<int32_t> ins,
                              std::vector<int32_t> outs) {
  auto constant = [](const std::string& name_of, int64_t value) {
    return name_of + " = stablehlo.constant dense<" + std::to_string(value) + "> : tensor<1xi64>\n";
  };
  std::string sum = "%c", body = constant(sum, of.constant);
  for (size_t i = 0; i < ins.size(); ++i) {
    const std::string n = std::to_string(i), next = i + 1 == ins.size() ? "%r" : "%s" + n;
    body += constant("%w" + n, of.weights[i]);
    body += "%t" + n + " = stablehlo.multiply %" + n + ", %w" + n + " : tensor<1xi64>\n";
    body += next + " = stablehlo.add " + sum + ", %t" + n + " : tensor<1xi64>\n";
    sum = next;
  }
  const std::string text = StableHlo("1xi64", ins.size(), outs.size(), true, body);
  // Compiling takes longer than running: the same computation is compiled once.
  static std::mutex mutex;
  static auto* compiled = new std::map<std::string, std::shared_ptr<Step>>;
  std::lock_guard<std::mutex> lock(mutex);
  auto it = compiled->find(text);
  if (it == compiled->end()) {
    it = compiled
             ->emplace(text, MakePjrtStep(
                                 "xla", MakeStep(text, {kS64, {1}}, ins.size(), outs.size(), true)))
             .first;
  }
  return LaunchDesc{std::make_unique<SharedStep>(name, it->second), std::move(ins),
                    std::move(outs)};
}

}  // namespace dfx::test
