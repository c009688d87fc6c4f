#pragma once
#include <algorithm>
#include <atomic>
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
// Inside of a call: the core is the call's own, and whoever sleeps is woken 50 to 100 us late. (Two
// small LSTMs of PyTorch's on two lanes: 470 us, with 50 us of spinning 560.)
constexpr int64_t kEventSpinNs = 200'000;
constexpr int64_t kLeastSpinNs = 1'000;
// To wake up takes so long at most, if there is a core: no part of what a spin would have to last.
constexpr int64_t kAwakeNs = 100'000;

// How long something is spun for before a thread sleeps: as long as that has paid of late. Nothing
// is yielded: on a busy machine the core would be gone for a time slice of somebody else's,
// milliseconds. Where the awaited thread needs this very core, spins fail and soon become short.
//
// What is learnt is kept by whom the budget is for, in one word, which threads may share: a lane's
// next call is awaited as long as the last ones, and so is each event of a program, some of which
// come soon and others after milliseconds.
class SpinBudget {
 public:
  // 0: nothing is known yet.
  explicit SpinBudget(std::atomic<int32_t>& ns, int64_t most_ns = kSpinNs)
      : kept_(ns), most_ns_(most_ns) {}

  // Runs `ready` until it is true or the budget is spent; the start, or 0 if it was true at once.
  template <typename Ready>
  int64_t Spin(Ready ready) {
    for (int turn = 0; turn < 64; ++turn) {
      if (ready()) return 0;
      CpuRelax();
    }
    const int64_t begin = NowNs();
    const int64_t end = begin + ns();
    do {
      for (int turn = 0; turn < 8; ++turn) {
        if (ready()) {
          Keep(most_ns_);
          return 0;
        }
        CpuRelax();
      }
    } while (NowNs() < end);
    return begin;
  }

  // After a sleep: spins get longer if they would have lasted, and shorter if not.
  void Slept(int64_t begin) {
    const bool lasts = NowNs() - begin < most_ns_ + kAwakeNs;
    Keep(lasts ? std::min(2 * ns(), most_ns_) : std::max(ns() / 2, kLeastSpinNs));
  }

 private:
  int64_t ns() const {
    const int32_t kept = kept_.load(std::memory_order_relaxed);
    return kept == 0 ? most_ns_ : kept;
  }
  void Keep(int64_t ns) { kept_.store(static_cast<int32_t>(ns), std::memory_order_relaxed); }

  std::atomic<int32_t>& kept_;
  const int64_t most_ns_;
};

}  // namespace dfx
