// The CUDA runtime that XLA's plugin calls, on the stand-in driver: libcudart.so.13. Documented
// functions; NVIDIA's own runtime asks the driver for tables that are not documented.
#include <cuda.h>
#include <driver_types.h>
#include <vector_types.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#define DFX_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" CUfunction fake_registered(const char* name);

namespace {

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t Result(int status) {
  if (status != 0) last_error = static_cast<cudaError_t>(status);
  return static_cast<cudaError_t>(status);
}

// As the runtime does: a thread without a context gets the primary one of its device, and keeps it.
// (XLA's own kernels, sorts among them, are launched through the runtime on threads whose context
// somebody may have taken away again.)
void UseContext() {
  CUcontext context = nullptr;
  cuCtxGetCurrent(&context);
  if (context != nullptr) return;
  static std::once_flag retained[8];  // devices: the runtime holds each primary context once
  static CUcontext contexts[8];
  const int device = current_device;
  std::call_once(retained[device], [&] { cuDevicePrimaryCtxRetain(&contexts[device], device); });
  cuCtxSetCurrent(contexts[device]);
}

// Kernels by the address of the host's function that stands for them.
struct Registered {
  std::mutex mutex;
  std::map<const void*, std::string> names;
};

Registered& R() {
  static auto* registered = new Registered;
  return *registered;
}

}  // namespace

DFX_EXPORT cudaError_t cudaGetDeviceCount(int* n) {
  cuInit(0);
  return Result(cuDeviceGetCount(n));
}
DFX_EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
DFX_EXPORT cudaError_t cudaSetDevice(int device) {
  CUcontext context = nullptr;
  if (int status = cuDevicePrimaryCtxRetain(&context, device); status != 0) return Result(status);
  current_device = device;
  return Result(cuCtxSetCurrent(context));
}
DFX_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
DFX_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  return Result(cuDriverGetVersion(version));
}
DFX_EXPORT cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
DFX_EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
DFX_EXPORT const char* cudaGetErrorName(cudaError_t error) {
  const char* name = "unknown error";
  cuGetErrorName(static_cast<CUresult>(error), &name);
  return name;
}
DFX_EXPORT const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
DFX_EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return Result(cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), device));
}
DFX_EXPORT cudaError_t cudaDeviceSynchronize() {
  UseContext();
  return Result(cuCtxSynchronize());
}
DFX_EXPORT cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  UseContext();
  return Result(cuMemGetInfo(free, total));
}
DFX_EXPORT cudaError_t cudaMalloc(void** memory, size_t bytes) {
  UseContext();
  return Result(cuMemAlloc(reinterpret_cast<CUdeviceptr*>(memory), bytes));
}
DFX_EXPORT cudaError_t cudaFree(void* memory) {
  UseContext();
  return Result(cuMemFree(reinterpret_cast<CUdeviceptr>(memory)));
}
DFX_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  UseContext();
  return Result(cuStreamSynchronize(stream));
}
DFX_EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes,
                                       cudaMemcpyKind kind, cudaStream_t stream) {
  UseContext();
  const auto target = reinterpret_cast<CUdeviceptr>(to);
  const auto source = reinterpret_cast<CUdeviceptr>(from);
  if (kind == cudaMemcpyHostToDevice) return Result(cuMemcpyHtoDAsync(target, from, bytes, stream));
  if (kind == cudaMemcpyDeviceToHost) return Result(cuMemcpyDtoHAsync(to, source, bytes, stream));
  return Result(cuMemcpyAsync(target, source, bytes, stream));
}
DFX_EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  UseContext();
  return Result(cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(to),
                                static_cast<unsigned char>(value), bytes, stream));
}

// ---- what nvcc's host code calls: kernels that are part of a program ----

DFX_EXPORT void** __cudaRegisterFatBinary(void* image) { return new void*[2]{image, nullptr}; }
DFX_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
DFX_EXPORT void __cudaUnregisterFatBinary(void**) {}
DFX_EXPORT char __cudaInitModule(void**) { return 1; }
DFX_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
DFX_EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int,
                                         int) {}
DFX_EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int,
                                       uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> lock(R().mutex);
  R().names[host] = name;
}

DFX_EXPORT cudaError_t cudaGetFuncBySymbol(CUfunction* function, const void* symbol) {
  std::lock_guard<std::mutex> lock(R().mutex);
  const auto found = R().names.find(symbol);
  if (found == R().names.end()) return Result(cudaErrorInvalidDeviceFunction);
  *function = fake_registered(found->second.c_str());
  return cudaSuccess;
}

DFX_EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
DFX_EXPORT cudaError_t cudaFuncSetAttribute(const void* symbol, cudaFuncAttribute attribute,
                                            int value) {
  UseContext();
  CUfunction function = nullptr;
  const cudaError_t error = cudaGetFuncBySymbol(&function, symbol);
  if (error != cudaSuccess) return error;
  // The two enumerations agree.
  return Result(cuFuncSetAttribute(function, static_cast<CUfunction_attribute>(attribute), value));
}
DFX_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*,
                                                                              int block, size_t,
                                                                              unsigned) {
  *n = 2048 / (block > 0 ? block : 1);
  return cudaSuccess;
}
DFX_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* kernel,
                                                                     int block, size_t bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, kernel, block, bytes, 0);
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
static thread_local Configuration configuration;

DFX_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, void* stream) {
  configuration = {grid, block, bytes, stream};
  return 0;
}
DFX_EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* bytes,
                                                  void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *bytes = configuration.shared_bytes;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}

static cudaError_t Launch(CUfunction function, dim3 grid, dim3 block, void** arguments,
                          size_t bytes, cudaStream_t stream) {
  UseContext();
  return Result(cuLaunchKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                               static_cast<unsigned>(bytes), stream, arguments, nullptr));
}
DFX_EXPORT cudaError_t cudaLaunchKernel(const void* symbol, dim3 grid, dim3 block, void** arguments,
                                        size_t bytes, cudaStream_t stream) {
  CUfunction function = nullptr;
  const cudaError_t error = cudaGetFuncBySymbol(&function, symbol);
  return error != cudaSuccess ? error : Launch(function, grid, block, arguments, bytes, stream);
}
DFX_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* symbol) {
  return cudaGetFuncBySymbol(reinterpret_cast<CUfunction*>(kernel), symbol);
}
DFX_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block,
                                          void** arguments, size_t bytes, cudaStream_t stream) {
  return Launch(reinterpret_cast<CUfunction>(kernel), grid, block, arguments, bytes, stream);
}
