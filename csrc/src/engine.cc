#include "dfx/engine.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "dfx/call.h"
#include "dfx/lane.h"
#include "spin.h"

namespace dfx {
namespace {

constexpr int kMaxLanes = 256;

void (*thread_start_hook)(int) = nullptr;
void (*thread_exit_hook)(int) = nullptr;

// Whether this thread runs a lane now, so that a nested Run can be refused.
thread_local bool in_lane = false;

// A call in flight: kept alive until the last lane thread has left it, and its program with it.
struct Ticket {
  std::shared_ptr<const Program> program;
  std::unique_ptr<Call> call;
  ~Ticket() { program->GiveCall(std::move(call)); }
};

class HostLane : public Lane {
 public:
  explicit HostLane(int index) : Lane(index) {}

  void Start() {
    thread_ = std::thread([this] { Loop(); });
  }

  void Push(std::shared_ptr<Ticket> ticket) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(ticket));
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

 private:
  void Loop() {
    if (thread_start_hook != nullptr) thread_start_hook(index());
    in_lane = true;
    for (;;) {
      std::shared_ptr<Ticket> ticket;
      // Calls often come in a row: a short spin saves the wake-up, which costs tens of us.
      SpinUntil([this] { return size_.load(std::memory_order_acquire) != 0; });
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
        if (queue_.empty()) break;
        ticket = std::move(queue_.front());
        queue_.pop_front();
        size_.store(queue_.size() + (stop_ ? 1 : 0), std::memory_order_release);
      }
      RunLane(*this, *ticket->call);
    }
    if (thread_exit_hook != nullptr) thread_exit_hook(index());
  }

  std::thread thread_;
  std::mutex mutex_;  // guards queue_ and stop_
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Ticket>> queue_;
  std::atomic<size_t> size_{0};
  bool stop_ = false;
};

}  // namespace

void RunLane(Lane& lane, Call& call) {
  const Program& program = call.program();
  lane.SetCurrent(&call);
  Buffer ins_small[16], outs_small[16];
  std::vector<Buffer> ins_large, outs_large;
  for (const Instr& instr : program.lane(lane.index())) {
    if (call.failed()) break;
    if (instr.kind == Instr::kRecord) {
      call.RecordEvent(instr.a);
      continue;
    }
    if (instr.kind == Instr::kWait) {
      if (!call.WaitEvent(instr.a)) break;
      continue;
    }
    const LaunchDesc& launch = program.launches()[static_cast<size_t>(instr.a)];
    Buffer* ins = ins_small;
    Buffer* outs = outs_small;
    if (launch.ins.size() > 16) {
      ins_large.resize(launch.ins.size());
      ins = ins_large.data();
    }
    if (launch.outs.size() > 16) {
      outs_large.resize(launch.outs.size());
      outs = outs_large.data();
    }
    for (size_t i = 0; i < launch.ins.size(); ++i) ins[i] = call.GetBuffer(launch.ins[i]);
    for (size_t i = 0; i < launch.outs.size(); ++i) outs[i] = call.GetBuffer(launch.outs[i]);
    const int64_t t0 = call.profile() ? NowNs() : 0;
    try {
      const int status =
          launch.launcher.fn(launch.launcher.user.get(), ins, static_cast<int>(launch.ins.size()),
                             outs, static_cast<int>(launch.outs.size()), &lane);
      if (status != 0) {
        call.Fail("step '" + launch.name + "' failed with status " + std::to_string(status));
      }
    } catch (const std::exception& e) {
      call.Fail("step '" + launch.name + "': " + e.what());
    } catch (...) {
      call.Fail("step '" + launch.name + "' threw something that is no std::exception");
    }
    if (call.profile()) call.Trace(-1 - instr.a, lane.index(), t0, NowNs());
  }
  lane.SetCurrent(nullptr);
  call.LaneDone(lane.index());
}

struct Engine::Impl {
  const pid_t pid = getpid();
  std::mutex mutex;  // guards everything below, and makes queueing on all lanes one step
  std::condition_variable turn;
  std::unique_ptr<HostLane> lanes[kMaxLanes];
  uint64_t next_ticket = 0;  // order of calls on lane 0
  uint64_t now_serving = 0;
  int64_t live = 0;
  int threads = 0;
  bool closed = false;

  HostLane* GetLane(int index) {
    if (lanes[index] == nullptr) lanes[index] = std::make_unique<HostLane>(index);
    return lanes[index].get();
  }
};

Engine::Engine() : impl_(new Impl) {}

Engine& Engine::Get() {
  static Engine* engine = new Engine;
  return *engine;
}

Lane* Engine::lane(int index) {
  if (index < 0 || index >= kMaxLanes) return nullptr;
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->GetLane(index);
}

Engine::Result Engine::Run(const std::shared_ptr<const Program>& program, void* const* args,
                           void* const* results, bool profile) {
  Result result;
  auto refuse = [&result](const char* why) {
    result.ok = false;
    result.error = why;
    return result;
  };
  if (getpid() != impl_->pid) return refuse("process was forked after the engine started");
  if (in_lane) return refuse("a step of a plan called the engine: nested runs would deadlock");
  if (program->used_lanes().empty()) return result;

  auto ticket = std::make_shared<Ticket>();
  ticket->program = program;
  ticket->call = program->TakeCall();
  Call& call = *ticket->call;
  call.Reset(args, results, profile);
  const bool uses_caller = program->used_lanes().front() == 0;
  uint64_t mine = 0;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    if (impl_->closed) return refuse("engine is shut down");
    ++impl_->live;
    for (int lane : program->used_lanes()) {
      if (lane == 0) continue;
      HostLane* host = impl_->GetLane(lane);
      if (!host->started()) {
        host->Start();
        ++impl_->threads;
      }
      host->Push(ticket);
    }
    if (uses_caller) mine = impl_->next_ticket++;
  }
  if (uses_caller) {
    HostLane* lane0 = nullptr;
    {
      std::unique_lock<std::mutex> lock(impl_->mutex);
      impl_->turn.wait(lock, [&] { return impl_->now_serving == mine; });
      lane0 = impl_->GetLane(0);
    }
    in_lane = true;
    RunLane(*lane0, call);
    in_lane = false;
    {
      std::lock_guard<std::mutex> lock(impl_->mutex);
      ++impl_->now_serving;
    }
    impl_->turn.notify_all();
  }
  call.WaitAllLanes();
  if (call.failed()) {
    result.ok = false;
    result.error = call.error();
  }
  if (profile) result.trace = call.TakeTrace();
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    --impl_->live;
  }
  impl_->turn.notify_all();
  return result;
}

void Engine::Shutdown() {
  if (getpid() != impl_->pid) return;  // a forked child has no lanes to stop
  std::unique_lock<std::mutex> lock(impl_->mutex);
  impl_->closed = true;
  impl_->turn.wait(lock, [this] { return impl_->live == 0; });
  for (auto& lane : impl_->lanes) {
    if (lane == nullptr || !lane->started()) continue;
    // Threads may still be leaving their last step, which needs no lock of ours.
    lock.unlock();
    lane->Stop();
    lock.lock();
    --impl_->threads;
  }
}

int64_t Engine::live_calls() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->live;
}

int Engine::n_threads() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  return impl_->threads;
}

void Engine::SetThreadHooks(void (*on_start)(int), void (*on_exit)(int)) {
  thread_start_hook = on_start;
  thread_exit_hook = on_exit;
}

}  // namespace dfx
