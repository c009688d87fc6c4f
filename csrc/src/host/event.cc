#include "dfx/event.h"

#include "dfx/observer.h"
#include "host/sleep.h"
#include "host/spin.h"

namespace dfx {

void Event::Signal() { Set(kSignalled); }

void Event::Abort() { Set(kAborted); }

// The first of both holds. Of an event that is aborted the waiters are unwinding already.
void Event::Set(uint32_t state) {
  // Mostly it is clear. To look first would fetch the line from a waiter's core twice.
  uint32_t before = kClear;
  while (!state_.compare_exchange_weak(before, state, std::memory_order_acq_rel,
                                       std::memory_order_relaxed)) {
    if (before >= kSignalled) return;
  }
  if (before == kAwaited) WakeAll(state_);
}

bool Event::Wait(Waiting* noted, int number, Helper* helper) {
  auto ready = [this] { return IsSet(); };
  SpinBudget budget(spin_ns_, kEventSpinNs);
  if (const int64_t begin = budget.Spin(ready); begin != 0) {
    if (helper != nullptr) helper->Help(number);
    if (noted != nullptr) {
      noted->since_ns.store(NowNs(), std::memory_order_relaxed);
      noted->event.store(number, std::memory_order_release);
    }
    while (!ready()) {
      uint32_t clear = kClear;
      state_.compare_exchange_strong(clear, kAwaited, std::memory_order_relaxed);
      SleepWhile(state_, kAwaited);
    }
    budget.Slept(begin);
    if (noted != nullptr) noted->event.store(-1, std::memory_order_release);
  }
  return state_.load(std::memory_order_acquire) == kSignalled;
}

}  // namespace dfx
