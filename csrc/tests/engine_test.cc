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

TEST_CASE("values cross lanes in order") {
  auto program = TwoLanes();
  REQUIRE(program->Finish() == "");
  for (int64_t i = 0; i < 2000; ++i) {
    int64_t out = -1;
    REQUIRE(RunOne(program, i, &out).ok);
    REQUIRE(out == 2 * i + 1);
  }
  CHECK(Engine::Get().live_calls() == 0);
}

TEST_CASE("many threads, many programs, different lanes") {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([t, &wrong] {
      auto two = TwoLanes();
      if (!two->Finish().empty()) ++wrong;
      auto one = std::make_shared<Program>(3, 0, 1, 1, 0, "one lane");
      const int a = one->AddBuffer({BufferKind::kArg, 0, 0, 8, 0, {}});
      const int r = one->AddBuffer({BufferKind::kResult, 0, 0, 8, 0, {}});
      one->AddLaunch(t % 3, MakeLaunch("copy",
                                       [](const Buffer* in, int, Buffer* out, int, Lane*) {
                                         At(out[0]) = At(in[0]);
                                         return 0;
                                       },
                                       {a}, {r}));
      if (!one->Finish().empty()) ++wrong;
      for (int64_t i = 0; i < 300; ++i) {
        int64_t x = -1, y = -1;
        if (!RunOne(two, i, &x).ok || x != 2 * i + 1) ++wrong;
        if (!RunOne(one, i, &y).ok || y != i) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("a failing step fails its call only, and wakes the lane that waits for it") {
  auto bad = std::make_shared<Program>(2, 1, 0, 0, 0, "bad");
  std::atomic<bool> ran_after{false};
  bad->AddLaunch(1, MakeLaunch("boom", [](const Buffer*, int, Buffer*, int, Lane* lane) {
                   lane->current()->Fail("boom in the middle");
                   return 1;
                 }));
  bad->AddRecord(1, 0);
  bad->AddWait(0, 0);
  bad->AddLaunch(0, MakeLaunch("after", [&](const Buffer*, int, Buffer*, int, Lane*) {
                   ran_after = true;
                   return 0;
                 }));
  REQUIRE(bad->Finish() == "");
  auto good = TwoLanes();
  REQUIRE(good->Finish() == "");
  for (int i = 0; i < 50; ++i) {
    auto result = Engine::Get().Run(bad, nullptr, nullptr);
    CHECK_FALSE(result.ok);
    CHECK(result.error == "boom in the middle");
    int64_t out = 0;
    CHECK(RunOne(good, 5, &out).ok);
    CHECK(out == 11);
  }
  CHECK_FALSE(ran_after);
}

TEST_CASE("an exception in a step is an error of the call") {
  auto program = TwoLanes([] { throw std::runtime_error("thrown"); });
  REQUIRE(program->Finish() == "");
  int64_t out = 0;
  auto result = RunOne(program, 1, &out);
  CHECK_FALSE(result.ok);
  CHECK(result.error == "step 'double': thrown");
}

TEST_CASE("a step that runs the engine is refused, not deadlocked") {
  auto inner = TwoLanes();
  REQUIRE(inner->Finish() == "");
  for (int lane = 0; lane < 2; ++lane) {
    auto outer = std::make_shared<Program>(2, 0, 0, 0, 0, "outer");
    std::string error;
    outer->AddLaunch(lane, MakeLaunch("nested", [&](const Buffer*, int, Buffer*, int, Lane*) {
                       int64_t out = 0;
                       error = RunOne(inner, 1, &out).error;
                       return 0;
                     }));
    REQUIRE(outer->Finish() == "");
    CHECK(Engine::Get().Run(outer, nullptr, nullptr).ok);
    CHECK(error.find("nested") != std::string::npos);
  }
}

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

TEST_CASE("random programs compute what a sequential run computes") {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const int lanes = 1 + static_cast<int>(random() % 4);
    const int steps = 2 + static_cast<int>(random() % 24);
    auto p = std::make_shared<Program>(lanes, steps, 1, steps, 64 * steps, "random");
    const int arg = p->AddBuffer({BufferKind::kArg, 0, 0, 8, 0, {}});
    std::vector<int> buffer, lane_of;
    std::vector<int64_t> expect;
    for (int i = 0; i < steps; ++i) {
      buffer.push_back(p->AddBuffer({BufferKind::kScratch, -1, 64 * i, 8, 0, {}}));
      const int out = p->AddBuffer({BufferKind::kResult, i, 0, 8, 0, {}});
      lane_of.push_back(static_cast<int>(random() % static_cast<unsigned>(lanes)));
      std::vector<int32_t> ins{arg};
      int64_t value = 3 + i;
      for (int j = 0; j < i; ++j) {
        if (random() % 4 != 0) continue;
        ins.push_back(buffer[static_cast<size_t>(j)]);
        value += expect[static_cast<size_t>(j)] * 3;
        p->AddWait(lane_of.back(), j);
      }
      p->AddLaunch(lane_of.back(), MakeLaunch("step",
                                              [i](const Buffer* in, int n, Buffer* o, int, Lane*) {
                                                int64_t sum = At(in[0]) + i;
                                                for (int k = 1; k < n; ++k) sum += At(in[k]) * 3;
                                                At(o[0]) = At(o[1]) = sum;
                                                return 0;
                                              },
                                              ins, {buffer.back(), out}));
      p->AddRecord(lane_of.back(), i);
      expect.push_back(value);
    }
    REQUIRE(p->Finish() == "");
    int64_t in = 3;
    std::vector<int64_t> got(static_cast<size_t>(steps), -1);
    std::vector<void*> results;
    for (auto& value : got) results.push_back(&value);
    void* args[] = {&in};
    REQUIRE(Engine::Get().Run(p, args, results.data()).ok);
    CHECK(got == expect);
  }
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
