// A lane of this machine: a queue of calls, and the thread that runs them in order.
#pragma once
#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "dfx/call.h"
#include "dfx/lane.h"
#include "dfx/program.h"
#include "host/affinity.h"
#include "host/spin.h"

namespace dfx {

inline void (*thread_start_hook)(int) = nullptr;
inline void (*thread_exit_hook)(int) = nullptr;

// Whether this thread runs a lane now, so that a nested Run can be refused.
inline thread_local bool in_lane = false;

// A call in flight: kept alive until the last lane thread has left it, and its program with it.
struct Ticket {
  std::shared_ptr<const Program> program;
  std::unique_ptr<Call> call;
  int64_t since_ns = 0;  // of a watched call
  bool reported = false;

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

  // Moves the first of `entries` to the end of the queue, and wakes the lane's thread; without
  // `wake` somebody else is about to take the call over, who calls Wake when that fails.
  void Push(Queue& entries, bool wake) noexcept {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.splice(queue_.end(), entries, entries.begin());
      size_.store(queue_.size(), std::memory_order_release);
    }
    if (wake) Wake();
  }

  void Wake() noexcept { wake_.notify_one(); }

  // Moves the first call of the queue to `taken` if it is this one and the lane's thread has not
  // begun with it. The calling thread then is this lane until GiveBack.
  bool TakeOver(const Call& call, Queue& taken) {
    if (size_.load(std::memory_order_acquire) == 0) return false;
    const std::unique_lock<std::mutex> lock = LockSoon();
    if (busy_ || queue_.empty() || queue_.front()->call.get() != &call) return false;
    Take(taken);
    return true;
  }

  void GiveBack() noexcept {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      busy_.store(false, std::memory_order_release);
      if (queue_.empty()) return;
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
  // The lane's thread and a call's caller often come at the same moment, and hold the mutex for
  // some tens of nanoseconds: who sleeps for it at once must be woken by the other.
  std::unique_lock<std::mutex> LockSoon() {
    constexpr int kTries = 64;
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    for (int turn = 0; turn < kTries && !lock.owns_lock(); ++turn) {
      CpuRelax();
      static_cast<void>(lock.try_lock());
    }
    if (!lock.owns_lock()) lock.lock();
    return lock;
  }

  // Its callers hold the mutex.
  void Take(Queue& taken) noexcept {
    busy_.store(true, std::memory_order_relaxed);  // [Take]
    taken.splice(taken.begin(), queue_, queue_.begin());
    size_.store(queue_.size() + (stop_ ? 1 : 0), std::memory_order_release);
  }

  void Loop() {
    in_lane = true;  // before the hook: it must not run the engine either
    if (thread_start_hook != nullptr) thread_start_hook(index());
    std::atomic<int32_t> spin_ns{0};
    SpinBudget budget(spin_ns);
    for (;;) {
      Queue mine;
      // Calls often come in a row: a short spin saves the wake-up, which costs tens of us.
      const int64_t begin =
          budget.Spin([this] { return size_.load(std::memory_order_acquire) != 0; });
      {
        std::unique_lock<std::mutex> lock = LockSoon();
        // Its caller was faster. The next call is likely to come soon, too: spin for it.
        if (begin == 0 && !stop_ && queue_.empty()) continue;
        wake_.wait(lock, [this] { return stop_ || (!queue_.empty() && !busy_); });
        if (queue_.empty()) break;  // [Join]
        Take(mine);
      }
      if (begin != 0) budget.Slept(begin);
      RunLane(*this, *mine.front()->call);
      // Without the mutex, for which the next call's Push may be waiting already. Nobody who waits
      // for it has to be woken: only this thread waits for its own queue.
      busy_.store(false, std::memory_order_release);
    }
    if (thread_exit_hook != nullptr) thread_exit_hook(index());
  }

  std::thread thread_;
  std::mutex mutex_;  // guards queue_ and stop_, and what sets busy_
  std::condition_variable wake_;
  Queue queue_;
  // A thread runs a call of this lane: its own, or that call's caller. Whoever set it, under the
  // mutex, clears it; who sees it clear sees all that was done on the lane.
  std::atomic<bool> busy_{false};
  bool stop_ = false;
  int kept_off_ = -1;
  // The lane's thread spins on it, while others work on the above: a cache line of its own.
  alignas(64) std::atomic<size_t> size_{0};
};

}  // namespace dfx
