#include "dfx/engine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <list>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "dfx/call.h"
#include "dfx/error.h"
#include "dfx/lane.h"
#include "host/affinity.h"
#include "host/host_lane.h"
#include "host/stand_in.h"
#include "run_step.h"

namespace dfx {
namespace {

// Of a call that takes long: a line for it, and one for each of its lanes. `earlier`: the calls
// before it.
std::string Report(const Ticket& ticket, const std::list<std::shared_ptr<Ticket>>& earlier) {
  const Program& program = *ticket.program;
  const int64_t now = NowNs();
  auto seconds = [now](int64_t since) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(now - since) * 1e-9);
    return std::string(text);
  };
  std::string text = "dynaflow_xla: a call of '" + program.name() + "' has run for " +
                     seconds(ticket.since_ns) + " and goes on; its lanes:\n";
  for (int lane : program.used_lanes()) {
    const Call::LaneState& state = ticket.call->state(lane);
    const int32_t at = state.at.load(std::memory_order_acquire);
    const int32_t event = state.waits.event.load(std::memory_order_acquire);
    text += "  lane " + std::to_string(lane) + ": ";
    if (ticket.call->IsLaneDone(lane)) {
      text += "done\n";
      continue;
    }
    if (at < 0) {
      text += "has not begun";
      for (const auto& other : earlier) {
        if (other->call->failed() || other->call.get() == ticket.call.get()) continue;
        const auto& used = other->program->used_lanes();
        if (std::find(used.begin(), used.end(), lane) == used.end()) continue;
        if (other->call->IsLaneDone(lane)) continue;
        text += ", behind a call of '" + other->program->name() + "'";
        break;
      }
      text += "\n";
      continue;
    }
    if (event >= 0) {
      text += "has waited for event " + std::to_string(event) + " for " +
              seconds(state.waits.since_ns.load(std::memory_order_relaxed));
      if (const std::string& name = program.EventName(event); !name.empty()) text += ", " + name;
      if (const std::string& next = program.WaitName(lane, event); !next.empty()) {
        text += "; next is " + next;
      }
      text += "\n";
      continue;
    }
    const std::vector<Instr>& instructions = program.lane(lane);
    const Instr& instr = instructions[static_cast<size_t>(at)];
    if (instr.kind == Instr::kLaunch) {
      text += "runs '" + program.launches()[static_cast<size_t>(instr.a)].step->name() + "'\n";
    } else {
      text += (instr.kind == Instr::kWait ? "waits for event " : "signals event ") +
              std::to_string(instr.a) + "\n";
    }
  }
  return text;
}

}  // namespace

void RunLane(Lane& lane, Call& call) noexcept {
  const Program& program = call.program();
  const bool profile = call.profile();
  lane.SetCurrent(&call);
  BufferList ins, outs;
  std::atomic<int32_t>& at = call.state(lane.index()).at;
  for (const Instr& instr : program.lane(lane.index())) {
    if (call.failed()) break;
    at.store(at.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    call.Pause(lane.index());
    if (instr.kind == Instr::kRecord) {
      call.RecordEvent(instr.a);  // [Record]
      continue;
    }
    const int64_t t0 = profile ? NowNs() : 0;
    if (instr.kind == Instr::kWait) {
      // Nothing may follow what said that the lane is done; Run may have returned.
      if (call.IsLaneDone(lane.index())) break;
      const bool signalled = call.WaitEvent(instr.a, lane.index());  // [Wait]
      if (profile) call.Trace(kWaitTraceId + instr.a, lane.index(), t0, NowNs());
      if (!signalled) break;
      continue;
    }
    // [Launch]
    RunStep(lane, call, program.launches()[static_cast<size_t>(instr.a)], ins, outs);
    if (profile) call.Trace(-1 - instr.a, lane.index(), t0, NowNs());
  }
  lane.SetCurrent(nullptr);
  call.LaneLeft(lane.index());  // [Leave]
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
  int64_t watch_ns = 0;  // 0: calls are not watched
  void (*report)(const std::string&) = nullptr;
  std::list<std::shared_ptr<Ticket>> watched;  // in the order of the calls
  std::condition_variable look;                // for the watchdog: there is a call, or an end
  std::thread watchdog;

  // The watchdog's thread. It sleeps while there is no call, and reports without the mutex.
  void Watch() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!closed) {
      if (watched.empty() || watch_ns == 0) {
        look.wait(lock, [this] { return closed || (!watched.empty() && watch_ns != 0); });
        continue;
      }
      look.wait_for(lock, std::chrono::nanoseconds(std::max<int64_t>(watch_ns / 4, 1'000'000)));
      const int64_t due = NowNs() - watch_ns;
      std::list<std::shared_ptr<Ticket>> late;
      for (const auto& ticket : watched) {
        if (watch_ns == 0 || ticket->reported || ticket->since_ns > due) continue;
        ticket->reported = true;
        late.push_back(ticket);
      }
      if (late.empty()) continue;
      stats.reports += static_cast<int64_t>(late.size());
      std::list<std::shared_ptr<Ticket>> others(watched);
      void (*const tell)(const std::string&) = report;
      lock.unlock();
      for (const auto& ticket : late) tell(Report(*ticket, others));
      late.clear();  // without the mutex: whoever lets go last may destroy a program
      others.clear();
      lock.lock();
    }
  }

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
                                     bool profile, bool stay, uint64_t disturb, Team* team) {
  if (forked()) throw Error("process was forked after the engine started");
  if (in_lane) throw Error("a step of a plan called the engine: nested runs would deadlock");
  CheckCallable(program.get(), args, results);
  if (program->used_lanes().empty()) return {};

  const bool uses_caller = program->used_lanes().front() == 0;
  const bool caller_only = uses_caller && program->used_lanes().size() == 1;
  std::shared_ptr<Ticket> ticket;
  Queue entries;
  try {
    ticket = std::make_shared<Ticket>(program);
    entries.resize(program->used_lanes().size() - (uses_caller ? 1 : 0), ticket);
  } catch (const std::bad_alloc&) {
    throw Error("no memory for a call of '" + program->name() + "', which needs " +
                std::to_string(program->scratch_bytes()) + " bytes of scratch");
  }
  Call& call = *ticket->call;
  call.Reset(args.data(), results.data(), profile, disturb);
  std::optional<StandIn> standing_in;
  if (!caller_only) call.SetHelper(&standing_in.emplace(call, impl_->lanes));
  if (!uses_caller || caller_only) team = nullptr;
  uint64_t mine = 0;
  int core = -1;
  bool my_turn = true;
  bool watched = false;
  {
    // [Enqueue]
    std::lock_guard<std::mutex> lock(impl_->mutex);
    if (impl_->closed) throw Error("engine is shut down");
    // What can throw comes before the first push: no lane has heard of the call yet. After it
    // nothing may, until all lanes are done with the caller's memory.
    impl_->StartLanes(program->used_lanes());
    if (impl_->watch_ns != 0) {
      ticket->since_ns = NowNs();
      impl_->watched.push_back(ticket);
      watched = true;
      impl_->look.notify_one();
    }
    ++impl_->stats.live;
    ++impl_->stats.calls;
    for (int lane : program->used_lanes()) {
      if (lane == 0) continue;
      if (uses_caller && team == nullptr) core = impl_->lanes[lane]->KeepOffCaller();
      impl_->lanes[lane]->Push(entries, team == nullptr);
    }
    if (uses_caller) {
      mine = impl_->next_ticket++;
      my_turn = impl_->now_serving == mine;
    }
  }
  // Under the engine's mutex, when all lanes are done.
  auto leave = [&] {
    --impl_->stats.live;
    if (call.failed()) ++impl_->stats.failures;
    if (watched) impl_->watched.remove(ticket);
  };
  auto run_lane_zero = [&]() noexcept {
    if (!my_turn) {
      std::unique_lock<std::mutex> lock(impl_->mutex);
      impl_->turn.wait(lock, [&] { return impl_->now_serving == mine; });  // [TakeTurn]
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
      if (caller_only) leave();
    }
    impl_->turn.notify_all();
    if (standing_in) standing_in->RunTheRest();
  };
  if (team != nullptr) {
    core = sched_getcpu();
    auto run_member = [&](int member, int members) noexcept {
      const std::vector<int>& used = program->used_lanes();
      const auto place = static_cast<size_t>(member);
      if (member == 0) {
        for (size_t i = static_cast<size_t>(members); i < used.size(); ++i) {
          impl_->lanes[used[i]]->Wake();
        }
        run_lane_zero();
      } else if (place < used.size()) {
        LeaveCore(core);
        standing_in->RunOrWake(used[place]);  // [Take]
      }
    };
    using Member = decltype(run_member);
    team->Run([](void* state, int member,
                 int members) { (*static_cast<Member*>(state))(member, members); },
              &run_member);
  } else if (uses_caller) {
    run_lane_zero();
  }
  if (!caller_only) {
    call.WaitAllLanes();  // [Return]
    call.SpinUntilLeft();
    {
      std::lock_guard<std::mutex> lock(impl_->mutex);
      leave();
    }
    impl_->turn.notify_all();
  }
  call.ThrowIfFailed();
  if (!profile) return {};
  return call.TakeTrace();
}

bool Engine::Shutdown() {
  if (forked() || in_lane) return false;
  std::lock_guard<std::mutex> one_at_a_time(impl_->shutdown_mutex);
  {
    std::unique_lock<std::mutex> lock(impl_->mutex);
    impl_->closed = true;  // [Close]
    impl_->turn.wait(lock, [this] { return impl_->stats.live == 0; });
  }
  impl_->look.notify_all();
  if (impl_->watchdog.joinable()) impl_->watchdog.join();
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
  Stats found = impl_->stats;
  found.scratch_bytes = Scratch::Held();
  for (const auto& lane : impl_->lanes) {
    if (lane != nullptr) found.copied_bytes += lane->copied_bytes();
  }
  return found;
}

void Engine::SetWatchdog(int64_t after_ns, void (*report)(const std::string& text)) {
  if (forked()) throw Error("process was forked after the engine started");
  std::lock_guard<std::mutex> one_at_a_time(impl_->shutdown_mutex);
  std::lock_guard<std::mutex> lock(impl_->mutex);
  if (impl_->closed) throw Error("engine is shut down");
  impl_->watch_ns = after_ns;
  impl_->report = report;
  impl_->look.notify_one();
  if (after_ns == 0 || impl_->watchdog.joinable()) return;
  try {
    impl_->watchdog = std::thread([this] { impl_->Watch(); });
  } catch (const std::exception& e) {
    impl_->watch_ns = 0;
    throw Error(std::string("cannot start the watchdog: ") + e.what());
  }
}

void Engine::SetThreadHooks(void (*on_start)(int), void (*on_exit)(int)) {
  thread_start_hook = on_start;
  thread_exit_hook = on_exit;
}

}  // namespace dfx
