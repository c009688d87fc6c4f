#include "dfx/cuda/cuda_engine.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_driver.h"
#include "cuda/lane_streams.h"
#include "cuda/late_errors.h"
#include "dfx/call.h"
#include "mutants.h"
#include "run_step.h"

namespace dfx {
namespace {

// Whether this thread is inside Run, so that a step cannot call it again.
thread_local bool enqueuing = false;

struct Enqueuing {
  Enqueuing() { enqueuing = true; }
  ~Enqueuing() { enqueuing = false; }
};

// Streams and events for one Run at a time.
class LaneSet {
 public:
  LaneSet(const CudaDriver& driver, const CudaEngine::Options& options, const SmParts& parts,
          std::shared_ptr<LateErrors> late)
      : driver_(driver),
        options_(options),
        parts_(parts),
        late_(std::move(late)),
        external_(!options.streams.empty()) {}
  ~LaneSet() {
    for (auto& lane : lanes_) {
      if (Owned(lane->index())) driver_.StreamDestroy(lane->stream());
    }
    for (CUevent_st* event : events_) driver_.EventDestroy(event);
  }
  LaneSet(const LaneSet&) = delete;
  LaneSet& operator=(const LaneSet&) = delete;

  // Lane 0 is the caller's stream, the others are made here; or all are somebody else's.
  bool Owned(int lane) const { return !external_ && lane > 0; }
  CudaLane& lane(int index) { return *lanes_[static_cast<size_t>(index)]; }

  // A program's events come after a fork event and a join event for each lane.
  CUevent_st* fork() const { return events_[0]; }
  CUevent_st* join(int lane) const { return events_[1 + static_cast<size_t>(lane)]; }
  CUevent_st* event(int id) const {
    if (Planted(Mutant::kSharedEvent)) id = 0;
    return events_[1 + lanes_.size() + static_cast<size_t>(id)];
  }

  // Makes what a program needs and is not there yet. May throw half way, and be called again.
  void Grow(const Program& program, CUstream_st* caller) {
    for (int i = static_cast<int>(lanes_.size()); i < program.n_lanes(); ++i) {
      auto lane = std::make_unique<CudaLane>(i, driver_, late_, options_.check_steps);
      lanes_.reserve(lanes_.size() + 1);  // nothing may throw between a stream and its owner
      if (external_) {
        lane->SetStream(options_.streams[static_cast<size_t>(i)]);
      } else if (i > 0) {
        lane->SetStream(MakeLaneStream(driver_, parts_, i, Priority(i)));
      }
      lanes_.push_back(std::move(lane));
    }
    const size_t wanted = 1 + lanes_.size() + static_cast<size_t>(program.n_events());
    events_.reserve(std::max(wanted, events_.capacity()));
    while (events_.size() < wanted) {
      CUevent_st* event = nullptr;
      CheckCuda(driver_, driver_.EventCreate(&event, kEventDisableTiming), "cuEventCreate");
      events_.push_back(event);
    }
    if (!external_) lane(0).SetStream(caller);
  }

  // Whether its streams may serve a call in the capture `wanted` (0: in none).
  bool FitFor(unsigned long long wanted) {
    if (!external_ && (capture_ == 0 || capture_ == wanted)) return true;
    for (auto& lane : lanes_) {
      if (!external_ && lane->index() == 0) continue;  // some caller's, which may be gone
      int status = kCaptureNone;
      unsigned long long id = 0;
      CheckCuda(
          driver_,
          driver_.StreamGetCaptureInfo(lane->stream(), &status, &id, nullptr, nullptr, nullptr),
          "cuStreamGetCaptureInfo");
      if (status != kCaptureNone && id != wanted) return false;
    }
    capture_ = 0;
    return true;
  }
  void UsedIn(unsigned long long capture) {
    if (capture != 0) capture_ = capture;
  }

  // The host waits for its streams. Throws CudaError.
  void Drain() {
    for (auto& lane : lanes_) {
      if (external_ || Owned(lane->index())) {
        CheckCuda(driver_, driver_.StreamSynchronize(lane->stream()), "cuStreamSynchronize");
      }
    }
  }

 private:
  int Priority(int lane) const {
    const auto at = static_cast<size_t>(lane);
    return at < options_.priorities.size() ? options_.priorities[at] : 0;
  }

  const CudaDriver& driver_;
  const CudaEngine::Options& options_;
  const SmParts& parts_;
  const std::shared_ptr<LateErrors> late_;
  const bool external_;
  unsigned long long capture_ = 0;  // that its streams were last used in
  std::vector<std::unique_ptr<CudaLane>> lanes_;
  std::vector<CUevent_st*> events_;
};

// Device memory that goes in the order of a stream, whatever happens on the way.
class StreamMemory {
 public:
  StreamMemory(const CudaDriver& driver, CUstream_st* stream) : driver_(driver), stream_(stream) {}
  ~StreamMemory() { Free(); }
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  // Throws CudaError.
  void* Allocate(int64_t bytes) {
    CheckCuda(driver_, driver_.MemAllocAsync(&address_, static_cast<size_t>(bytes), stream_),
              "cuMemAllocAsync");
    return reinterpret_cast<void*>(address_);
  }
  CudaStatus Free() {
    const CudaAddress address = std::exchange(address_, 0);
    return address == 0 ? kCudaSuccess : driver_.MemFreeAsync(address, stream_);
  }

 private:
  const CudaDriver& driver_;
  CUstream_st* const stream_;
  CudaAddress address_ = 0;
};

}  // namespace

struct CudaEngine::Impl {
  Impl(const CudaDriver& d, Options o) : driver(d), options(std::move(o)) {}

  const CudaDriver& driver;
  const Options options;
  const pid_t pid = getpid();
  const std::shared_ptr<LateErrors> late = LateErrors::Make();
  CudaDevice device = 0;
  CUctx_st* context = nullptr;
  std::unique_ptr<SmParts> parts;

  mutable std::mutex mutex;  // guards everything below
  std::condition_variable returned;
  std::vector<std::unique_ptr<LaneSet>> free;
  std::string lost;  // why the context is gone
  Stats stats;
  std::map<std::string, CUmod_st*> modules;  // by image

  // The set used last comes first: its streams and events are warm.
  std::unique_ptr<LaneSet> Take(unsigned long long capture) {
    std::unique_lock<std::mutex> lock(mutex);
    const bool external = !options.streams.empty();
    for (;;) {
      for (size_t i = free.size(); i-- > 0;) {
        if (!free[i]->FitFor(capture)) continue;
        std::unique_ptr<LaneSet> set = std::move(free[i]);
        free.erase(free.begin() + static_cast<std::ptrdiff_t>(i));
        return set;
      }
      if (!external || stats.lane_sets == 0) {
        // Give must not fail, so room for all sets is made here.
        free.reserve(static_cast<size_t>(stats.lane_sets) + 1);
        auto set = std::make_unique<LaneSet>(driver, options, *parts, late);
        ++stats.lane_sets;
        return set;
      }
      if (!free.empty()) {
        throw Error(
            "the lanes' streams are in a stream capture that the caller's stream is not in");
      }
      returned.wait(lock);
    }
  }

  void Give(std::unique_ptr<LaneSet> set) noexcept {
    {
      std::lock_guard<std::mutex> lock(mutex);
      free.push_back(std::move(set));
    }
    returned.notify_one();
  }

  // Keeps in mind that the context is gone, if that is what the error says.
  void NoteError(const std::exception& error) noexcept {
    const auto* cuda = dynamic_cast<const CudaError*>(&error);
    if (cuda == nullptr || !cuda->context_lost()) return;
    std::lock_guard<std::mutex> lock(mutex);
    if (!lost.empty()) return;
    try {
      lost = error.what();
    } catch (const std::bad_alloc&) {
      lost = "a CUDA error";  // short enough to need no memory
    }
  }

  // Turns an exception of `action` into the call's error. False if there was one.
  template <typename Action>
  bool Try(Call& call, Action action) noexcept {
    try {
      action();
      return true;
    } catch (const std::exception& error) {
      NoteError(error);
      call.Fail(error.what());
    }
    return false;
  }

  unsigned long long CaptureOf(CUstream_st* caller) const {
    int status = kCaptureNone;
    unsigned long long id = 0;
    CheckCuda(driver, driver.StreamGetCaptureInfo(caller, &status, &id, nullptr, nullptr, nullptr),
              "cuStreamGetCaptureInfo");
    if (status == kCaptureInvalidated) {
      throw Error(
          "the caller's stream is in a capture that an earlier error made invalid: end it first");
    }
    return status == kCaptureNone ? 0 : id;
  }

  void Record(CUevent_st* event, CUstream_st* stream) {
    CheckCuda(driver, driver.EventRecord(event, stream), "cuEventRecord");
  }
  void Wait(CUstream_st* stream, CUevent_st* event) {
    CheckCuda(driver, driver.StreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
  }

  void Enqueue(Call& call, LaneSet& set, bool capturing) {
    const Program& program = call.program();
    BufferList ins, outs;
    for (const LaneInstr& step : program.issue_order()) {
      if (!Planted(Mutant::kEarlyRecord)) break;
      if (step.instr.kind != Instr::kRecord) continue;
      Record(set.event(step.instr.a), set.lane(step.lane).stream());
    }
    for (const LaneInstr& step : program.issue_order()) {
      if (call.failed()) return;
      CudaLane& lane = set.lane(step.lane);
      switch (step.instr.kind) {
        case Instr::kRecord:
          if (Planted(Mutant::kEarlyRecord)) break;
          Record(set.event(step.instr.a), lane.stream());
          break;
        case Instr::kWait:
          if (Planted(Mutant::kNoWait)) break;
          Wait(lane.stream(), set.event(step.instr.a));
          break;
        case Instr::kLaunch:
          lane.SetCurrent(&call);
          RunStep(lane, call, program.launches()[static_cast<size_t>(step.instr.a)], ins, outs);
          lane.SetCurrent(nullptr);
          if (options.check_steps && !capturing && !call.failed()) {
            const LaunchDesc& launch = program.launches()[static_cast<size_t>(step.instr.a)];
            const std::string what =
                "step '" + launch.step->name() + "': cuStreamSynchronize after it";
            CheckCuda(driver, driver.StreamSynchronize(lane.stream()), what.c_str());
          }
          break;
      }
    }
  }

  // Fork, steps, join. What was forked is joined whatever happens in between.
  void ForkAndJoin(Call& call, LaneSet& set, CUstream_st* caller, bool capturing) {
    std::vector<int> forked;
    Try(call, [&] {
      forked.reserve(call.program().used_lanes().size());
      for (int lane : call.program().used_lanes()) {
        if (set.lane(lane).stream() == caller) continue;
        if (forked.empty()) Record(set.fork(), caller);
        if (!Planted(Mutant::kNoFork)) Wait(set.lane(lane).stream(), set.fork());
        forked.push_back(lane);
      }
      Enqueue(call, set, capturing);
    });
    bool joined = true;
    for (int lane : forked) {
      joined &= Try(call, [&] {
        Record(set.join(lane), set.lane(lane).stream());
        if (!Planted(Mutant::kNoJoin)) Wait(caller, set.join(lane));
      });
    }
    // In a capture nothing runs yet; the capture is broken, which its end will report.
    if (!joined && !capturing) Try(call, [&] { set.Drain(); });
  }

  // The call, enqueued: its errors are in it. Throws where it was not started.
  std::unique_ptr<Call> Start(const Program& program, void* const* args, void* const* results,
                              CUstream_st* caller, void* scratch) {
    CudaContextScope scope(driver, context);
    const unsigned long long capture = CaptureOf(caller);
    std::unique_ptr<LaneSet> set = Take(capture);
    // From here on the set must be given back.
    StreamMemory memory(driver, caller);
    std::unique_ptr<Call> call;
    try {
      set->Grow(program, caller);
      if (program.scratch_bytes() > 0 && scratch == nullptr) {
        scratch = memory.Allocate(program.scratch_bytes());
      }
      call = std::make_unique<Call>(program, scratch);
    } catch (...) {
      Give(std::move(set));
      throw;
    }
    call->Reset(args, results, false);
    set->UsedIn(capture);
    if (Planted(Mutant::kEarlyFree)) memory.Free();
    ForkAndJoin(*call, *set, caller, capture != 0);
    // The caller's stream is past all lanes here, also after a failure.
    Try(*call, [&] { CheckCuda(driver, memory.Free(), "cuMemFreeAsync"); });
    Give(std::move(set));
    return call;
  }

  void CheckUse(const Program& program, int caller_device) const {
    if (getpid() != pid) throw Error("process was forked after the CUDA engine started");
    if (enqueuing) {
      throw Error("a step of a plan called the engine: nested runs are not possible");
    }
    if (caller_device >= 0 && caller_device != options.device) {
      throw Error("plan '" + program.name() + "' has its lanes on CUDA device " +
                  std::to_string(options.device) + ", its arrays are on device " +
                  std::to_string(caller_device) +
                  ": move them there (jax.device_put), or call fast.original");
    }
    const size_t given = options.streams.size();
    if (given != 0 && static_cast<size_t>(program.n_lanes()) > given) {
      throw Error("program '" + program.name() + "' has " + std::to_string(program.n_lanes()) +
                  " lanes; the engine was given " + std::to_string(given) + " streams");
    }
  }
};

CudaEngine::CudaEngine(Options options) : CudaEngine(LoadCudaDriver(), std::move(options)) {}

CudaEngine::CudaEngine(const CudaDriver& driver, Options options)
    : impl_(std::make_unique<Impl>(driver, std::move(options))) {
  const Options& o = impl_->options;
  int count = 0;
  CheckCuda(driver, driver.DeviceGetCount(&count), "cuDeviceGetCount");
  if (o.device < 0 || o.device >= count) {
    throw Error("there is no CUDA device " + std::to_string(o.device) + ": this process sees " +
                std::to_string(count));
  }
  CheckCuda(driver, driver.DeviceGet(&impl_->device, o.device), "cuDeviceGet");
  CheckCuda(driver, driver.DevicePrimaryCtxRetain(&impl_->context, impl_->device),
            "cuDevicePrimaryCtxRetain");
  try {
    CudaContextScope scope(driver, impl_->context);
    CheckPriorities(driver, o.priorities);
    if (!o.streams.empty() && !o.sms.empty()) {
      throw Error(
          "lanes on given streams cannot be confined: a stream's multiprocessors are "
          "chosen when it is made");
    }
    impl_->parts = std::make_unique<SmParts>(driver, impl_->device, o.sms);
  } catch (...) {
    driver.DevicePrimaryCtxRelease(impl_->device);
    throw;
  }
}

CudaEngine::~CudaEngine() {
  if (getpid() != impl_->pid) return;  // CUDA does not work in a forked child
  CUctx_st* popped = nullptr;
  const bool pushed = impl_->driver.CtxPushCurrent(impl_->context) == kCudaSuccess;
  for (auto& set : impl_->free) {
    try {
      set->Drain();
    } catch (const CudaError&) {
      // The device's errors were reported where somebody waited for the work.
    }
  }
  impl_->free.clear();
  impl_->parts.reset();  // after the streams in it
  if (pushed) impl_->driver.CtxPopCurrent(&popped);
  impl_->driver.DevicePrimaryCtxRelease(impl_->device);
}

void CudaEngine::Run(const std::shared_ptr<const Program>& program, std::span<void* const> args,
                     std::span<void* const> results, CUstream_st* caller, void* scratch,
                     int caller_device) {
  CheckCallable(program.get(), args, results);
  impl_->CheckUse(*program, caller_device);
  if (program->used_lanes().empty()) return;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    if (!impl_->lost.empty()) {
      throw Error("the CUDA context is lost: " + impl_->lost +
                  ". Start the process again; DYNAFLOW_XLA_CHECK_STEPS=1 names the step that "
                  "faults");
    }
    ++impl_->stats.calls;
  }
  Enqueuing guard;
  try {
    if (std::string earlier = impl_->late->Take(); !earlier.empty()) {
      throw Error("program '" + program->name() +
                  "' was not started, for what an earlier call made is not valid: " + earlier);
    }
    std::unique_ptr<Call> call;
    try {
      call = impl_->Start(*program, args.data(), results.data(), caller, scratch);
    } catch (const std::exception& error) {
      impl_->NoteError(error);
      throw Error("program '" + program->name() + "' was not started: " + error.what());
    }
    call->ThrowIfFailed();
    if (std::string late = impl_->late->Take(); !late.empty()) throw Error(late);
  } catch (...) {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    ++impl_->stats.failures;
    throw;
  }
}

int CudaEngine::device() const { return impl_->options.device; }
std::vector<int> CudaEngine::sms() const { return impl_->parts->sms(); }
const CudaDriver& CudaEngine::driver() const { return impl_->driver; }
CUctx_st* CudaEngine::context() const { return impl_->context; }

CUmod_st* CudaEngine::LoadModule(const std::string& image) {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  CUmod_st*& module = impl_->modules[image];
  if (module == nullptr) {
    // The zero at the end of the string is what ends PTX text.
    CheckCuda(impl_->driver, impl_->driver.ModuleLoadData(&module, image.c_str()),
              "cuModuleLoadData");
  }
  return module;
}

CudaEngine::Stats CudaEngine::stats() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->stats;
}

void CopyOnStream(const CudaEngine& engine, void* to, const void* from, size_t bytes,
                  CUstream_st* stream) {
  CudaContextScope scope(engine.driver(), engine.context());
  EnqueueCopy(engine.driver(), to, from, bytes, stream);
}

int CudaDeviceCount() {
  const CudaDriver& driver = LoadCudaDriver();
  int count = 0;
  CheckCuda(driver, driver.DeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

}  // namespace dfx
