// The fake driver as a shared library that takes libcuda's place (DYNAFLOW_XLA_LIBCUDA), for tests
// from Python. What the library is for those tests is in its environment: FAKE_CUDA_VERSION
// (13000), FAKE_CUDA_DEVICES (1), FAKE_CUDA_DELAY_US (0).
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "state.h"

using dfx::CudaAddress;
using dfx::CudaDevice;
using dfx::CudaResource;
using dfx::CudaStatus;
namespace fake = dfx::fake;

namespace {

int Setting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

// Kernels of the image "fake", on float32: scale(x, y, a, n): y = a x; add(x, y, z, n): z = x + y;
// fault(x): loses the context.
void DefineKernels() {
  auto floats = [](void* const* p, int i) { return *static_cast<float* const*>(p[i]); };
  fake::DefineKernel("scale", {8, 8, 4, 4}, [floats](void* const* p) {
    const auto n = *static_cast<const unsigned*>(p[3]);
    for (unsigned i = 0; i < n; ++i) {
      floats(p, 1)[i] = *static_cast<const float*>(p[2]) * floats(p, 0)[i];
    }
    return true;
  });
  fake::DefineKernel("add", {8, 8, 8, 4}, [floats](void* const* p) {
    const auto n = *static_cast<const unsigned*>(p[3]);
    for (unsigned i = 0; i < n; ++i) floats(p, 2)[i] = floats(p, 0)[i] + floats(p, 1)[i];
    return true;
  });
  fake::DefineKernel("fault", {8}, [](void* const*) { return false; });
}

}  // namespace

#define DFX_EXPORT __attribute__((visibility("default")))

extern "C" {

DFX_EXPORT CudaStatus cuInit(unsigned flags) {
  static const bool once = [] {
    fake::SetDevices(Setting("FAKE_CUDA_DEVICES", 1));
    fake::SetMaxDelayUs(Setting("FAKE_CUDA_DELAY_US", 0));
    fake::IgnoreWaits(Setting("FAKE_CUDA_IGNORE_WAITS", 0) != 0);
    DefineKernels();
    return true;
  }();
  return once ? fake::Driver().Init(flags) : 0;
}

DFX_EXPORT CudaStatus cuDriverGetVersion(int* version) {
  *version = Setting("FAKE_CUDA_VERSION", 13000);
  return 0;
}

DFX_EXPORT CudaStatus cuGetErrorName(CudaStatus status, const char** name) {
  return fake::Driver().GetErrorName(status, name);
}

DFX_EXPORT CudaStatus cuGetErrorString(CudaStatus status, const char** text) {
  return fake::Driver().GetErrorString(status, text);
}

DFX_EXPORT CudaStatus cuDeviceGetCount(int* count) { return fake::Driver().DeviceGetCount(count); }

DFX_EXPORT CudaStatus cuDeviceGet(CudaDevice* device, int ordinal) {
  return fake::Driver().DeviceGet(device, ordinal);
}

DFX_EXPORT CudaStatus cuDevicePrimaryCtxRetain(CUctx_st** context, CudaDevice device) {
  return fake::Driver().DevicePrimaryCtxRetain(context, device);
}

DFX_EXPORT CudaStatus cuDevicePrimaryCtxRelease_v2(CudaDevice device) {
  return fake::Driver().DevicePrimaryCtxRelease(device);
}

DFX_EXPORT CudaStatus cuCtxPushCurrent_v2(CUctx_st* context) {
  return fake::Driver().CtxPushCurrent(context);
}

DFX_EXPORT CudaStatus cuCtxPopCurrent_v2(CUctx_st** context) {
  return fake::Driver().CtxPopCurrent(context);
}

DFX_EXPORT CudaStatus cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return fake::Driver().CtxGetStreamPriorityRange(least, greatest);
}

DFX_EXPORT CudaStatus cuStreamCreateWithPriority(CUstream_st** stream, unsigned flags,
                                                 int priority) {
  return fake::Driver().StreamCreate(stream, flags, priority);
}

DFX_EXPORT CudaStatus cuStreamDestroy_v2(CUstream_st* stream) {
  return fake::Driver().StreamDestroy(stream);
}

DFX_EXPORT CudaStatus cuStreamSynchronize(CUstream_st* stream) {
  return fake::Driver().StreamSynchronize(stream);
}

DFX_EXPORT CudaStatus cuStreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned flags) {
  return fake::Driver().StreamWaitEvent(stream, event, flags);
}

DFX_EXPORT CudaStatus cuStreamGetCaptureInfo_v2(CUstream_st* stream, int* status,
                                                unsigned long long* id, CUgraph_st** graph,
                                                CUgraphNode_st* const** dependencies, size_t* n) {
  return fake::Driver().StreamGetCaptureInfo(stream, status, id, graph, dependencies, n);
}

DFX_EXPORT CudaStatus cuEventCreate(CUevent_st** event, unsigned flags) {
  return fake::Driver().EventCreate(event, flags);
}

DFX_EXPORT CudaStatus cuEventDestroy_v2(CUevent_st* event) {
  return fake::Driver().EventDestroy(event);
}

DFX_EXPORT CudaStatus cuEventRecord(CUevent_st* event, CUstream_st* stream) {
  return fake::Driver().EventRecord(event, stream);
}

DFX_EXPORT CudaStatus cuMemAllocAsync(CudaAddress* address, size_t bytes, CUstream_st* stream) {
  return fake::Driver().MemAllocAsync(address, bytes, stream);
}

DFX_EXPORT CudaStatus cuMemFreeAsync(CudaAddress address, CUstream_st* stream) {
  return fake::Driver().MemFreeAsync(address, stream);
}

DFX_EXPORT CudaStatus cuMemcpyDtoDAsync_v2(CudaAddress to, CudaAddress from, size_t bytes,
                                           CUstream_st* stream) {
  return fake::Driver().MemcpyDtoDAsync(to, from, bytes, stream);
}

DFX_EXPORT CudaStatus cuModuleLoadData(CUmod_st** module, const void* image) {
  return fake::Driver().ModuleLoadData(module, image);
}

DFX_EXPORT CudaStatus cuModuleGetFunction(CUfunc_st** function, CUmod_st* module,
                                          const char* name) {
  return fake::Driver().ModuleGetFunction(function, module, name);
}

DFX_EXPORT CudaStatus cuFuncSetAttribute(CUfunc_st* function, int attribute, int value) {
  return fake::Driver().FuncSetAttribute(function, attribute, value);
}

DFX_EXPORT CudaStatus cuLaunchKernel(CUfunc_st* function, unsigned grid_x, unsigned grid_y,
                                     unsigned grid_z, unsigned block_x, unsigned block_y,
                                     unsigned block_z, unsigned shared_bytes, CUstream_st* stream,
                                     void** parameters, void** extra) {
  return fake::Driver().LaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z,
                                     shared_bytes, stream, parameters, extra);
}

#if !defined(FAKE_CUDA_WITHOUT_GREEN_CONTEXTS)
DFX_EXPORT CudaStatus cuDeviceGetDevResource(CudaDevice device, CudaResource* resource, int type) {
  return fake::Driver().DeviceGetDevResource(device, resource, type);
}

DFX_EXPORT CudaStatus cuDevSmResourceSplitByCount(CudaResource* result, unsigned* groups,
                                                  const CudaResource* input,
                                                  CudaResource* remaining, unsigned flags,
                                                  unsigned min_count) {
  return fake::Driver().DevSmResourceSplitByCount(result, groups, input, remaining, flags,
                                                  min_count);
}

DFX_EXPORT CudaStatus cuDevResourceGenerateDesc(CUdevResourceDesc_st** descriptor,
                                                CudaResource* resources, unsigned n) {
  return fake::Driver().DevResourceGenerateDesc(descriptor, resources, n);
}

DFX_EXPORT CudaStatus cuGreenCtxCreate(CUgreenCtx_st** context, CUdevResourceDesc_st* descriptor,
                                       CudaDevice device, unsigned flags) {
  return fake::Driver().GreenCtxCreate(context, descriptor, device, flags);
}

DFX_EXPORT CudaStatus cuGreenCtxDestroy(CUgreenCtx_st* context) {
  return fake::Driver().GreenCtxDestroy(context);
}

DFX_EXPORT CudaStatus cuGreenCtxStreamCreate(CUstream_st** stream, CUgreenCtx_st* context,
                                             unsigned flags, int priority) {
  return fake::Driver().GreenCtxStreamCreate(stream, context, flags, priority);
}
#endif

// What tests call through ctypes.
// The number that a stream has in traces; 0 if there is none.
DFX_EXPORT uint64_t fake_stream_number(CUstream_st* stream) {
  LOCK;
  return fake::Known(stream) ? fake::Of(stream)->id : 0;
}
DFX_EXPORT void* fake_stream() { return (new fake::Stream)->get(); }

DFX_EXPORT CudaStatus fake_synchronize(CUstream_st* stream) {
  CUctx_st* popped = nullptr;
  const CudaStatus pushed = fake::Driver().CtxPushCurrent(&fake::S().contexts[0]);
  if (pushed != 0) return pushed;  // a lost device: nothing to pop
  const CudaStatus status = fake::Driver().StreamSynchronize(stream);
  fake::Driver().CtxPopCurrent(&popped);
  return status;
}

DFX_EXPORT CudaStatus fake_begin_capture(CUstream_st* stream) { return fake::BeginCapture(stream); }

// The graph's number, or 0.
DFX_EXPORT int fake_end_capture(CUstream_st* stream);
DFX_EXPORT CudaStatus fake_launch_graph(int number, CUstream_st* stream);
DFX_EXPORT unsigned fake_sms(CUstream_st* stream) { return fake::SmsOf(stream); }
DFX_EXPORT long long fake_calls(const char* symbol) { return fake::Calls(symbol); }
DFX_EXPORT void fake_fail(const char* symbol, CudaStatus status, int skip) {
  fake::FailCall(symbol, status, skip);
}

// 1 if nothing is left that somebody made, streams of `fake_stream` apart.
DFX_EXPORT int fake_left(char* why, size_t size);

}  // extern "C"

namespace {

std::map<int, std::shared_ptr<fake::Graph>>& Graphs() {
  static auto* graphs = new std::map<int, std::shared_ptr<fake::Graph>>;
  return *graphs;
}

}  // namespace

int fake_end_capture(CUstream_st* stream) {
  std::shared_ptr<fake::Graph> graph;
  if (fake::EndCapture(stream, &graph) != 0) return 0;
  const int number = static_cast<int>(Graphs().size()) + 1;
  Graphs()[number] = graph;
  return number;
}

CudaStatus fake_launch_graph(int number, CUstream_st* stream) {
  return fake::LaunchGraph(Graphs().at(number), stream);
}

int fake_left(char* why, size_t size) {
  const fake::State& s = fake::S();
  const std::string text = std::to_string(s.streams.size()) + " streams, " +
                           std::to_string(s.events.size()) + " events, " +
                           std::to_string(s.memory.size()) + " allocations, " +
                           std::to_string(s.greens.size()) + " green contexts, " +
                           std::to_string(s.contexts[0].retained) + " contexts " + s.misuse;
  std::strncpy(why, text.c_str(), size - 1);
  why[size - 1] = 0;
  return s.events.empty() && s.memory.empty() && s.greens.empty() && s.misuse.empty() ? 1 : 0;
}
