// A one-shot signal between lanes: spin briefly, then sleep in the kernel.
#pragma once
#include <atomic>
#include <cstdint>

namespace dfx {

// States of an event. Aborted is set when the call fails: waiters must unwind.
class Event {
 public:
  void Reset() { state_.store(kClear, std::memory_order_relaxed); }
  void Signal();
  void Abort();
  // True: signalled. False: aborted. Everything the signaller wrote before is visible after.
  bool Wait();

 private:
  enum : uint32_t { kClear = 0, kSignalled = 1, kAborted = 2 };
  std::atomic<uint32_t> state_{kClear};
};

}  // namespace dfx
