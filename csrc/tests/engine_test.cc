#define DOCTEST_CONFIG_IMPLEMENT
#include "dfx/engine.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "dfx/call.h"
#include "dfx/lane.h"
#include "dfx/program.h"
#include "steps.h"

namespace {

using dfx::Buffer;
using dfx::BufferKind;
using dfx::Engine;
using dfx::Lane;
using dfx::Program;
using dfx::test::At;
using dfx::test::MakeLaunch;
using dfx::test::Nothing;

// arg a, result r: lane 1 doubles a into scratch, lane 0 waits for it and adds one.
std::shared_ptr<Program> TwoLanes(const std::function<void()>& in_first = [] {}) {
  auto p = std::make_shared<Program>(2, 1, 1, 1, 64, "two lanes");
  const int a = p->AddBuffer({BufferKind::kArg, 0, 0, 8, 0, {1}});
  const int r = p->AddBuffer({BufferKind::kResult, 0, 0, 8, 0, {1}});
  const int s = p->AddBuffer({BufferKind::kScratch, -1, 0, 8, 0, {1}});
  p->AddLaunch(1, MakeLaunch("double",
                             [in_first](const Buffer* in, int, Buffer* out, int, Lane*) {
                               in_first();
                               At(out[0]) = 2 * At(in[0]);
                               return 0;
                             },
                             {a}, {s}));
  p->AddRecord(1, 0);
  p->AddWait(0, 0);
  p->AddLaunch(0, MakeLaunch("increment",
                             [](const Buffer* in, int, Buffer* out, int, Lane*) {
                               At(out[0]) = At(in[0]) + 1;
                               return 0;
                             },
                             {s}, {r}));
  return p;
}

Engine::Result RunOne(const std::shared_ptr<Program>& program, int64_t in, int64_t* out,
                      bool profile = false) {
  void* args[] = {&in};
  void* results[] = {out};
  return Engine::Get().Run(program, args, results, profile);
}

}  // namespace

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

int main(int argc, char** argv) {
  alarm(240);  // a deadlock ends the process instead of the day
  doctest::Context context(argc, argv);
  const int status = context.run();
  if (context.shouldExit()) return status;
  // Shutdown is final for the process, so it is tested after all else.
  auto slow = TwoLanes([] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
  bool ok = slow->Finish().empty();
  std::thread busy([&] {
    int64_t out = 0;
    ok = ok && RunOne(slow, 4, &out).ok && out == 9;
  });
  while (Engine::Get().live_calls() == 0) std::this_thread::yield();
  Engine::Get().Shutdown();
  busy.join();
  int64_t out = 0;
  ok = ok && !RunOne(slow, 1, &out).ok && Engine::Get().n_threads() == 0;
  if (!ok) std::fprintf(stderr, "shutdown test failed\n");
  return ok ? status : 1;
}
