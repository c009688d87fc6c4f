// Lane threads keep off the caller's core where they can, and nothing breaks where they cannot.
#include <doctest/doctest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <thread>

#include "support.h"

using namespace dfx_test;  // NOLINT

namespace {

std::atomic<bool> mask_unreadable{false};

cpu_set_t Mask() {
  cpu_set_t mask;
  REQUIRE(sched_getaffinity(0, sizeof(mask), &mask) == 0);
  return mask;
}

std::vector<int> Cores(const cpu_set_t& mask) {
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &mask)) cores.push_back(core);
  }
  return cores;
}

cpu_set_t Only(const std::vector<int>& cores) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (int core : cores) CPU_SET(core, &mask);
  return mask;
}

// Runs a program on lane 0 and `aside`; returns the cores that `aside` may use.
std::vector<int> LaneCores(int aside) {
  std::vector<int> cores;
  std::atomic<bool> begun{false};
  auto p = std::make_shared<Program>(aside + 1, 0, 0, 0, 0, "cores");
  // A caller with nothing left to do would run the other lane itself.
  p->AddLaunch(0, MakeStep("here", [&](Lane*) {
                 while (!begun) std::this_thread::yield();
               }));
  p->AddLaunch(aside, MakeStep("aside", [&](Lane*) {
                 begun = true;
                 cpu_set_t mask;
                 CPU_ZERO(&mask);
                 syscall(SYS_sched_getaffinity, 0, sizeof(mask), &mask);
                 cores = Cores(mask);
               }));
  REQUIRE(Problem(*p) == "");
  auto result = RunOnHost(p, {}, {});
  REQUIRE_MESSAGE(result.ok, result.error);
  return cores;
}

// Runs `body` on a thread of its own, whose mask may change. What a check throws comes back.
template <typename Body>
void OnThread(Body body) {
  std::exception_ptr failure;
  std::thread([&] {
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

// The C library's, but for the failure that a kernel with more than 1024 cores gives.
extern "C" int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t* mask) noexcept {
  if (mask_unreadable) {
    errno = EINVAL;
    return -1;
  }
  CPU_ZERO_S(bytes, mask);
  return syscall(SYS_sched_getaffinity, pid, bytes, mask) < 0 ? -1 : 0;
}

TEST_CASE("a lane may run on every core of the caller but the caller's own") {
  OnThread([] {
    const std::vector<int> cores = Cores(Mask());
    if (cores.size() < 2) {
      MESSAGE("only one core: nothing to test");
      return;
    }
    int stayed = 0, kept_free = 0;
    for (int turn = 0; turn < 200 && stayed < 20; ++turn) {
      const int before = sched_getcpu();
      const std::vector<int> lane = LaneCores(50);
      // Exactly one core is kept free; which one is known if the caller was not moved meanwhile.
      REQUIRE(lane.size() == cores.size() - 1);
      if (sched_getcpu() != before) continue;
      ++stayed;
      kept_free += std::find(lane.begin(), lane.end(), before) == lane.end();
    }
    // Not all: on a busy machine a caller that was moved there and back looks as if it had stayed.
    CHECK(stayed > 0);
    CHECK(2 * kept_free > stayed);
  });
}

TEST_CASE("a lane follows a caller that moves, within the cores that the caller has") {
  OnThread([] {
    const std::vector<int> cores = Cores(Mask());
    if (cores.size() < 2) return;
    const std::vector<int> two{cores.front(), cores.back()};
    for (int turn = 0; turn < 20; ++turn) {
      // Moved to one core and then allowed both: it starts out on that one.
      const cpu_set_t one = Only({two[static_cast<size_t>(turn % 2)]}), both = Only(two);
      REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0);
      REQUIRE(sched_setaffinity(0, sizeof(both), &both) == 0);
      const std::vector<int> lane = LaneCores(50);
      REQUIRE(lane.size() == 1);
      CHECK((lane[0] == two[0] || lane[0] == two[1]));
    }
  });
}

TEST_CASE("a caller with one core still gets its values, and its lanes are not stuck there") {
  OnThread([] {
    const cpu_set_t all = Mask();
    const cpu_set_t one = Only({Cores(all).front()});
    REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0);
    CHECK(LaneCores(51).size() >= 1);  // started from here
    for (int turn = 0; turn < 20; ++turn) REQUIRE(Works());
    REQUIRE(sched_setaffinity(0, sizeof(all), &all) == 0);
    const size_t cores = Cores(all).size();
    CHECK(LaneCores(51).size() == (cores > 1 ? cores - 1 : 1));
  });
}

TEST_CASE("a mask that cannot be read changes nothing") {
  const size_t cores = Cores(Mask()).size();
  mask_unreadable = true;
  std::vector<int> lane;
  OnThread([&] {
    lane = LaneCores(52);
    for (int turn = 0; turn < 20; ++turn) CHECK(Works());
  });
  mask_unreadable = false;
  CHECK(lane.size() == cores);
}

TEST_CASE("a caller that is to stay has one core while its lane runs, and its own mask after") {
  OnThread([] {
    const cpu_set_t all = Mask();
    std::vector<int> during;
    auto p = std::make_shared<Program>(54, 0, 0, 0, 0, "stays");
    p->AddLaunch(0, MakeStep("here", [&](Lane*) { during = Cores(Mask()); }));
    p->AddLaunch(53, MakeStep("aside", [](Lane*) {}));
    REQUIRE(Problem(*p) == "");
    int stayed = 0;
    for (int turn = 0; turn < 200; ++turn) {
      auto result = RunOnHost(p, {}, {}, false, true);
      REQUIRE_MESSAGE(result.ok, result.error);
      const cpu_set_t after = Mask();
      REQUIRE(CPU_EQUAL(&after, &all));
      if (during.size() == 1) ++stayed;  // it does not if it was moved just before
    }
    if (Cores(all).size() > 1) CHECK(stayed > 100);
    REQUIRE(RunOnHost(p, {}, {}).ok);
    CHECK(during.size() == Cores(all).size());
  });
}
