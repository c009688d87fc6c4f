#include "fake_cuda.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <utility>

using dfx::CudaAddress;
using dfx::CudaDevice;
using dfx::CudaStatus;

namespace {

// What an event's last record stands for.
struct Ticket {
  std::atomic<uint32_t> done{0};
  void Set() {
    done.store(1, std::memory_order_release);
    done.notify_all();
  }
  void Wait() {
    while (done.load(std::memory_order_acquire) == 0) done.wait(0, std::memory_order_acquire);
  }
};

struct Node {
  std::function<void()> run;
  std::set<size_t> after;
};

struct Capture {
  unsigned long long id = 0;
  CUstream_st* origin = nullptr;
  bool valid = true;
  bool ended = false;
  std::vector<Node> nodes;
  std::set<CUstream_st*> streams;
};

}  // namespace

struct CUctx_st {
  int retained = 0;
};
struct CUmod_st {};
struct CUfunc_st {
  std::vector<size_t> sizes;
  dfx::fake::Kernel run;
};

struct CUevent_st {
  std::shared_ptr<Ticket> ticket;    // of the last record outside captures
  std::shared_ptr<Capture> capture;  // or the capture of the last record,
  std::set<size_t> frontier;         // and the nodes that it stands for
};

struct CUstream_st {
  CUstream_st() : thread([this] { Loop(); }) {}
  ~CUstream_st() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stop = true;
    }
    wake.notify_all();
    thread.join();
  }
  void Push(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      queue.push_back(std::move(work));
    }
    wake.notify_all();
  }
  void Loop();

  std::shared_ptr<Capture> capture;  // guarded by the driver's mutex, as is
  std::set<size_t> frontier;         // the nodes that its next node comes after
  std::mutex mutex;                  // guards queue and stop
  std::condition_variable wake;
  std::deque<std::function<void()>> queue;
  bool stop = false;
  std::thread thread;  // last: it starts when the rest is there
};

namespace dfx::fake {

class Graph {
 public:
  std::vector<Node> nodes;
};

namespace {

constexpr CudaStatus kInvalidValue = 1;
constexpr CudaStatus kInvalidContext = 201;
constexpr CudaStatus kInvalidHandle = 400;
constexpr CudaStatus kNotFound = 500;
constexpr CudaStatus kIllegalAddress = 700;
constexpr CudaStatus kInvalidDevice = 101;
constexpr CudaStatus kInvalidImage = 200;
constexpr CudaStatus kCaptureUnsupported = 900;
constexpr CudaStatus kCaptureIsInvalid = 901;
constexpr CudaStatus kCaptureUnmatched = 903;
constexpr CudaStatus kCaptureUnjoined = 904;
constexpr CudaStatus kCaptureIsolation = 905;

struct State {
  std::mutex mutex;
  std::atomic<int> max_delay_us{0};
  std::atomic<CudaStatus> sticky{0};
  int devices = 1;
  CUctx_st context;
  std::set<CUstream_st*> streams;
  std::set<CUevent_st*> events;
  std::set<CudaAddress> memory;
  std::map<std::string, CUfunc_st> kernels;
  CUmod_st module;
  std::map<std::string, int64_t> calls;
  std::string fail_symbol;
  CudaStatus fail_status = 0;
  int fail_skip = 0;
  bool fail_taken = false;
  bool ignore_waits = false;
  int64_t blocking = 0;
  unsigned long long captures = 0;
  std::string misuse;
};

State& S() {
  static State* state = new State;
  return *state;
}

thread_local std::vector<CUctx_st*> contexts;

void Delay() {
  const int max = S().max_delay_us.load(std::memory_order_relaxed);
  if (max == 0) return;
  thread_local std::mt19937 random(std::random_device{}());
  const int us = static_cast<int>(random() % static_cast<unsigned>(max + 1));
  if (us > max / 2) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

enum Needs { kNothing, kContext };

// Start of every call; S().mutex is held. What it returns other than success, the call returns.
CudaStatus Enter(const char* symbol, Needs needs = kContext) {
  State& s = S();
  ++s.calls[symbol];
  if (s.fail_symbol == symbol && s.fail_skip-- == 0) {
    s.fail_symbol.clear();
    s.fail_taken = true;
    return s.fail_status;
  }
  if (s.sticky != 0) return s.sticky;
  if (needs == kContext && (contexts.empty() || contexts.back() != &s.context)) {
    return kInvalidContext;
  }
  return 0;
}

CudaStatus Misuse(const std::string& what) {
  if (S().misuse.empty()) S().misuse = what;
  return kInvalidHandle;
}

bool Known(CUstream_st* stream) { return S().streams.count(stream) != 0; }

// Makes `run` the stream's next operation; S().mutex is held.
CudaStatus Enqueue(CUstream_st* stream, std::function<void()> run) {
  if (!Known(stream)) return Misuse("work for a stream that does not exist");
  if (stream->capture != nullptr) {
    Capture& capture = *stream->capture;
    if (!capture.valid) return kCaptureIsInvalid;
    capture.nodes.push_back(Node{std::move(run), stream->frontier});
    stream->frontier = {capture.nodes.size() - 1};
    return 0;
  }
  stream->Push(std::move(run));
  return 0;
}

std::function<void()> AsKernel(std::function<bool()> function) {
  return [function = std::move(function)] {
    if (S().sticky != 0) return;  // the context is gone: nothing runs
    Delay();
    if (!function()) S().sticky = kIllegalAddress;
  };
}

#define LOCK std::lock_guard<std::mutex> lock(S().mutex)
#define ENTER(...) \
  LOCK;            \
  if (CudaStatus entered = Enter(__VA_ARGS__); entered != 0) return entered

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
    return d;
  }();
  return driver;
}

bool Reset(std::string* why) {
  LOCK;
  State& s = S();
  *why = s.misuse;
  auto count = [why](size_t n, const char* what) {
    if (n != 0) why->append(" ").append(std::to_string(n)).append(" ").append(what).append(" left");
  };
  count(s.streams.size(), "streams");
  count(s.events.size(), "events");
  // What a lost context held is gone with it.
  if (s.sticky == 0) count(s.memory.size(), "allocations");
  count(static_cast<size_t>(s.context.retained), "contexts");
  count(contexts.size(), "current contexts");
  for (CudaAddress address : s.memory) std::free(reinterpret_cast<void*>(address));
  s.memory.clear();
  s.max_delay_us = 0;
  s.sticky = 0;
  s.devices = 1;
  s.calls.clear();
  s.fail_symbol.clear();
  s.fail_taken = s.ignore_waits = false;
  s.blocking = 0;
  s.misuse.clear();
  return why->empty();
}

void SetMaxDelayUs(int us) { S().max_delay_us = us; }

void SetDevices(int count) {
  LOCK;
  S().devices = count;
}

void FailCall(const std::string& symbol, CudaStatus status, int skip) {
  LOCK;
  S().fail_symbol = symbol;
  S().fail_status = status;
  S().fail_skip = skip;
  S().fail_taken = false;
}

bool FailureTaken() {
  LOCK;
  S().fail_symbol.clear();
  return S().fail_taken;
}

void IgnoreWaits(bool ignore) {
  LOCK;
  S().ignore_waits = ignore;
}

int64_t Calls(const std::string& symbol) {
  LOCK;
  return S().calls[symbol];
}

int64_t BlockingCalls() {
  LOCK;
  return S().blocking;
}

void DefineKernel(const std::string& name, std::vector<size_t> sizes, Kernel function) {
  LOCK;
  S().kernels[name] = CUfunc_st{std::move(sizes), std::move(function)};
}

CudaStatus Launch(CUstream_st* stream, std::function<bool()> function) {
  ENTER("cuLaunchKernel", kNothing);
  return Enqueue(stream, AsKernel(std::move(function)));
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

CudaStatus BeginCapture(CUstream_st* stream) {
  LOCK;
  if (stream->capture != nullptr) return kCaptureUnsupported;
  stream->capture = std::make_shared<Capture>();
  stream->capture->id = ++S().captures;
  stream->capture->origin = stream;
  stream->capture->streams = {stream};
  stream->frontier.clear();
  return 0;
}

CudaStatus EndCapture(CUstream_st* stream, std::shared_ptr<Graph>* graph) {
  LOCK;
  *graph = nullptr;
  std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr || capture->origin != stream) return kCaptureUnmatched;
  std::set<size_t> joined = stream->frontier;
  for (size_t node = capture->nodes.size(); node-- > 0;) {
    if (joined.count(node) == 0) continue;
    joined.insert(capture->nodes[node].after.begin(), capture->nodes[node].after.end());
  }
  bool all_joined = true;
  for (CUstream_st* member : capture->streams) {
    for (size_t node : member->frontier) all_joined = all_joined && joined.count(node) != 0;
    member->capture = nullptr;
    member->frontier.clear();
  }
  capture->ended = true;
  if (!capture->valid) return kCaptureIsInvalid;
  if (!all_joined) return kCaptureUnjoined;
  *graph = std::make_shared<Graph>();
  (*graph)->nodes = std::move(capture->nodes);
  return 0;
}

CudaStatus LaunchGraph(const std::shared_ptr<Graph>& graph, CUstream_st* stream) {
  LOCK;
  return Enqueue(stream, [graph] {
    thread_local std::mt19937 random(std::random_device{}());
    std::vector<size_t> left(graph->nodes.size());
    for (size_t i = 0; i < left.size(); ++i) left[i] = i;
    std::vector<bool> done(left.size(), false);
    while (!left.empty()) {
      std::shuffle(left.begin(), left.end(), random);
      for (size_t i = 0; i < left.size(); ++i) {
        const Node& node = graph->nodes[left[i]];
        if (!std::all_of(node.after.begin(), node.after.end(), [&](size_t n) { return done[n]; })) {
          continue;
        }
        node.run();
        done[left[i]] = true;
        left.erase(left.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
    }
  });
}

}  // namespace dfx::fake

void CUstream_st::Loop() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mutex);
      wake.wait(lock, [this] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      work = std::move(queue.front());
      queue.pop_front();
    }
    work();
  }
}
