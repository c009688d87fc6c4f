// Shutdown is final for a process, so each scenario has its own: `dfx_shutdown_tests NAME`.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <thread>

#include "support.h"

using namespace dfx_test;  // NOLINT

namespace {

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

Engine& engine() { return Engine::Get(); }

std::shared_ptr<Program> Finished(std::shared_ptr<Program> program) {
  EXPECT(Problem(*program) == "");
  return program;
}

bool Closed() {
  auto program = Finished(TwoLanes());
  int64_t out = 7;
  auto result = RunOne(program, 1, &out);
  return !result.ok && result.error == "engine is shut down" && out == 7 &&
         engine().stats().threads == 0 && engine().stats().live == 0;
}

void Unused() {
  EXPECT(engine().Shutdown());
  EXPECT(Closed());
}

void Twice() {
  EXPECT(Works());
  EXPECT(engine().stats().threads == 1);
  EXPECT(engine().Shutdown());
  EXPECT(Closed());
  EXPECT(engine().Shutdown());
  EXPECT(Closed());
}

void OtherThread() {
  EXPECT(Works());
  std::thread([] { EXPECT(engine().Shutdown()); }).join();
  EXPECT(Closed());
}

// A step cannot wait for itself: refused on each lane, and the engine goes on.
void InStep() {
  for (int lane = 0; lane < 2; ++lane) {
    auto program = std::make_shared<Program>(2, 0, 0, 0, 0, "in step");
    bool done = true;
    program->AddLaunch(lane, MakeStep("x", [&](Lane*) { done = engine().Shutdown(); }));
    EXPECT(RunOnHost(Finished(program), {}, {}).ok);
    EXPECT(!done);
    EXPECT(Works());
  }
  EXPECT(engine().Shutdown());
  EXPECT(Closed());
}

std::atomic<int> hook_starts{0}, hook_exits{0}, hook_refusals{0};

// The threads' hooks run on lane threads: they may not stop or use the engine either.
void InHook() {
  Engine::SetThreadHooks(
      [](int) {
        ++hook_starts;
        auto program = TwoLanes();
        int64_t out = 0;
        if (!engine().Shutdown()) ++hook_refusals;
        if (Problem(*program).empty() && !RunOne(program, 1, &out).ok) ++hook_refusals;
      },
      [](int) {
        ++hook_exits;
        if (!engine().Shutdown()) ++hook_refusals;
      });
  EXPECT(Works());
  EXPECT(engine().Shutdown());
  EXPECT(hook_starts == 1 && hook_exits == 1 && hook_refusals == 3);
  EXPECT(Closed());
}

// The call that runs ends well.
void InFlight() {
  auto slow =
      Finished(TwoLanes([] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }));
  std::thread busy([&] {
    int64_t out = 0;
    EXPECT(RunOne(slow, 4, &out).ok);
    EXPECT(out == 9);
  });
  while (engine().stats().live == 0) std::this_thread::yield();
  EXPECT(engine().Shutdown());
  EXPECT(engine().stats().live == 0);
  busy.join();
  EXPECT(Closed());
}

// Calls that queue behind each other and shutdowns from several threads, all at once.
void Crowd() {
  std::atomic<int> values{0}, refused{0};
  std::vector<std::thread> threads;
  for (int caller = 0; caller < 6; ++caller) {
    threads.emplace_back([&, caller] {
      auto program = Finished(TwoLanes([] {}, 1 + caller % 3));
      for (int64_t i = 0;; ++i) {
        int64_t out = -1;
        auto result = RunOne(program, i, &out);
        if (result.ok) {
          EXPECT(out == 2 * i + 1);
          ++values;
          continue;
        }
        EXPECT(result.error == "engine is shut down");
        ++refused;
        return;
      }
    });
  }
  while (values < 200) std::this_thread::yield();
  for (int stopper = 0; stopper < 4; ++stopper) {
    threads.emplace_back([] {
      EXPECT(engine().Shutdown());
      EXPECT(engine().stats().threads == 0);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT(refused == 6);
  EXPECT(Closed());
}

// Run has returned, the lane is still inside its last step: Shutdown waits for its end.
void LeavingLane() {
  std::atomic<bool> release{false}, left{false};
  auto program = std::make_shared<Program>(2, 0, 0, 0, 0, "early");
  program->AddLaunch(1, MakeStep("early", [&](Lane* lane) {
                       lane->current()->LaneDone(1);
                       while (!release) std::this_thread::yield();
                       left = true;
                     }));
  EXPECT(RunOnHost(Finished(program), {}, {}).ok);
  EXPECT(!left);
  std::thread releaser([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    release = true;
  });
  EXPECT(engine().Shutdown());
  EXPECT(left);
  releaser.join();
  EXPECT(Closed());
}

// A process may end without a shutdown, lanes idle.
void Never() { EXPECT(Works()); }

}  // namespace

int main(int argc, char** argv) {
  alarm(120);  // a deadlock ends the process
  const std::map<std::string, void (*)()> scenarios{
      {"unused", Unused},
      {"twice", Twice},
      {"other-thread", OtherThread},
      {"in-step", InStep},
      {"in-hook", InHook},
      {"in-flight", InFlight},
      {"crowd", Crowd},
      {"leaving-lane", LeavingLane},
      {"never", Never},
  };
  const auto found = scenarios.find(argc == 2 ? argv[1] : "");
  if (found == scenarios.end()) {
    std::fprintf(stderr, "usage: %s SCENARIO\n", argv[0]);
    return 2;
  }
  found->second();
  return 0;
}
