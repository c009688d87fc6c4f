#include "dfx/event.h"

#include "dfx/observer.h"
#include "host/spin.h"

namespace dfx {

void Event::Signal() {
  uint32_t expected = kClear;
  // An aborted event stays aborted: its waiters are unwinding already.
  if (state_.compare_exchange_strong(expected, kSignalled, std::memory_order_acq_rel)) {
    state_.notify_all();
  }
}

void Event::Abort() {
  uint32_t expected = kClear;
  if (state_.compare_exchange_strong(expected, kAborted, std::memory_order_acq_rel)) {
    state_.notify_all();
  }
}

bool Event::Wait(Waiting* noted, int number) {
  auto ready = [this] { return state_.load(std::memory_order_acquire) != kClear; };
  if (!SpinUntil(ready)) {
    if (noted != nullptr) {
      noted->since_ns.store(NowNs(), std::memory_order_relaxed);
      noted->event.store(number, std::memory_order_release);
    }
    while (!ready()) state_.wait(kClear, std::memory_order_acquire);
    if (noted != nullptr) noted->event.store(-1, std::memory_order_release);
  }
  return state_.load(std::memory_order_acquire) == kSignalled;
}

}  // namespace dfx
