// A round trip between two cores is a time, or 0 where there is one core.
#include <doctest/doctest.h>
#include <sched.h>

#include <thread>
#include <vector>

#include "dfx/host/round_trip.h"

using dfx::RoundTripNs;

TEST_CASE("a round trip takes a time where there are two cores, and moves nobody") {
  cpu_set_t cores;
  REQUIRE(sched_getaffinity(0, sizeof(cores), &cores) == 0);
  double took = 0.0;
  cpu_set_t after;
  for (int turn = 0; turn < 100 && took == 0.0; ++turn) took = RoundTripNs();  // busy machines
  if (CPU_COUNT(&cores) < 2) {
    CHECK(took == 0.0);
  } else {
    CHECK(took > 1.0);
  }
  REQUIRE(sched_getaffinity(0, sizeof(after), &after) == 0);
  CHECK(CPU_EQUAL(&after, &cores));
}

TEST_CASE("one core has nothing to go to") {
  std::thread([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    REQUIRE(sched_setaffinity(0, sizeof(one), &one) == 0);
    CHECK(RoundTripNs() == 0.0);
  }).join();
}

TEST_CASE("many ask at once") {
  std::vector<std::thread> askers;
  for (int i = 0; i < 8; ++i) {
    askers.emplace_back([] {
      for (int turn = 0; turn < 3; ++turn) CHECK(RoundTripNs() >= 0.0);
    });
  }
  for (auto& asker : askers) asker.join();
}
