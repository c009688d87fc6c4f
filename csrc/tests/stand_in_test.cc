// Lanes whose threads are late: whoever waits for them runs them, where that cannot deadlock.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "dfx/call.h"
#include "support.h"

namespace {

using dfx::Engine;
using dfx::Lane;
using dfx::Program;
using dfx_test::MakeStep;
using dfx_test::Problem;
using dfx_test::RunOnHost;

// Lanes from here on start their threads late: not before this lets them.
constexpr int kLate = 200;
std::atomic<bool> held{false};

// Before the first call of any test, as the engine asks for.
[[maybe_unused]] const bool hooked = [] {
  Engine::SetThreadHooks(
      [](int lane) {
        while (lane >= kLate && held.load()) std::this_thread::yield();
      },
      nullptr);
  return true;
}();

class LateThreads {
 public:
  LateThreads() { held = true; }
  ~LateThreads() { Release(); }
  static void Release() { held = false; }
};

// A program without memory; its lanes' threads start with its first call, so each has its own.
std::shared_ptr<Program> Empty(int lanes, int events) {
  return std::make_shared<Program>(lanes, events, 0, 0, 0, "late");
}

dfx::LaunchDesc Note(std::thread::id* who) {
  return MakeStep("note", [who](Lane*) { *who = std::this_thread::get_id(); });
}

// Runs a program whose late lanes' threads start after a while.
dfx_test::Outcome RunUntilReleased(const std::shared_ptr<Program>& program) {
  std::thread release([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    LateThreads::Release();
  });
  auto outcome = RunOnHost(program, {}, {});
  release.join();
  return outcome;
}

}  // namespace

TEST_CASE("a caller that is done runs a lane that has not begun") {
  LateThreads late;
  std::thread::id mine, other;
  auto program = Empty(kLate + 1, 0);
  program->AddLaunch(0, Note(&mine));
  program->AddLaunch(kLate, Note(&other));
  REQUIRE(Problem(*program) == "");
  const auto outcome = RunOnHost(program, {}, {});
  REQUIRE(outcome.error == "");
  CHECK(mine == std::this_thread::get_id());
  CHECK(other == mine);
}

TEST_CASE("a lane that waits runs the one that it waits for, and what that one waits for") {
  for (const bool in_steps : {false, true}) {
    CAPTURE(in_steps);
    LateThreads late;
    const int first = kLate + 1 + (in_steps ? 2 : 0), second = first + 1;
    std::vector<int> order;
    auto note = [&order](int what) {
      return MakeStep("note", [&order, what](Lane*) { order.push_back(what); });
    };
    auto program = Empty(second + 1, 2);
    // What a gate does, or what the engine does for an instruction.
    auto record = [&](int lane, int event) {
      if (!in_steps) return program->AddRecord(lane, event);
      program->AddStepRecord(lane, event);
      program->AddLaunch(
          lane, MakeStep("record", [event](Lane* self) { self->current()->RecordEvent(event); }));
    };
    auto wait = [&](int lane, int event) {
      if (!in_steps) return program->AddWait(lane, event);
      program->AddStepWait(lane, event);
      program->AddLaunch(lane, MakeStep("wait", [event](Lane* self) {
                           self->current()->WaitEvent(event, self->index());
                         }));
    };
    program->AddLaunch(first, note(1));
    record(first, 0);
    wait(second, 0);
    program->AddLaunch(second, note(2));
    record(second, 1);
    wait(0, 1);
    program->AddLaunch(0, note(3));
    REQUIRE(Problem(*program) == "");
    const auto outcome = RunOnHost(program, {}, {});
    REQUIRE(outcome.error == "");
    CHECK(order == std::vector<int>{1, 2, 3});
  }
}

TEST_CASE("a lane that would wait for the waiting one is left to its own thread") {
  LateThreads late;
  const int lane = kLate + 10;
  std::thread::id who;
  auto program = Empty(lane + 1, 2);
  program->AddRecord(lane, 0);
  program->AddWait(lane, 1);
  program->AddLaunch(lane, Note(&who));
  program->AddWait(0, 0);
  program->AddRecord(0, 1);
  REQUIRE(Problem(*program) == "");
  const auto outcome = RunUntilReleased(program);
  REQUIRE(outcome.error == "");
  CHECK(who != std::thread::id());
  CHECK(who != std::this_thread::get_id());
}

TEST_CASE("what a step signals without saying so is waited for") {
  LateThreads late;
  const int lane = kLate + 11;
  auto program = Empty(lane + 1, 1);
  program->AddLaunch(lane, MakeStep("record", [](Lane* self) { self->current()->RecordEvent(0); }));
  program->AddLaunch(0, MakeStep("wait", [](Lane* self) { self->current()->WaitEvent(0, 0); }));
  REQUIRE(Problem(*program) == "");
  const auto outcome = RunUntilReleased(program);
  CHECK(outcome.error == "");
}

TEST_CASE("a late lane runs its calls in order, whoever runs them") {
  LateThreads late;
  const int lane = kLate + 12;
  constexpr int kCalls = 64;
  std::atomic<int> inside{0};
  std::atomic<bool> overlapped{false};
  auto program = Empty(lane + 1, 0);
  program->AddLaunch(0, MakeStep("nothing", [](Lane*) {}));
  program->AddLaunch(lane, MakeStep("alone", [&](Lane*) {
                       if (inside.fetch_add(1) != 0) overlapped = true;
                       std::this_thread::yield();
                       inside.fetch_sub(1);
                     }));
  REQUIRE(Problem(*program) == "");
  std::atomic<int> ran{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (int i = 0; i < kCalls; ++i) {
        if (RunOnHost(program, {}, {}).ok) ++ran;
        if (i == kCalls / 2) LateThreads::Release();
      }
    });
  }
  // Until its thread starts, a call that another's stands before waits for that thread.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  LateThreads::Release();
  for (auto& caller : callers) caller.join();
  CHECK(ran == 4 * kCalls);
  CHECK(!overlapped);
}

TEST_CASE("a step that fails in another lane's stead fails its call, and the next one works") {
  LateThreads late;
  const int lane = kLate + 13;
  std::atomic<bool> fails{true};
  auto program = Empty(lane + 1, 1);
  program->AddLaunch(
      lane, dfx_test::MakeLaunch("fails", [&](const dfx::Buffer*, int, dfx::Buffer*, int, Lane*) {
        return fails ? 3 : 0;
      }));
  program->AddRecord(lane, 0);
  program->AddWait(0, 0);
  program->AddLaunch(0, MakeStep("nothing", [](Lane*) {}));
  REQUIRE(Problem(*program) == "");
  auto outcome = RunOnHost(program, {}, {});
  CHECK(outcome.error.find("'fails'") != std::string::npos);
  fails = false;
  outcome = RunOnHost(program, {}, {});
  CHECK(outcome.error == "");
  CHECK(dfx_test::Works());
}
