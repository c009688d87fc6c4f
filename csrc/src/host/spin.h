#pragma once
#include <sched.h>

#include <cstdint>

#include "dfx/observer.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dfx {

inline void CpuRelax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

constexpr int64_t kSpinNs = 50'000;

// Runs `ready` until it is true or about `spin_ns` have passed. Yields the core on every eighth
// turn: two threads on one core would otherwise burn each other's time slice.
template <typename Ready>
bool SpinUntil(Ready ready, int64_t spin_ns = kSpinNs) {
  for (int turn = 0; turn < 64; ++turn) {
    if (ready()) return true;
    CpuRelax();
  }
  const int64_t end = NowNs() + spin_ns;
  do {
    for (int turn = 0; turn < 8; ++turn) {
      if (ready()) return true;
      CpuRelax();
    }
    sched_yield();
  } while (NowNs() < end);
  return ready();
}

}  // namespace dfx
