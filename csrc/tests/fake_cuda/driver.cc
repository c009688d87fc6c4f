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

CudaStatus PrimaryCtxRetain(CUctx_st** context, CudaDevice device) {
  ENTER("cuDevicePrimaryCtxRetain", kNothing);
  if (device < 0 || device >= S().devices) return kInvalidDevice;
  *context = &S().contexts[device];
  ++(*context)->retained;
  return 0;
}

CudaStatus PrimaryCtxRelease(CudaDevice device) {
  LOCK;
  if (device < 0 || device >= kMaxDevices) return kInvalidDevice;
  if (--S().contexts[device].retained < 0)
    return Misuse("context released more often than retained");
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

CudaStatus StreamCreate(CUstream_st** stream, unsigned flags, int priority) {
  ENTER("cuStreamCreateWithPriority");
  if (priority > 0 || priority < -5) return kInvalidValue;
  *stream = NewStream(CurrentDevice(), flags, priority);
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
  Order order;
  {
    ENTER("cuStreamSynchronize");
    stream = Of(stream);
    ++S().blocking;
    if (!Known(stream)) return Misuse("wait for a stream that does not exist");
    if (stream->capture != nullptr) {
      stream->capture->valid = false;
      return kCaptureUnsupported;
    }
    order = stream->order;
    stream->Push([ticket] { ticket->Set(); });
  }
  ticket->Wait();
  LOCK;
  HostKnows(order);
  return S().sticky;
}

CudaStatus StreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned flags) {
  ENTER("cuStreamWaitEvent");
  if (flags > 1) return kInvalidValue;  // CU_EVENT_WAIT_EXTERNAL is the only one
  stream = Of(stream);
  if (!Known(stream) || S().events.count(event) == 0) return Misuse("a wait that names nothing");
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
  stream->order.insert(event->order.begin(), event->order.end());
  if (S().ignore_waits) {
    stream->ignored.push_back(event->ticket);
  } else {
    stream->Push([ticket = event->ticket] { ticket->Wait(); });
  }
  return 0;
}

CudaStatus CaptureInfo(CUstream_st* stream, int* status, unsigned long long* id, CUgraph_st** graph,
                       CUgraphNode_st* const** dependencies, size_t* n) {
  ENTER("cuStreamGetCaptureInfo");
  stream = Of(stream);
  if (!Known(stream)) return Misuse("capture information of a stream that does not exist");
  *status = kCaptureNone;
  if (stream->capture != nullptr) {
    *status = stream->capture->valid ? kCaptureActive : kCaptureInvalidated;
    if (id != nullptr) *id = stream->capture->id;
    if (graph != nullptr) *graph = stream->capture->graph.get();
    // Valid until this thread asks again.
    thread_local std::vector<CUgraphNode_st*> given;
    given.assign(stream->frontier.begin(), stream->frontier.end());
    if (dependencies != nullptr) *dependencies = given.data();
    if (n != nullptr) *n = given.size();
  }
  return 0;
}

CudaStatus EventCreate(CUevent_st** event, unsigned flags) {
  ENTER("cuEventCreate");
  if (flags > 7) return kInvalidValue;
  *event = new CUevent_st;
  (*event)->device = CurrentDevice();
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
  stream = Of(stream);
  if (!Known(stream) || S().events.count(event) == 0) return Misuse("a record that names nothing");
  if (stream->capture != nullptr) {
    if (!stream->capture->valid) return kCaptureIsInvalid;
    event->capture = stream->capture;
    event->frontier = stream->frontier;
    event->ticket = nullptr;
    return 0;
  }
  if (event->device != stream->device) return kInvalidHandle;
  event->capture = nullptr;
  event->ticket = std::make_shared<Ticket>();
  event->order = stream->order;
  stream->Push([ticket = event->ticket] { ticket->Set(); });
  return 0;
}

CudaStatus MemAllocAsync(CudaAddress* address, size_t bytes, CUstream_st* stream) {
  ENTER("cuMemAllocAsync");
  stream = Of(stream);
  if (bytes == 0) return kInvalidValue;
  void* memory = std::malloc(bytes);
  *address = reinterpret_cast<CudaAddress>(memory);
  S().memory[*address] = bytes;
  Work work = HostWork(Kind::kAlloc, [] {});
  work.accesses = {{*address, bytes, true}};  // who uses it comes after this, and before its end
  return Enqueue(stream, std::move(work));
}

void Release(CudaAddress address) {
  LOCK;
  S().memory.erase(address);
  S().freed.erase(address);
  if (!S().keep_freed) std::free(reinterpret_cast<void*>(address));
}

// What was enqueued before may use the memory until the stream is here.
CudaStatus MemFreeAsync(CudaAddress address, CUstream_st* stream) {
  ENTER("cuMemFreeAsync");
  stream = Of(stream);
  const auto found = S().memory.find(address);
  if (found == S().memory.end() || !S().freed.insert(address).second) {
    return Misuse("memory freed twice");
  }
  const size_t bytes = found->second;
  std::function<void()> run;
  if (stream->capture != nullptr) {
    // A graph keeps its memory for its replays.
    S().memory.erase(address);
    S().freed.erase(address);
    S().graph_memory[address] = bytes;
    run = [owner = std::shared_ptr<void>(reinterpret_cast<void*>(address), std::free)] {};
  } else {
    run = [address] { Release(address); };
  }
  Work work = HostWork(Kind::kFree, std::move(run));
  work.accesses = {{address, bytes, true}};
  return Enqueue(stream, std::move(work));
}

CudaStatus MemcpyDtoD(CudaAddress to, CudaAddress from, size_t bytes, CUstream_st* stream) {
  ENTER("cuMemcpyDtoDAsync");
  stream = Of(stream);
  return Enqueue(stream, CopyWork(to, from, bytes));
}

CudaStatus ModuleLoadData(CUmod_st** module, const void* image) {
  ENTER("cuModuleLoadData");
  if (std::strncmp(static_cast<const char*>(image), "fake", 5) == 0) {
    *module = &S().module;
    return 0;
  }
  if (S().load_module == nullptr) return kInvalidImage;
  if (CudaStatus status = NotWhileCapturing(); status != 0) return status;
  *module = S().load_module(image);
  return 0;
}

CudaStatus ModuleGetFunction(CUfunc_st** function, CUmod_st* module, const char* name) {
  ENTER("cuModuleGetFunction");
  if (module != &S().module) {
    *function = S().find_function(module, name);
    return *function == nullptr ? kNotFound : 0;
  }
  auto it = S().kernels.find(name);
  if (it == S().kernels.end()) return kNotFound;
  *function = it->second.get();
  return 0;
}

CudaStatus FuncSetAttribute(CUfunc_st* function, int attribute, int value) {
  ENTER("cuFuncSetAttribute");
  if (attribute != kMaxDynamicSharedBytes) return 0;
  if (value < 0 || value > 232448) return kInvalidValue;
  function->max_shared_bytes = static_cast<unsigned>(value);
  return 0;
}

// What a device of compute capability 9.0 takes.
bool Fits(const CUfunc_st& function, const unsigned* grid, const unsigned* block,
          unsigned shared_bytes) {
  for (int i = 0; i < 3; ++i) {
    if (grid[i] == 0 || block[i] == 0) return false;
  }
  return grid[0] <= 0x7fffffff && grid[1] <= 65535 && grid[2] <= 65535 && block[0] <= 1024 &&
         block[1] <= 1024 && block[2] <= 64 && uint64_t{block[0]} * block[1] * block[2] <= 1024 &&
         shared_bytes <= function.max_shared_bytes;
}

CudaStatus LaunchKernel(CUfunc_st* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream_st* stream, void** parameters, void** extra) {
  ENTER("cuLaunchKernel");
  stream = Of(stream);
  const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
  if (!Fits(*function, grid, block, shared_bytes)) return kInvalidValue;
  if (!Known(stream)) return Misuse("a launch on a stream that does not exist");
  if (function->module->device != stream->device && function->run == nullptr) return kInvalidHandle;
  auto launch =
      std::make_shared<KernelLaunch>(KernelLaunch{function,
                                                  {grid_x, grid_y, grid_z},
                                                  {block_x, block_y, block_z},
                                                  shared_bytes,
                                                  Arguments(*function, parameters, extra)});
  return Enqueue(stream, KernelWork(std::move(launch)));
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
  stream_ = NewStream(0, kStreamNonBlocking, 0);
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
