// The functions of NVIDIA's driver library that the engine calls, found at run time: neither CUDA's
// headers nor its libraries are needed to build, and a machine without them gets an error that says
// so. The declarations follow cuda.h; a test compares them with it where it is installed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "dfx/error.h"

struct CUctx_st;
struct CUdevResourceDesc_st;
struct CUevent_st;
struct CUfunc_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgreenCtx_st;
struct CUmod_st;
struct CUstream_st;

namespace dfx {

using CudaStatus = int;                  // CUresult
using CudaDevice = int;                  // CUdevice
using CudaAddress = unsigned long long;  // CUdeviceptr

// The values of CUresult and flags that the engine knows by name.
constexpr CudaStatus kCudaSuccess = 0;
constexpr CudaStatus kCudaOutOfMemory = 2;
constexpr CudaStatus kCudaDeinitialized = 4;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr int kCaptureNone = 0;
constexpr int kCaptureActive = 1;
constexpr int kCaptureInvalidated = 2;
constexpr int kMaxDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

constexpr int kSmResource = 1;               // CU_DEV_RESOURCE_TYPE_SM
constexpr unsigned kGreenContextStream = 1;  // CU_GREEN_CTX_DEFAULT_STREAM: must be given

// CUdevResource, of the kind that counts multiprocessors.
struct CudaResource {
  int type;
  unsigned char padding[92];
  unsigned sm_count;
  unsigned char rest[44];
};

// X(member, exported symbol, parameters). The symbols are pinned to the versions declared here.
#define DFX_CUDA_FUNCTIONS(X)                                                                   \
  X(Init, cuInit, (unsigned flags))                                                             \
  X(DriverGetVersion, cuDriverGetVersion, (int* version))                                       \
  X(GetErrorName, cuGetErrorName, (CudaStatus status, const char** name))                       \
  X(GetErrorString, cuGetErrorString, (CudaStatus status, const char** text))                   \
  X(DeviceGetCount, cuDeviceGetCount, (int* count))                                             \
  X(DeviceGet, cuDeviceGet, (CudaDevice * device, int ordinal))                                 \
  X(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUctx_st * *ctx, CudaDevice device))     \
  X(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CudaDevice device))                 \
  X(CtxPushCurrent, cuCtxPushCurrent_v2, (CUctx_st * ctx))                                      \
  X(CtxPopCurrent, cuCtxPopCurrent_v2, (CUctx_st * *ctx))                                       \
  X(CtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int* least, int* greatest))        \
  X(StreamCreate, cuStreamCreateWithPriority,                                                   \
    (CUstream_st * *stream, unsigned flags, int priority))                                      \
  X(StreamDestroy, cuStreamDestroy_v2, (CUstream_st * stream))                                  \
  X(StreamSynchronize, cuStreamSynchronize, (CUstream_st * stream))                             \
  X(StreamWaitEvent, cuStreamWaitEvent,                                                         \
    (CUstream_st * stream, CUevent_st * event, unsigned flags))                                 \
  X(StreamGetCaptureInfo, cuStreamGetCaptureInfo_v2,                                            \
    (CUstream_st * stream, int* status, unsigned long long* id, CUgraph_st** graph,             \
     CUgraphNode_st* const** dependencies, size_t* n_dependencies))                             \
  X(EventCreate, cuEventCreate, (CUevent_st * *event, unsigned flags))                          \
  X(EventDestroy, cuEventDestroy_v2, (CUevent_st * event))                                      \
  X(EventRecord, cuEventRecord, (CUevent_st * event, CUstream_st * stream))                     \
  X(MemAllocAsync, cuMemAllocAsync, (CudaAddress * address, size_t bytes, CUstream_st* stream)) \
  X(MemFreeAsync, cuMemFreeAsync, (CudaAddress address, CUstream_st * stream))                  \
  X(MemcpyDtoDAsync, cuMemcpyDtoDAsync_v2,                                                      \
    (CudaAddress to, CudaAddress from, size_t bytes, CUstream_st* stream))                      \
  X(ModuleLoadData, cuModuleLoadData, (CUmod_st * *module, const void* image))                  \
  X(ModuleGetFunction, cuModuleGetFunction,                                                     \
    (CUfunc_st * *function, CUmod_st * module, const char* name))                               \
  X(FuncSetAttribute, cuFuncSetAttribute, (CUfunc_st * function, int attribute, int value))     \
  X(LaunchKernel, cuLaunchKernel,                                                               \
    (CUfunc_st * function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream_st* stream,            \
     void** parameters, void** extra))

// Green contexts: drivers of CUDA 12.5 and later. Null in the table of an older one.
#define DFX_CUDA_GREEN_FUNCTIONS(X)                                                               \
  X(DeviceGetDevResource, cuDeviceGetDevResource,                                                 \
    (CudaDevice device, CudaResource * resource, int type))                                       \
  X(DevSmResourceSplitByCount, cuDevSmResourceSplitByCount,                                       \
    (CudaResource * result, unsigned* groups, const CudaResource* input, CudaResource* remaining, \
     unsigned flags, unsigned min_count))                                                         \
  X(DevResourceGenerateDesc, cuDevResourceGenerateDesc,                                           \
    (CUdevResourceDesc_st * *descriptor, CudaResource * resources, unsigned n))                   \
  X(GreenCtxCreate, cuGreenCtxCreate,                                                             \
    (CUgreenCtx_st * *context, CUdevResourceDesc_st * descriptor, CudaDevice device,              \
     unsigned flags))                                                                             \
  X(GreenCtxDestroy, cuGreenCtxDestroy, (CUgreenCtx_st * context))                                \
  X(GreenCtxStreamCreate, cuGreenCtxStreamCreate,                                                 \
    (CUstream_st * *stream, CUgreenCtx_st * context, unsigned flags, int priority))

// A table of those functions: libcuda's, or a fake's in tests.
struct CudaDriver {
#define DFX_DECLARE(member, symbol, parameters) CudaStatus(*member) parameters = nullptr;
  DFX_CUDA_FUNCTIONS(DFX_DECLARE)
  DFX_CUDA_GREEN_FUNCTIONS(DFX_DECLARE)
#undef DFX_DECLARE
};

// libcuda, loaded and initialised once for the process and never unloaded; the environment variable
// DYNAFLOW_XLA_LIBCUDA names another file than libcuda.so.1. Throws Error saying what is
// missing (no library, an old one, no device). After a failure the next call tries again.
const CudaDriver& LoadCudaDriver();

// What a function of the driver returned.
class CudaError : public Error {
 public:
  CudaError(CudaStatus status, const std::string& what) : Error(what), status_(status) {}
  // The context is of no use any more, for anybody in the process: a kernel faulted, or the device
  // fell off. (Every later call on the context returns the same status.)
  bool context_lost() const;

 private:
  CudaStatus status_;
};

// Throws CudaError "<call> failed: <name> (<number>): <text>" unless `status` is success.
void CheckCuda(const CudaDriver& driver, CudaStatus status, const char* call);

// Enqueues a copy within a device's memory. Throws CudaError.
void EnqueueCopy(const CudaDriver& driver, void* to, const void* from, size_t bytes,
                 CUstream_st* stream);

// Makes a context the calling thread's current one, and the one before it current again at the end.
class CudaContextScope {
 public:
  CudaContextScope(const CudaDriver& driver, CUctx_st* context);
  ~CudaContextScope();
  CudaContextScope(const CudaContextScope&) = delete;
  CudaContextScope& operator=(const CudaContextScope&) = delete;

 private:
  const CudaDriver& driver_;
};

}  // namespace dfx
