#include <cstdlib>
#include <cstring>

#include "state.h"

namespace dfx::fake {
namespace {

CudaStatus Init(unsigned) {
  ENTER("cuInit", kNothing);
  return 0;
}

CudaStatus DriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

CudaStatus GetErrorName(CudaStatus status, const char** name) {
  static const std::map<CudaStatus, const char*> names = {
      {1, "CUDA_ERROR_INVALID_VALUE"},     {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {200, "CUDA_ERROR_INVALID_IMAGE"},   {500, "CUDA_ERROR_NOT_FOUND"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
  };
  const auto it = names.find(status);
  if (it == names.end()) return kInvalidValue;
  *name = it->second;
  return 0;
}

CudaStatus GetErrorString(CudaStatus, const char** text) {
  *text = "of the fake driver";
  return 0;
}

CudaStatus DeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount", kNothing);
  *count = S().devices;
  return 0;
}

CudaStatus DeviceGet(CudaDevice* device, int ordinal) {
  ENTER("cuDeviceGet", kNothing);
  if (ordinal < 0 || ordinal >= S().devices) return kInvalidDevice;
  *device = ordinal;
  return 0;
}

CudaStatus PrimaryCtxRetain(CUctx_st** context, CudaDevice) {
  ENTER("cuDevicePrimaryCtxRetain", kNothing);
  ++S().context.retained;
  *context = &S().context;
  return 0;
}

CudaStatus PrimaryCtxRelease(CudaDevice) {
  LOCK;
  if (--S().context.retained < 0) return Misuse("context released more often than retained");
  return S().sticky;
}

CudaStatus CtxPush(CUctx_st* context) {
  ENTER("cuCtxPushCurrent", kNothing);
  contexts.push_back(context);
  return 0;
}

CudaStatus CtxPop(CUctx_st** context) {
  LOCK;
  if (contexts.empty()) return Misuse("more contexts popped than pushed");
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}

CudaStatus PriorityRange(int* least, int* greatest) {
  ENTER("cuCtxGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return 0;
}

CudaStatus StreamCreate(CUstream_st** stream, unsigned, int priority) {
  ENTER("cuStreamCreateWithPriority");
  if (priority > 0 || priority < -5) return kInvalidValue;
  *stream = new CUstream_st;
  S().streams.insert(*stream);
  return 0;
}

CudaStatus StreamDestroy(CUstream_st* stream) {
  {
    LOCK;
    if (S().streams.erase(stream) == 0) return Misuse("a stream destroyed twice");
    if (stream->capture != nullptr) {
      stream->capture->valid = false;
      stream->capture->streams.erase(stream);
    }
  }
  delete stream;  // finishes its work; the real one does that in the background
  return S().sticky;
}

CudaStatus StreamSynchronize(CUstream_st* stream) {
  auto ticket = std::make_shared<Ticket>();
  {
    ENTER("cuStreamSynchronize");
    ++S().blocking;
    if (!Known(stream)) return Misuse("wait for a stream that does not exist");
    if (stream->capture != nullptr) {
      stream->capture->valid = false;
      return kCaptureUnsupported;
    }
    stream->Push([ticket] { ticket->Set(); });
  }
  ticket->Wait();
  return S().sticky;
}

CudaStatus StreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned) {
  ENTER("cuStreamWaitEvent");
  if (!Known(stream) || S().events.count(event) == 0) return Misuse("a wait that names nothing");
  if (S().ignore_waits) return 0;
  if (event->capture != nullptr && !event->capture->ended) {
    Capture& capture = *event->capture;
    if (!capture.valid) return kCaptureIsInvalid;
    if (stream->capture == nullptr) {  // it joins the capture
      stream->capture = event->capture;
      stream->frontier.clear();
      capture.streams.insert(stream);
    } else if (stream->capture != event->capture) {
      capture.valid = stream->capture->valid = false;
      return kCaptureIsolation;
    }
    stream->frontier.insert(event->frontier.begin(), event->frontier.end());
    return 0;
  }
  if (stream->capture != nullptr) {
    if (event->ticket == nullptr && event->capture == nullptr) return 0;  // never recorded
    stream->capture->valid = false;
    return kCaptureIsolation;
  }
  if (event->capture != nullptr) return kCaptureIsolation;
  if (event->ticket == nullptr) return 0;
  return Enqueue(stream, [ticket = event->ticket] { ticket->Wait(); });
}

CudaStatus CaptureInfo(CUstream_st* stream, int* status, unsigned long long* id, CUgraph_st**,
                       CUgraphNode_st* const**, size_t*) {
  ENTER("cuStreamGetCaptureInfo");
  if (!Known(stream)) return Misuse("capture information of a stream that does not exist");
  *status = kCaptureNone;
  if (stream->capture != nullptr) {
    *status = stream->capture->valid ? kCaptureActive : kCaptureInvalidated;
    if (id != nullptr) *id = stream->capture->id;
  }
  return 0;
}

CudaStatus EventCreate(CUevent_st** event, unsigned) {
  ENTER("cuEventCreate");
  *event = new CUevent_st;
  S().events.insert(*event);
  return 0;
}

CudaStatus EventDestroy(CUevent_st* event) {
  LOCK;
  if (S().events.erase(event) == 0) return Misuse("an event destroyed twice");
  delete event;
  return S().sticky;
}

CudaStatus EventRecord(CUevent_st* event, CUstream_st* stream) {
  ENTER("cuEventRecord");
  if (!Known(stream) || S().events.count(event) == 0) return Misuse("a record that names nothing");
  if (stream->capture != nullptr) {
    if (!stream->capture->valid) return kCaptureIsInvalid;
    event->capture = stream->capture;
    event->frontier = stream->frontier;
    event->ticket = nullptr;
    return 0;
  }
  event->capture = nullptr;
  event->ticket = std::make_shared<Ticket>();
  return Enqueue(stream, [ticket = event->ticket] { ticket->Set(); });
}

CudaStatus MemAllocAsync(CudaAddress* address, size_t bytes, CUstream_st* stream) {
  ENTER("cuMemAllocAsync");
  void* memory = std::malloc(bytes);
  *address = reinterpret_cast<CudaAddress>(memory);
  S().memory.insert(*address);
  return Enqueue(stream, [] {});
}

CudaStatus MemFreeAsync(CudaAddress address, CUstream_st* stream) {
  ENTER("cuMemFreeAsync");
  if (S().memory.erase(address) == 0) return Misuse("memory freed twice");
  void* memory = reinterpret_cast<void*>(address);
  if (stream->capture != nullptr) {
    // A graph keeps its memory for its replays.
    auto owner = std::shared_ptr<void>(memory, std::free);
    return Enqueue(stream, [owner] {});
  }
  return Enqueue(stream, [memory] { std::free(memory); });
}

CudaStatus MemcpyDtoD(CudaAddress to, CudaAddress from, size_t bytes, CUstream_st* stream) {
  ENTER("cuMemcpyDtoDAsync");
  return Enqueue(stream, AsKernel([=] {
                   std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
                   return true;
                 }));
}

CudaStatus ModuleLoadData(CUmod_st** module, const void* image) {
  ENTER("cuModuleLoadData");
  if (std::strcmp(static_cast<const char*>(image), "fake") != 0) return kInvalidImage;
  *module = &S().module;
  return 0;
}

CudaStatus ModuleGetFunction(CUfunc_st** function, CUmod_st*, const char* name) {
  ENTER("cuModuleGetFunction");
  auto it = S().kernels.find(name);
  if (it == S().kernels.end()) return kNotFound;
  *function = &it->second;
  return 0;
}

CudaStatus FuncSetAttribute(CUfunc_st*, int, int value) {
  ENTER("cuFuncSetAttribute");
  return value > 232448 ? kInvalidValue : 0;
}

CudaStatus LaunchKernel(CUfunc_st* function, unsigned grid_x, unsigned, unsigned, unsigned block_x,
                        unsigned, unsigned, unsigned, CUstream_st* stream, void** parameters,
                        void**) {
  ENTER("cuLaunchKernel");
  if (grid_x == 0 || block_x == 0 || block_x > 1024) return kInvalidValue;
  std::vector<std::vector<char>> copies;
  for (size_t i = 0; i < function->sizes.size(); ++i) {
    const char* from = static_cast<const char*>(parameters[i]);
    copies.emplace_back(from, from + function->sizes[i]);
  }
  return Enqueue(stream, AsKernel([run = function->run, copies]() mutable {
                   std::vector<void*> addresses;
                   for (auto& copy : copies) addresses.push_back(copy.data());
                   return run(addresses.data());
                 }));
}

}  // namespace

const CudaDriver& Driver() {
  static const CudaDriver driver = [] {
    CudaDriver d;
    d.Init = Init;
    d.DriverGetVersion = DriverGetVersion;
    d.GetErrorName = GetErrorName;
    d.GetErrorString = GetErrorString;
    d.DeviceGetCount = DeviceGetCount;
    d.DeviceGet = DeviceGet;
    d.DevicePrimaryCtxRetain = PrimaryCtxRetain;
    d.DevicePrimaryCtxRelease = PrimaryCtxRelease;
    d.CtxPushCurrent = CtxPush;
    d.CtxPopCurrent = CtxPop;
    d.CtxGetStreamPriorityRange = PriorityRange;
    d.StreamCreate = StreamCreate;
    d.StreamDestroy = StreamDestroy;
    d.StreamSynchronize = StreamSynchronize;
    d.StreamWaitEvent = StreamWaitEvent;
    d.StreamGetCaptureInfo = CaptureInfo;
    d.EventCreate = EventCreate;
    d.EventDestroy = EventDestroy;
    d.EventRecord = EventRecord;
    d.MemAllocAsync = MemAllocAsync;
    d.MemFreeAsync = MemFreeAsync;
    d.MemcpyDtoDAsync = MemcpyDtoD;
    d.ModuleLoadData = ModuleLoadData;
    d.ModuleGetFunction = ModuleGetFunction;
    d.FuncSetAttribute = FuncSetAttribute;
    d.LaunchKernel = LaunchKernel;
    AddGreenContexts(d);
    return d;
  }();
  return driver;
}

Stream::Stream() {
  LOCK;
  stream_ = new CUstream_st;
  S().streams.insert(stream_);
}

Stream::~Stream() { StreamDestroy(stream_); }

CudaStatus Stream::Synchronize() {
  auto ticket = std::make_shared<Ticket>();
  {
    LOCK;
    if (stream_->capture != nullptr) return kCaptureUnsupported;
    stream_->Push([ticket] { ticket->Set(); });
  }
  ticket->Wait();
  return S().sticky;
}

}  // namespace dfx::fake
