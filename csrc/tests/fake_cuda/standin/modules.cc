// Modules, kernels and their launches.
#include <algorithm>

#include "exports.h"

namespace fake = dfx::fake;
using dfx::CudaAddress;
using fake::S;

namespace dfx::fake {
namespace {

CUmod_st* Load(const void* image) {
  auto* module = new CUmod_st;  // kept for ever: launches in flight may name its kernels
  module->id = ++S().ids;
  module->device = CurrentDevice();
  // A text; of binaries, which libraries bring, nothing is known.
  const char* text = static_cast<const char*>(image);
  if (std::strncmp(text, "\177ELF", 4) != 0 && std::strstr(text, ".version") != nullptr) {
    module->image = text;
  }
  Modules().push_back(module);
  return module;
}

CUfunc_st* FindFunction(CUmod_st* module, const std::string& name) {
  if (!module->image.empty() && !HasKernel(module->image, name)) return nullptr;
  return FunctionOf(module, name);
}

const bool installed = [] {
  S().load_module = Load;
  S().find_function = FindFunction;
  return true;
}();

CUresult GlobalAt(CudaAddress* address, size_t* bytes, CUmod_st* module, const char* name) {
  auto& global = module->globals[name];
  if (global.second == 0) {
    std::vector<char> contents;
    if (!GlobalOf(module->image, name, &contents)) {
      module->globals.erase(name);
      return CUDA_ERROR_NOT_FOUND;
    }
    const auto status = Allocate(&global.first, contents.size(), Memory::kDevice, module->device);
    if (status != 0) RETURN(status);
    global.second = contents.size();
    std::memcpy(reinterpret_cast<void*>(global.first), contents.data(), contents.size());
  }
  if (address != nullptr) *address = global.first;
  if (bytes != nullptr) *bytes = global.second;
  return CUDA_SUCCESS;
}

}  // namespace

std::vector<CUmod_st*>& Modules() {
  static auto* modules = new std::vector<CUmod_st*>;
  return *modules;
}

CUfunc_st* FunctionOf(CUmod_st* module, const std::string& name) {
  auto& function = module->functions[name];
  if (function == nullptr) {
    function = std::make_unique<CUfunc_st>();
    function->name = name;
    function->module = module;
    function->sizes = ParameterSizes(module->image, name);
    // The kernels that XLA's conditionals and the project's own tests bring are known by name.
    function->run = KnownKernel(name, function->sizes);
  }
  return function.get();
}

}  // namespace dfx::fake

// The text of a module's image, for who computes kernels; "" if it is none.
DFX_EXPORT const char* fake_module_image(uint64_t id) {
  LOCK;
  for (CUmod_st* module : fake::Modules()) {
    if (module->id == id) return module->image.c_str();
  }
  return "";
}

DFX_EXPORT CUfunc_st* fake_registered(const char* name) {
  LOCK;
  static CUmod_st* module = [] {
    auto* made = new CUmod_st;
    made->id = ++S().ids;
    fake::Modules().push_back(made);
    return made;
  }();
  return fake::FunctionOf(module, name);
}

DFX_EXPORT int fake_launch(const char* name, CUstream_st* stream, const uint64_t* arguments,
                           int n) {
  CUfunc_st* function = fake_registered(name);
  BEGIN("cuLaunchKernel");
  auto launch = std::make_shared<fake::KernelLaunch>();
  launch->function = function;
  for (int i = 0; i < n; ++i) {
    const char* bytes = reinterpret_cast<const char*>(arguments + i);
    launch->arguments.emplace_back(bytes, bytes + sizeof(uint64_t));
  }
  return fake::Enqueue(fake::Of(stream), fake::KernelWork(std::move(launch)));
}

namespace {

std::vector<fake::Access> Accesses(const uint64_t* from, int n) {
  std::vector<fake::Access> made;
  for (int i = 0; i < n; ++i, from += 3) {
    if (from[1] != 0) made.push_back({from[0], from[1], from[2] != 0});
  }
  return made;
}

}  // namespace

DFX_EXPORT int fake_enqueue(const char* name, CUstream_st* stream, int (*run)(void*),
                            void (*drop)(void*), void* data, const uint64_t* accesses, int n) {
  std::shared_ptr<void> owned(data, drop);
  BEGIN("cuLaunchKernel");
  fake::Work work;
  work.kind = fake::Kind::kKernel;
  work.label = name;
  work.run = [run, owned] { return run(owned.get()) == 0; };
  work.accesses = Accesses(accesses, n);
  return fake::Enqueue(fake::Of(stream), std::move(work));
}

DFX_EXPORT void fake_touches(const uint64_t* accesses, int n) {
  LOCK;
  fake::TraceAccesses(Accesses(accesses, n));
}

DFX_EXPORT int fake_current_device() {
  LOCK;
  return fake::CurrentDevice();
}

DFX_EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*,
                                       void**) {
  return static_cast<CUresult>(fake::Driver().ModuleLoadData(module, image));
}

DFX_EXPORT CUresult cuModuleLoadFatBinary(CUmodule* module, const void* image) {
  return static_cast<CUresult>(fake::Driver().ModuleLoadData(module, image));
}

DFX_EXPORT CUresult cuModuleUnload(CUmodule) {
  BEGIN("cuModuleUnload");
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuModuleGetGlobal(CUdeviceptr* address, size_t* bytes, CUmodule module,
                                      const char* name) {
  BEGIN("cuModuleGetGlobal");
  return fake::GlobalAt(address, bytes, module, name);
}

// A library is a module, and its kernels are the module's functions.
static CUmod_st* Module(CUlibrary library) { return reinterpret_cast<CUmod_st*>(library); }

DFX_EXPORT CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**,
                                      unsigned, CUlibraryOption*, void**, unsigned) {
  CUmodule module = nullptr;
  const auto status = fake::Driver().ModuleLoadData(&module, code);
  *library = reinterpret_cast<CUlibrary>(module);
  RETURN(status);
}

DFX_EXPORT CUresult cuLibraryUnload(CUlibrary) {
  BEGIN("cuLibraryUnload", fake::kNothing);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  BEGIN("cuLibraryGetKernel");
  *kernel = reinterpret_cast<CUkernel>(fake::FindFunction(Module(library), name));
  return *kernel == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuLibraryGetModule(CUmodule* module, CUlibrary library) {
  BEGIN("cuLibraryGetModule");
  *module = Module(library);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary library,
                                       const char* name) {
  BEGIN("cuLibraryGetGlobal");
  return fake::GlobalAt(address, bytes, Module(library), name);
}

DFX_EXPORT CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  BEGIN("cuKernelGetFunction");
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                                         CUdevice) {
  auto* function = reinterpret_cast<CUfunction>(kernel);
  return static_cast<CUresult>(fake::Driver().FuncSetAttribute(function, attribute, value));
}

DFX_EXPORT CUresult cuFuncGetName(const char** name, CUfunction function) {
  BEGIN("cuFuncGetName");
  *name = function->name.c_str();
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuKernelGetName(const char** name, CUkernel kernel) {
  return cuFuncGetName(name, reinterpret_cast<CUfunction>(kernel));
}

DFX_EXPORT CUresult cuFuncGetModule(CUmodule* module, CUfunction function) {
  BEGIN("cuFuncGetModule");
  *module = function->module;
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuFuncGetParamInfo(CUfunction function, size_t i, size_t* offset,
                                       size_t* size) {
  BEGIN("cuFuncGetParamInfo");
  if (i >= function->sizes.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = 0;
  for (size_t k = 0; k <= i; ++k) {
    const size_t align = std::min<size_t>(function->sizes[k], 8);
    *offset = (*offset + align - 1) / align * align;
    if (k < i) *offset += function->sizes[k];
  }
  if (size != nullptr) *size = function->sizes[i];
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  BEGIN("cuFuncGetAttribute");
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = 1024;
      break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = 32;
      break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = 90;
      break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = 49152;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) {
  BEGIN("cuFuncSetCacheConfig");
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, CUfunction,
                                                                         int block, size_t,
                                                                         unsigned) {
  BEGIN("cuOccupancyMaxActiveBlocksPerMultiprocessor");
  *n = std::max(1, 2048 / std::max(block, 1));
  return CUDA_SUCCESS;
}

DFX_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction function,
                                                                int block, size_t bytes) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, function, block, bytes, 0);
}

DFX_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function,
                                     void** parameters, void** extra) {
  {
    LOCK;
    fake::Of(config->hStream);
  }
  return static_cast<CUresult>(
      fake::Driver().LaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ,
                                  config->blockDimX, config->blockDimY, config->blockDimZ,
                                  config->sharedMemBytes, config->hStream, parameters, extra));
}

DFX_EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                              unsigned grid_z, unsigned block_x, unsigned block_y,
                                              unsigned block_z, unsigned shared_bytes,
                                              CUstream stream, void** parameters) {
  return static_cast<CUresult>(fake::Driver().LaunchKernel(function, grid_x, grid_y, grid_z,
                                                           block_x, block_y, block_z, shared_bytes,
                                                           stream, parameters, nullptr));
}

DFX_EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*,
                                           const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                           const cuuint32_t*, CUtensorMapInterleave,
                                           CUtensorMapSwizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill) {
  std::memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}
