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
    CHECK(p.Finish().find("more than once") != std::string::npos);
  }
  SUBCASE("an event never recorded") {
    Program p(1, 1, 0, 0, 0, "p");
    p.AddWait(0, 0);
    CHECK(p.Finish().find("never recorded") != std::string::npos);
  }
  SUBCASE("lanes that wait for each other") {
    Program p(2, 2, 0, 0, 0, "p");
    p.AddWait(0, 0);
    p.AddRecord(0, 1);
    p.AddWait(1, 1);
    p.AddRecord(1, 0);
    CHECK(p.Finish().find("deadlock") != std::string::npos);
  }
  SUBCASE("a lane out of range") {
    Program p(1, 0, 0, 0, 0, "p");
    p.AddLaunch(1, MakeLaunch("x", Nothing));
    CHECK(p.Finish().find("lane 1") != std::string::npos);
  }
  SUBCASE("an event out of range") {
    Program p(1, 1, 0, 0, 0, "p");
    p.AddRecord(0, 3);
    CHECK(p.Finish().find("event 3") != std::string::npos);
  }
  SUBCASE("scratch out of bounds or unaligned") {
    Program p(1, 0, 0, 0, 64, "p");
    p.AddBuffer({BufferKind::kScratch, -1, 64, 8, 0, {}});
    CHECK(p.Finish().find("out of range") != std::string::npos);
    Program q(1, 0, 0, 0, 64, "q");
    q.AddBuffer({BufferKind::kScratch, -1, 8, 8, 0, {}});
    CHECK(q.Finish().find("out of range") != std::string::npos);
  }
  SUBCASE("a buffer that does not exist") {
    Program p(1, 0, 0, 0, 0, "p");
    p.AddLaunch(0, MakeLaunch("x", Nothing, {7}));
    CHECK(p.Finish().find("buffer 7") != std::string::npos);
  }
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
  REQUIRE(program->Finish() == "");
  CHECK(Engine::Get().Run(program, nullptr, nullptr).ok);
  CHECK_FALSE(returned);
  release = true;
  auto good = TwoLanes();
  REQUIRE(good->Finish() == "");
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
  REQUIRE(program->Finish() == "");
  auto result = Engine::Get().Run(program, nullptr, nullptr, true);
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
  REQUIRE(program->Finish() == "");
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
