// A one-shot signal between lanes: spin briefly, then sleep in the kernel.
#pragma once
#include <atomic>
#include <cstdint>

namespace dfx {

// What a lane that sleeps waits for, for whoever looks on (see Engine::SetWatchdog). Written before
// it sleeps only: a wait that ends while it spins costs nothing more.
struct Waiting {
  std::atomic<int32_t> event{-1};
  std::atomic<int64_t> since_ns{0};
};

// What a thread may do for whom it waits for, before it sleeps.
class Helper {
 public:
  virtual ~Helper() = default;
  virtual void Help(int event) noexcept = 0;
};

// States of an event. Aborted is set when the call fails: waiters must unwind.
class Event {
 public:
  // What was learnt of how long it is waited for stays.
  void Reset() { state_.store(kClear, std::memory_order_relaxed); }
  void Signal();
  void Abort();
  // True: signalled. False: aborted. Everything the signaller wrote before is visible after.
  // `noted`, if given, holds `number` while this sleeps; `helper` is asked to help with `number`
  // before.
  bool Wait(Waiting* noted = nullptr, int number = -1, Helper* helper = nullptr);
  bool IsSet() const { return state_.load(std::memory_order_acquire) >= kSignalled; }

 private:
  // Awaited: clear, and somebody sleeps. A signal that nobody sleeps for needs no system call.
  enum : uint32_t { kClear = 0, kAwaited = 1, kSignalled = 2, kAborted = 3 };
  void Set(uint32_t state);
  std::atomic<uint32_t> state_{kClear};
  std::atomic<int32_t> spin_ns_{0};
};

}  // namespace dfx
