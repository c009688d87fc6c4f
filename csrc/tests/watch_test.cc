// What onlookers see of a call: reports of those that take long, pauses and poison in trials.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "support.h"

namespace {

using namespace dfx_test;

std::mutex mutex;
std::vector<std::string> reports;

void Keep(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  reports.push_back(text);
}

size_t Reports() {
  std::lock_guard<std::mutex> lock(mutex);
  return reports.size();
}

TEST_CASE("a call that takes long is reported once, with what its lanes wait for") {
  Engine& engine = Engine::Get();
  std::atomic<bool> begun{false};
  auto program = TwoLanes(
      [&engine, &begun] {
        begun = true;
        // Both lanes are where they stay, unless the machine is very busy.
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        engine.SetWatchdog(1'000'000, &Keep);
        while (Reports() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      },
      1,
      // Else the caller runs a lane that has not begun, and waits for nothing.
      [&begun] {
        while (!begun) std::this_thread::yield();
      });
  program->NameEvent(0, "'double' on lane 1");
  program->NameWait(0, 0, "'increment'");
  REQUIRE(Problem(*program).empty());
  bool waits = false;
  for (int attempt = 0; attempt < 50 && !waits; ++attempt) {
    reports.clear();
    begun = false;
    engine.SetWatchdog(1'000'000'000'000, &Keep);
    int64_t out = 0;
    CHECK(RunOne(program, 20, &out).ok);
    CHECK(out == 41);
    engine.SetWatchdog(0, &Keep);
    REQUIRE(Reports() == 1);
    waits = reports[0].find("lane 0: has waited") != std::string::npos;
  }
  CHECK(reports[0].find("a call of 'two lanes' has run for") != std::string::npos);
  CHECK(reports[0].find("lane 0: has waited for event 0 for") != std::string::npos);
  CHECK(reports[0].find("'double' on lane 1; next is 'increment'\n") != std::string::npos);
  CHECK(reports[0].find("lane 1: runs 'double'\n") != std::string::npos);
  CHECK(Works());
  CHECK(Reports() == 1);
}

TEST_CASE("a trial begins with NaN in scratch, and its lanes still do what they should") {
  auto p = std::make_shared<Program>(1, 0, 0, 1, 128, "poisoned");
  const int s = p->AddBuffer({BufferKind::kScratch, -1, 64, 8});
  const int r = p->AddBuffer({BufferKind::kResult, 0, 0, 8});
  p->AddLaunch(0, MakeLaunch("copy",
                             [](const Buffer* in, int, Buffer* out, int, Lane*) {
                               At(out[0]) = At(in[0]);
                               At(in[0]) = 7;
                               return 0;
                             },
                             {s}, {r}));
  REQUIRE(Problem(*p).empty());
  int64_t out = 0;
  void* results[] = {&out};
  for (uint64_t seed : {1, 2}) {  // a pooled call is poisoned anew
    Engine::Get().Run(p, {}, results, false, false, seed);
    CHECK(out == -1);
  }
  Engine::Get().Run(p, {}, results);
  CHECK(out == 7);
  auto program = TwoLanes();
  REQUIRE(Problem(*program).empty());
  int64_t in = 20;
  void* args[] = {&in};
  for (uint64_t seed = 1; seed < 8; ++seed) {
    out = 0;
    Engine::Get().Run(program, args, results, false, false, seed);
    CHECK(out == 41);
  }
}

}  // namespace
