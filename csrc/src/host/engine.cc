#include "dfx/engine.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "dfx/call.h"
#include "dfx/error.h"
#include "dfx/lane.h"
#include "host/affinity.h"
#include "host/spin.h"
#include "run_step.h"

namespace dfx {
namespace {

void (*thread_start_hook)(int) = nullptr;
void (*thread_exit_hook)(int) = nullptr;

// Whether this thread runs a lane now, so that a nested Run can be refused.
thread_local bool in_lane = false;

// A call in flight: kept alive until the last lane thread has left it, and its program with it.
struct Ticket {
  std::shared_ptr<const Program> program;
  std::unique_ptr<Call> call;

  explicit Ticket(std::shared_ptr<const Program> of)
      : program(std::move(of)), call(program->TakeCall()) {}
  ~Ticket() { program->GiveCall(std::move(call)); }
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;
};

// A queue and its entries. An entry is made before the call is put in any queue, and then moved
// between lists: from there on nothing can fail for want of memory.
using Queue = std::list<std::shared_ptr<Ticket>>;

class HostLane : public Lane {
 public:
  explicit HostLane(int index) : Lane(index) {}

  // Throws std::system_error if there is no thread to be had.
  void Start() {
    thread_ = std::thread([this] { Loop(); });
  }

  // Moves the first of `entries` to the end of the queue.
  void Push(Queue& entries) noexcept {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.splice(queue_.end(), entries, entries.begin());
      size_.store(queue_.size(), std::memory_order_release);
    }
    wake_.notify_one();
  }

  void Stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      size_.store(queue_.size() + 1, std::memory_order_release);
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  bool started() const { return thread_.joinable(); }

  // Called by a thread that is about to run lane 0, under the engine's mutex.
  // Returns the core that is kept free, or -1.
  int KeepOffCaller() { return kept_off_ = KeepOffThisCore(thread_.native_handle(), kept_off_); }

 private:
  void Loop() {
    in_lane = true;  // before the hook: it must not run the engine either
    if (thread_start_hook != nullptr) thread_start_hook(index());
    for (;;) {
      Queue mine;
      // Calls often come in a row: a short spin saves the wake-up, which costs tens of us.
      SpinUntil([this] { return size_.load(std::memory_order_acquire) != 0; });
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) break;
        mine.splice(mine.begin(), queue_, queue_.begin());
        size_.store(queue_.size() + (stop_ ? 1 : 0), std::memory_order_release);
      }
      RunLane(*this, *mine.front()->call);
    }
    if (thread_exit_hook != nullptr) thread_exit_hook(index());
  }

  std::thread thread_;
  std::mutex mutex_;  // guards queue_ and stop_
  std::condition_variable wake_;
  Queue queue_;
  std::atomic<size_t> size_{0};
  bool stop_ = false;
  int kept_off_ = -1;
};

}  // namespace

void RunLane(Lane& lane, Call& call) noexcept {
  const Program& program = call.program();
  const bool profile = call.profile();
  lane.SetCurrent(&call);
  BufferList ins, outs;
  for (const Instr& instr : program.lane(lane.index())) {
    if (call.failed()) break;
    if (instr.kind == Instr::kRecord) {
      call.RecordEvent(instr.a);
      continue;
    }
    const int64_t t0 = profile ? NowNs() : 0;
    if (instr.kind == Instr::kWait) {
      const bool signalled = call.WaitEvent(instr.a);
      if (profile) call.Trace(kWaitTraceId + instr.a, lane.index(), t0, NowNs());
      if (!signalled) break;
      continue;
    }
    RunStep(lane, call, program.launches()[static_cast<size_t>(instr.a)], ins, outs);
    if (profile) call.Trace(-1 - instr.a, lane.index(), t0, NowNs());
  }
  lane.SetCurrent(nullptr);
  call.LaneLeft(lane.index());
}

struct Engine::Impl {
  const pid_t pid = getpid();
  std::mutex shutdown_mutex;  // taken before `mutex`
  std::mutex mutex;           // guards everything below, and makes queueing on all lanes one step
  std::condition_variable turn;
  std::unique_ptr<HostLane> lanes[kMaxLanes];
  uint64_t next_ticket = 0;  // order of calls on lane 0
  uint64_t now_serving = 0;
  Stats stats;
  bool closed = false;

  HostLane* GetLane(int index) {
    if (lanes[index] == nullptr) lanes[index] = std::make_unique<HostLane>(index);
    return lanes[index].get();
  }

  // Makes the lanes and starts their threads where that is still to be done.
  void StartLanes(const std::vector<int>& used) {
    for (int lane : used) {
      try {
        HostLane* host = GetLane(lane);
        if (lane == 0 || host->started()) continue;
        host->Start();
        ++stats.threads;
      } catch (const std::exception& e) {
        throw Error("cannot start lane " + std::to_string(lane) + ": " + e.what());
      }
    }
  }
};

Engine::Engine() : impl_(new Impl) {}

Engine& Engine::Get() {
  static Engine* engine = new Engine;
  return *engine;
}

Lane& Engine::lane(int index) {
  if (index < 0 || index >= kMaxLanes) {
    throw std::invalid_argument("there is no lane " + std::to_string(index));
  }
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return *impl_->GetLane(index);
}

bool Engine::forked() const { return getpid() != impl_->pid; }

std::vector<TraceRecord> Engine::Run(const std::shared_ptr<const Program>& program,
                                     std::span<void* const> args, std::span<void* const> results,
                                     bool profile, bool stay) {
  if (forked()) throw Error("process was forked after the engine started");
  if (in_lane) throw Error("a step of a plan called the engine: nested runs would deadlock");
  CheckCallable(program.get(), args, results);
  if (program->used_lanes().empty()) return {};

  std::shared_ptr<Ticket> ticket;
  Queue entries;
  try {
    ticket = std::make_shared<Ticket>(program);
    entries.resize(program->used_lanes().size(), ticket);
  } catch (const std::bad_alloc&) {
    throw Error("no memory for a call of '" + program->name() + "', which needs " +
                std::to_string(program->scratch_bytes()) + " bytes of scratch");
  }
  Call& call = *ticket->call;
  call.Reset(args.data(), results.data(), profile);
  const bool uses_caller = program->used_lanes().front() == 0;
  uint64_t mine = 0;
  int core = -1;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    if (impl_->closed) throw Error("engine is shut down");
    // What can throw comes before the first push: no lane has heard of the call yet. After it
    // nothing may, until all lanes are done with the caller's memory.
    impl_->StartLanes(program->used_lanes());
    ++impl_->stats.live;
    ++impl_->stats.calls;
    for (int lane : program->used_lanes()) {
      if (lane == 0) continue;
      if (uses_caller) core = impl_->lanes[lane]->KeepOffCaller();
      impl_->lanes[lane]->Push(entries);
    }
    if (uses_caller) mine = impl_->next_ticket++;
  }
  if (uses_caller) {
    {
      std::unique_lock<std::mutex> lock(impl_->mutex);
      impl_->turn.wait(lock, [&] { return impl_->now_serving == mine; });
    }
    in_lane = true;
    {
      StayOnCore staying(stay ? core : -1);
      RunLane(*impl_->lanes[0], call);
    }
    in_lane = false;
    {
      std::lock_guard<std::mutex> lock(impl_->mutex);
      ++impl_->now_serving;
    }
    impl_->turn.notify_all();
  }
  call.WaitAllLanes();
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    --impl_->stats.live;
    if (call.failed()) ++impl_->stats.failures;
  }
  impl_->turn.notify_all();
  call.ThrowIfFailed();
  if (!profile) return {};
  return call.TakeTrace();
}

bool Engine::Shutdown() {
  if (forked() || in_lane) return false;
  std::lock_guard<std::mutex> one_at_a_time(impl_->shutdown_mutex);
  {
    std::unique_lock<std::mutex> lock(impl_->mutex);
    impl_->closed = true;
    impl_->turn.wait(lock, [this] { return impl_->stats.live == 0; });
  }
  // Lanes may still be leaving their last step. From here on nobody else starts or stops a thread.
  for (auto& lane : impl_->lanes) {
    if (lane == nullptr || !lane->started()) continue;
    lane->Stop();
    std::lock_guard<std::mutex> lock(impl_->mutex);
    --impl_->stats.threads;
  }
  return true;
}

Engine::Stats Engine::stats() const {
  if (forked()) return {};  // the mutex may have been held when the process was forked
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->stats;
}

void Engine::SetThreadHooks(void (*on_start)(int), void (*on_exit)(int)) {
  thread_start_hook = on_start;
  thread_exit_hook = on_exit;
}

}  // namespace dfx
