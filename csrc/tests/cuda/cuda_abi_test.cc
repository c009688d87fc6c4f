// Our declarations of the driver API against CUDA's own header, where that is installed.
#if __has_include(<cuda.h>)
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "cuda/cuda_driver.h"

namespace {

// Enumerations count as the integers that we declare.
template <typename T>
struct Plain {
  using type = T;
};
template <typename T>
  requires std::is_enum_v<T>
struct Plain<T> {
  using type = int;
};
#if CUDA_VERSION >= 12050
template <>
struct Plain<CUdevResource> {
  using type = dfx::CudaResource;
};
template <>
struct Plain<const CUdevResource> {
  using type = const dfx::CudaResource;
};
#endif
template <typename T>
struct Plain<T*> {
  using type = typename Plain<T>::type*;
};
template <typename Result, typename... Parameters>
struct Plain<Result(Parameters...)> {
  using type = typename Plain<Result>::type (*)(typename Plain<Parameters>::type...);
};

#define SAME(member, function)                                                                     \
  static_assert(                                                                                   \
      std::is_same_v<decltype(dfx::CudaDriver::member), typename Plain<decltype(function)>::type>, \
      #function)
SAME(Init, cuInit);
SAME(DriverGetVersion, cuDriverGetVersion);
SAME(GetErrorName, cuGetErrorName);
SAME(GetErrorString, cuGetErrorString);
SAME(DeviceGetCount, cuDeviceGetCount);
SAME(DeviceGet, cuDeviceGet);
SAME(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain);
SAME(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease);
SAME(CtxPushCurrent, cuCtxPushCurrent);
SAME(CtxPopCurrent, cuCtxPopCurrent);
SAME(CtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange);
SAME(StreamCreate, cuStreamCreateWithPriority);
SAME(StreamDestroy, cuStreamDestroy);
SAME(StreamSynchronize, cuStreamSynchronize);
SAME(StreamWaitEvent, cuStreamWaitEvent);
SAME(EventCreate, cuEventCreate);
SAME(EventDestroy, cuEventDestroy);
SAME(EventRecord, cuEventRecord);
SAME(MemAllocAsync, cuMemAllocAsync);
SAME(MemFreeAsync, cuMemFreeAsync);
SAME(MemcpyDtoDAsync, cuMemcpyDtoDAsync);
SAME(ModuleLoadData, cuModuleLoadData);
SAME(ModuleGetFunction, cuModuleGetFunction);
SAME(FuncSetAttribute, cuFuncSetAttribute);
SAME(LaunchKernel, cuLaunchKernel);
#if CUDA_VERSION >= 12050
SAME(DeviceGetDevResource, cuDeviceGetDevResource);
SAME(DevSmResourceSplitByCount, cuDevSmResourceSplitByCount);
SAME(DevResourceGenerateDesc, cuDevResourceGenerateDesc);
SAME(GreenCtxCreate, cuGreenCtxCreate);
SAME(GreenCtxDestroy, cuGreenCtxDestroy);
SAME(GreenCtxStreamCreate, cuGreenCtxStreamCreate);
static_assert(sizeof(dfx::CudaResource) == sizeof(CUdevResource));
static_assert(offsetof(dfx::CudaResource, sm_count) == offsetof(CUdevResource, sm.smCount));
static_assert(dfx::kSmResource == CU_DEV_RESOURCE_TYPE_SM);
static_assert(dfx::kGreenContextStream == CU_GREEN_CTX_DEFAULT_STREAM);
#endif
// cuStreamGetCaptureInfo_v2 is not declared by headers of CUDA 13, which have its successor; the
// library keeps it.
static_assert(dfx::kCudaOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(dfx::kCudaDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(dfx::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(dfx::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(dfx::kCaptureNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(dfx::kCaptureActive == CU_STREAM_CAPTURE_STATUS_ACTIVE);
static_assert(dfx::kCaptureInvalidated == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
static_assert(dfx::kMaxDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);

}  // namespace
#endif
