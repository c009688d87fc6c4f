#include "dfx/host/round_trip.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <thread>

#include "host/affinity.h"
#include "host/spin.h"

namespace dfx {
namespace {

// Short tries, so that some are whole where one of both threads loses its core now and then.
constexpr int kTries = 12;
constexpr int kTrips = 100;
// On a busy machine the two may not run at once for long. Then nothing is known.
constexpr int64_t kLongestNs = 10'000'000;

// Owned by both threads until the other one is joined. `ball` is odd when the other one has it,
// even when the caller has; each writes only what the other one waits for.
struct Court {
  alignas(64) std::atomic<int> ball{0};
  alignas(64) std::atomic<bool> over{false};
};

void Answer(Court* court) noexcept {
  for (int next = 1;; next += 2) {
    while (court->ball.load(std::memory_order_acquire) != next) {
      if (court->over.load(std::memory_order_relaxed)) return;
      CpuRelax();
    }
    court->ball.store(next + 1, std::memory_order_release);
  }
}

// Throws the ball and waits for it; whether it came back in time.
bool Trip(Court& court, int& ball, int64_t until) noexcept {
  court.ball.store(++ball, std::memory_order_release);
  ++ball;
  for (int turn = 1; court.ball.load(std::memory_order_acquire) != ball; ++turn) {
    if (turn % 1024 == 0 && NowNs() > until) return false;
    CpuRelax();
  }
  return true;
}

// The fastest try.
double Fastest(Court& court) noexcept {
  const int64_t until = NowNs() + kLongestNs;
  int ball = 0;
  if (!Trip(court, ball, until)) return 0.0;  // waits for the thread to begin
  int64_t best = std::numeric_limits<int64_t>::max();
  for (int turn = 0; turn < kTries; ++turn) {
    const int64_t begin = NowNs();
    for (int trip = 0; trip < kTrips; ++trip) {
      if (!Trip(court, ball, until)) return turn == 0 ? 0.0 : static_cast<double>(best) / kTrips;
    }
    best = std::min(best, NowNs() - begin);
  }
  return static_cast<double>(best) / kTrips;
}

}  // namespace

double RoundTripNs() noexcept {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0 && CPU_COUNT(&cores) < 2) return 0.0;
  Court court;
  std::thread other;
  try {
    other = std::thread(Answer, &court);
  } catch (const std::exception&) {
    return 0.0;
  }
  KeepOffThisCore(other.native_handle(), -1);  // by the caller: where it stands behind it, it waits
  const double best = Fastest(court);
  court.over.store(true, std::memory_order_relaxed);
  other.join();
  return best;
}

}  // namespace dfx
