#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "cuda/cuda_driver.h"
#include "cuda/late_errors.h"
#include "dfx/call.h"
#include "dfx/cuda/cuda_engine.h"
#include "dfx/error.h"
#include "dfx/pjrt.h"
#include "dfx/program.h"
#include "pjrt/pjrt_api.h"

namespace dfx {
namespace {

using pjrt::Api;
using pjrt::Owned;

// Views of the inputs at the addresses of the last call.
struct InputViews {
  std::vector<void*> addresses;
  std::vector<Owned<PJRT_Buffer>> views;
};

class PjrtStep : public Step {
 public:
  PjrtStep(std::string name, PjrtSpec spec)
      : Step(std::move(name)),
        api_(spec.api),
        spec_(std::move(spec)),
        client_(static_cast<PJRT_Client*>(spec_.client)),
        executable_(static_cast<PJRT_LoadedExecutable*>(spec_.executable)) {
    if (client_ == nullptr || executable_ == nullptr) {
      throw Error("a PJRT step needs a client and an executable; got a null pointer");
    }
    if (spec_.in_place.size() != spec_.outs.size()) {
      throw Error("a PJRT step with " + std::to_string(spec_.outs.size()) +
                  " outputs needs in_place for each; got " + std::to_string(spec_.in_place.size()));
    }
    if (spec_.constants.size() != spec_.constant_data.size()) {
      throw Error("a PJRT step has " + std::to_string(spec_.constants.size()) +
                  " constants, and addresses for " + std::to_string(spec_.constant_data.size()));
    }
    if (spec_.counters == nullptr) spec_.counters = std::make_shared<PjrtCounters>();
    auto devices = Api::Make<pjrt::AddressableDevicesArgs>();
    devices.client = client_;
    api_.Call(pjrt::kClientAddressableDevices, devices);
    if (devices.n_devices == 0) throw Error("the PJRT client has no device");
    device_ = devices.devices[0];
    auto get = Api::Make<pjrt::GetExecutableArgs>();
    get.loaded_executable = executable_;
    api_.Call(pjrt::kLoadedExecutableGetExecutable, get);
    Owned<PJRT_Executable> executable(api_, get.executable);
    auto outputs = Api::Make<pjrt::NumOutputsArgs>();
    outputs.executable = executable.get();
    api_.Call(pjrt::kExecutableNumOutputs, outputs);
    if (outputs.num_outputs != spec_.outs.size()) {
      throw Error("the executable has " + std::to_string(outputs.num_outputs) +
                  " outputs, the step says " + std::to_string(spec_.outs.size()));
    }
    for (size_t i = 0; i < spec_.constants.size(); ++i) {
      constants_.push_back(MakeView(spec_.constant_data[i], spec_.constants[i]));
    }
  }

  std::string Describe() const override { return "XLA executable"; }

  void Launch(std::span<const Buffer> ins, std::span<Buffer> outs, Lane& lane) override {
    if (ins.size() != spec_.ins.size() || outs.size() != spec_.outs.size()) {
      throw Error("the executable takes " + std::to_string(spec_.ins.size()) +
                  " inputs and gives " + std::to_string(spec_.outs.size()) +
                  " outputs; the step has " + std::to_string(ins.size()) + " and " +
                  std::to_string(outs.size()));
    }
    const bool host = lane.cuda() == nullptr;
    InputViews inputs = TakeViews();
    UpdateViews(inputs, ins, host);
    std::vector<PJRT_Buffer*> arguments;
    arguments.reserve(constants_.size() + inputs.views.size() + spec_.outs.size());
    for (auto& constant : constants_) arguments.push_back(constant.get());
    for (auto& view : inputs.views) arguments.push_back(view.get());
    std::vector<Owned<PJRT_Buffer>> donated;
    for (size_t i = 0; i < spec_.outs.size(); ++i) {
      if (!spec_.in_place[i]) continue;
      // XLA:CPU writes into memory that it imported for that, and never into a view.
      donated.push_back(host ? Import(outs[i].data, spec_.outs[i], pjrt::kMutableZeroCopy)
                             : MakeView(outs[i].data, spec_.outs[i]));
      arguments.push_back(donated.back().get());
    }

    std::vector<PJRT_Buffer*> raw(spec_.outs.size(), nullptr);
    PJRT_Event* raw_done = nullptr;
    std::vector<Owned<PJRT_Buffer>> results;
    results.reserve(raw.size());  // nothing may throw between the execution and its owners
    Execute(arguments, raw, &raw_done);
    for (PJRT_Buffer* buffer : raw) results.emplace_back(api_, buffer);
    Owned<PJRT_Event> done(api_, raw_done);
    // A CUDA lane does not wait, but XLA may know already that nothing was enqueued.
    if (host || lane.cuda()->check_steps() || IsReady(done)) {
      Await(done);
    } else {
      Watch(done, lane);
    }
    for (size_t i = 0; i < results.size(); ++i) PutOutput(results[i], outs[i], lane.cuda());
    spec_.counters->executions.fetch_add(1, std::memory_order_relaxed);
    GiveViews(std::move(inputs));
  }

 private:
  // Two lanes may run the same step at a time: each takes views of its own.
  InputViews TakeViews() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return {};
    InputViews inputs = std::move(free_.back());
    free_.pop_back();
    return inputs;
  }
  void GiveViews(InputViews inputs) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(inputs));
  }

  void UpdateViews(InputViews& inputs, std::span<const Buffer> ins, bool host) {
    inputs.addresses.resize(spec_.ins.size(), nullptr);
    inputs.views.resize(spec_.ins.size());
    for (size_t i = 0; i < spec_.ins.size(); ++i) {
      if (host && reinterpret_cast<uintptr_t>(ins[i].data) % kAlignment != 0) {
        inputs.views[i] = Import(ins[i].data, spec_.ins[i], pjrt::kCopyDuringCall);
        inputs.addresses[i] = nullptr;  // holds what was there in this call
        spec_.counters->copied_inputs.fetch_add(1, std::memory_order_relaxed);
        continue;
      }
      if (inputs.views[i].get() != nullptr && inputs.addresses[i] == ins[i].data) continue;
      inputs.views[i] = MakeView(ins[i].data, spec_.ins[i]);
      inputs.addresses[i] = ins[i].data;
    }
  }

  Owned<PJRT_Buffer> MakeView(void* data, const PjrtTensor& tensor) {
    auto args = Api::Make<pjrt::CreateViewArgs>();
    args.client = client_;
    args.device_buffer_ptr = data;
    args.dims = tensor.dims.data();
    args.num_dims = tensor.dims.size();
    args.element_type = tensor.type;
    args.device = device_;
    args.on_delete_callback = [](void*, void*) {};
    api_.Call(pjrt::kClientCreateViewOfDeviceBuffer, args);
    spec_.counters->views.fetch_add(1, std::memory_order_relaxed);
    return {api_, args.buffer};
  }

  Owned<PJRT_Buffer> Import(void* data, const PjrtTensor& tensor, int semantics) {
    auto args = Api::Make<pjrt::FromHostBufferArgs>();
    args.client = client_;
    args.data = data;
    args.type = tensor.type;
    args.dims = tensor.dims.data();
    args.num_dims = tensor.dims.size();
    args.semantics = semantics;
    args.device = device_;
    api_.Call(pjrt::kClientBufferFromHostBuffer, args);
    Owned<PJRT_Event> done(api_, args.done_with_host_buffer);
    return {api_, args.buffer};
  }

  void Execute(const std::vector<PJRT_Buffer*>& arguments, std::vector<PJRT_Buffer*>& results,
               PJRT_Event** done) {
    auto options = Api::Make<pjrt::ExecuteOptions>();
    PJRT_Buffer* const* argument_list = arguments.data();
    PJRT_Buffer** result_list = results.data();
    auto args = Api::Make<pjrt::ExecuteArgs>();
    args.executable = executable_;
    args.options = &options;
    args.argument_lists = &argument_list;
    args.num_devices = 1;
    args.num_args = arguments.size();
    args.output_lists = &result_list;
    args.device_complete_events = done;
    api_.Call(pjrt::kLoadedExecutableExecute, args);
  }

  // On a device an execution that fails where XLA enqueues it still returns success: the error is
  // in the event, at once (unless XLA enqueues on a thread of its own, which CUDA lanes refuse).
  bool IsReady(const Owned<PJRT_Event>& event) {
    auto args = Api::Make<pjrt::EventIsReadyArgs>();
    args.event = event.get();
    api_.Call(pjrt::kEventIsReady, args);
    return args.is_ready;
  }

  // An error that comes later is one of the engine's late errors, whatever is left of this step and
  // its program by then.
  void Watch(const Owned<PJRT_Event>& event, Lane& lane) {
    struct Watcher {
      Api api;
      std::shared_ptr<LateErrors> late;
      std::string program, step;
    };
    auto watcher = std::make_unique<Watcher>(
        Watcher{api_, lane.cuda()->late(), lane.current()->program().name(), name()});
    auto args = Api::Make<pjrt::EventOnReadyArgs>();
    args.event = event.get();
    args.user = watcher.get();
    args.callback = [](PJRT_Error* error, void* user) {
      std::unique_ptr<Watcher> mine(static_cast<Watcher*>(user));
      if (error == nullptr) return;
      std::string what;
      try {
        what = mine->api.Take(error);
      } catch (const std::bad_alloc&) {
        what = kOutOfMemory;
      }
      mine->late->Add(mine->program, mine->step, what);
    };
    api_.Call(pjrt::kEventOnReady, args);
    watcher.release();  // the callback's, which comes once
  }

  void Await(const Owned<PJRT_Event>& event) {
    auto args = Api::Make<pjrt::EventArgs>();
    args.event = event.get();
    api_.Call(pjrt::kEventAwait, args);
  }

  void PutOutput(const Owned<PJRT_Buffer>& result, const Buffer& out, CudaLane* cuda) {
    if (out.bytes == 0) return;
    auto where = Api::Make<pjrt::BufferPointerArgs>();
    where.buffer = result.get();
    api_.Call(pjrt::kBufferOpaquePointer, where);
    if (where.pointer == out.data) return;
    auto size = Api::Make<pjrt::BufferSizeArgs>();
    size.buffer = result.get();
    api_.Call(pjrt::kBufferOnDeviceSize, size);
    if (size.bytes != static_cast<size_t>(out.bytes)) {
      throw Error("an output has " + std::to_string(size.bytes) + " bytes, its place " +
                  std::to_string(out.bytes));
    }
    spec_.counters->copied_outputs.fetch_add(1, std::memory_order_relaxed);
    if (cuda != nullptr) {
      // The buffer goes when this returns; its client frees in the order of the same stream.
      EnqueueCopy(cuda->driver(), out.data, reinterpret_cast<const void*>(where.pointer),
                  size.bytes, cuda->stream());
      return;
    }
    // The execution is over and the memory is the host's: XLA's own copy would hand it to a thread
    // of its pool, and wait for that.
    std::memcpy(out.data, where.pointer, size.bytes);
  }

  const Api api_;
  PjrtSpec spec_;
  PJRT_Client* client_;
  PJRT_LoadedExecutable* executable_;
  PJRT_Device* device_ = nullptr;
  std::vector<Owned<PJRT_Buffer>> constants_;
  std::mutex mutex_;              // guards free_
  std::vector<InputViews> free_;  // one for each Launch that was under way at one time
};

}  // namespace

std::unique_ptr<Step> MakePjrtStep(std::string name, PjrtSpec spec) {
  return std::make_unique<PjrtStep>(std::move(name), std::move(spec));
}

}  // namespace dfx
