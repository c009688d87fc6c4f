// What a program computes and which programs run, one engine for all tests.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <stdexcept>
#include <thread>

#include "support.h"

using namespace dfx_test;  // NOLINT

TEST_CASE("Finish refuses broken programs") {
  SUBCASE("an event recorded twice") {
    Program p(1, 1, 0, 0, 0, "p");
    p.AddRecord(0, 0);
    p.AddRecord(0, 0);
    CHECK(Problem(p).find("more than once") != std::string::npos);
  }
  SUBCASE("an event never recorded") {
    Program p(1, 1, 0, 0, 0, "p");
    p.AddWait(0, 0);
    CHECK(Problem(p).find("never recorded") != std::string::npos);
  }
  SUBCASE("lanes that wait for each other") {
    Program p(2, 2, 0, 0, 0, "p");
    p.AddWait(0, 0);
    p.AddRecord(0, 1);
    p.AddWait(1, 1);
    p.AddRecord(1, 0);
    CHECK(Problem(p).find("deadlock") != std::string::npos);
  }
  SUBCASE("a lane out of range") {
    Program p(1, 0, 0, 0, 0, "p");
    CHECK_THROWS_WITH_AS(p.AddLaunch(1, MakeLaunch("x", Nothing)), "p: lane 1 of 1 lanes",
                         std::invalid_argument);
    CHECK_THROWS_AS(p.AddRecord(-1, 0), std::invalid_argument);
    CHECK(p.launches().empty());
  }
  SUBCASE("counts that cannot be") {
    CHECK_THROWS_AS(Program(257, 0, 0, 0, 0, "p"), std::invalid_argument);
    CHECK_THROWS_AS(Program(1, 0, -1, 0, 0, "p"), std::invalid_argument);
  }
  SUBCASE("a step without a function") {
    CHECK_THROWS_WITH_AS(dfx::MakeFunctionStep("x", nullptr), "'x' has no function",
                         std::invalid_argument);
  }
  SUBCASE("an event out of range") {
    Program p(1, 1, 0, 0, 0, "p");
    p.AddRecord(0, 3);
    CHECK(Problem(p).find("event 3") != std::string::npos);
  }
  SUBCASE("scratch out of bounds or unaligned") {
    Program p(1, 0, 0, 0, 64, "p");
    p.AddBuffer({BufferKind::kScratch, -1, 64, 8});
    CHECK(Problem(p).find("out of range") != std::string::npos);
    Program q(1, 0, 0, 0, 64, "q");
    q.AddBuffer({BufferKind::kScratch, -1, 8, 8});
    CHECK(Problem(q).find("out of range") != std::string::npos);
  }
  SUBCASE("a buffer that does not exist") {
    Program p(1, 0, 0, 0, 0, "p");
    p.AddLaunch(0, MakeLaunch("x", Nothing, {7}));
    CHECK(Problem(p).find("buffer 7") != std::string::npos);
  }
}

TEST_CASE("a program says what its lanes do") {
  CHECK(TwoLanes()->Describe() ==
        "program 'two lanes': 1 arguments, 1 results, 64 bytes of scratch\n"
        "  lane 0: wait 0, launch 'increment' (C function)\n"
        "  lane 1: launch 'double' (C function), record 0");
}

TEST_CASE("a step may mark its lane done early") {
  auto program = std::make_shared<Program>(2, 0, 0, 0, 0, "early");
  std::atomic<bool> returned{false};
  std::atomic<bool> release{false};
  program->AddLaunch(1, MakeLaunch("early", [&](const Buffer*, int, Buffer*, int, Lane* lane) {
                       lane->current()->LaneDone(1);
                       while (!release) std::this_thread::yield();
                       returned = true;
                       return 0;
                     }));
  REQUIRE(Problem(*program) == "");
  CHECK(RunOnHost(program, {}, {}).ok);
  CHECK_FALSE(returned);
  release = true;
  auto good = TwoLanes();
  REQUIRE(Problem(*good) == "");
  int64_t out = 0;
  CHECK(RunOne(good, 1, &out).ok);  // queues behind the early one
  CHECK(returned);
}

TEST_CASE("a profiled call has records whose lanes overlap") {
  auto program = std::make_shared<Program>(2, 0, 0, 0, 0, "profile");
  std::atomic<int> inside{0};
  for (int lane = 0; lane < 2; ++lane) {
    program->AddLaunch(lane, MakeLaunch("meet", [&](const Buffer*, int, Buffer*, int, Lane*) {
                         ++inside;
                         while (inside < 2) std::this_thread::yield();
                         return 0;
                       }));
  }
  REQUIRE(Problem(*program) == "");
  auto result = RunOnHost(program, {}, {}, true);
  REQUIRE(result.ok);
  REQUIRE(result.trace.size() == 2);
  const auto& a = result.trace[0];
  const auto& b = result.trace[1];
  CHECK(a.lane != b.lane);
  CHECK(std::max(a.t0_ns, b.t0_ns) < std::min(a.t1_ns, b.t1_ns));
}

#if !defined(__SANITIZE_THREAD__)
TEST_CASE("a forked child gets an error") {
  auto program = TwoLanes();
  REQUIRE(Problem(*program) == "");
  int64_t out = 0;
  REQUIRE(RunOne(program, 1, &out).ok);
  const pid_t child = fork();
  if (child == 0) {
    auto result = RunOne(program, 1, &out);
    _exit(!result.ok && result.error.find("forked") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}
#endif
