// What holds on every kind of lane: one body each, run on host lanes and on CUDA lanes (of the fake
// driver), most also with XLA executables as steps.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "steps.h"

#if defined(DFX_PJRT_PLUGIN)
#include "pjrt_client.h"
#define PJRT_LANES , dfx::test::PjrtLanes
#else
#define PJRT_LANES
#endif

namespace {

using dfx::Buffer;
using dfx::BufferKind;
using dfx::Engine;
using dfx::Lane;
using dfx::Program;
using dfx::test::At;
using dfx::test::DeviceLanes;
using dfx::test::HostLanes;
using dfx::test::MakeLaunch;
using dfx::test::TeamLanes;
using dfx_test::Outcome;
using dfx_test::Problem;

// arg a, result r: lane 1 doubles a into scratch, lane 0 waits for it and adds one.
template <typename Lanes>
std::shared_ptr<Program> TwoLanes() {
  auto p = std::make_shared<Program>(2, 1, 1, 1, 64, "two lanes");
  const int a = p->AddBuffer({BufferKind::kArg, 0, 0, 8});
  const int r = p->AddBuffer({BufferKind::kResult, 0, 0, 8});
  const int s = p->AddBuffer({BufferKind::kScratch, -1, 0, 8});
  p->AddLaunch(1, Lanes::Compute("double", {{2}, 0}, {a}, {s}));
  p->AddRecord(1, 0);
  p->AddWait(0, 0);
  p->AddLaunch(0, Lanes::Compute("increment", {{1}, 1}, {s}, {r}));
  return p;
}

template <typename Lanes>
Outcome RunOne(const std::shared_ptr<Program>& program, int64_t in, int64_t* out) {
  void* args[] = {&in};
  void* results[] = {out};
  return Lanes::Run(program, args, results);
}

// A program of random steps, lanes and waits; what each step must compute from `arg`.
struct RandomProgram {
  std::shared_ptr<Program> program;
  std::vector<int64_t> expect;
};

template <typename Lanes>
RandomProgram MakeRandom(std::mt19937& random, int64_t arg_value) {
  const int lanes = 1 + static_cast<int>(random() % 4);
  const int steps = 2 + static_cast<int>(random() % 24);
  auto p = std::make_shared<Program>(lanes, steps, 1, steps, 64 * steps, "random");
  const int arg = p->AddBuffer({BufferKind::kArg, 0, 0, 8});
  std::vector<int> buffer, lane_of;
  std::vector<int64_t> expect;
  for (int i = 0; i < steps; ++i) {
    buffer.push_back(p->AddBuffer({BufferKind::kScratch, -1, 64 * i, 8}));
    const int out = p->AddBuffer({BufferKind::kResult, i, 0, 8});
    lane_of.push_back(static_cast<int>(random() % static_cast<unsigned>(lanes)));
    std::vector<int32_t> ins{arg};
    int64_t value = arg_value + i;
    for (int j = 0; j < i; ++j) {
      if (random() % 4 != 0) continue;
      ins.push_back(buffer[static_cast<size_t>(j)]);
      value += expect[static_cast<size_t>(j)] * 3;
      p->AddWait(lane_of.back(), j);
    }
    std::vector<int64_t> weights(ins.size(), 3);
    weights[0] = 1;
    p->AddLaunch(lane_of.back(), Lanes::Compute("step", {weights, i}, ins, {buffer.back(), out}));
    p->AddRecord(lane_of.back(), i);
    expect.push_back(value);
  }
  return {p, expect};
}

}  // namespace

TEST_CASE_TEMPLATE("values cross lanes in order", Lanes, HostLanes, TeamLanes,
                   DeviceLanes PJRT_LANES) {
  Lanes lanes;
  auto program = TwoLanes<Lanes>();
  REQUIRE(Problem(*program) == "");
  for (int64_t i = 0; i < 1000; ++i) {
    int64_t out = -1;
    auto result = RunOne<Lanes>(program, i, &out);
    REQUIRE(result.error == "");
    REQUIRE(out == 2 * i + 1);
  }
  CHECK(Lanes::LiveCalls() == 0);
}

TEST_CASE_TEMPLATE("many threads, many programs, different lanes", Lanes, HostLanes, TeamLanes,
                   DeviceLanes PJRT_LANES) {
  Lanes lanes;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([t, &wrong] {
      auto two = TwoLanes<Lanes>();
      if (!Problem(*two).empty()) ++wrong;
      auto one = std::make_shared<Program>(3, 0, 1, 1, 0, "one lane");
      const int a = one->AddBuffer({BufferKind::kArg, 0, 0, 8});
      const int r = one->AddBuffer({BufferKind::kResult, 0, 0, 8});
      one->AddLaunch(t % 3, Lanes::Compute("copy", {{1}, 0}, {a}, {r}));
      if (!Problem(*one).empty()) ++wrong;
      for (int64_t i = 0; i < 200; ++i) {
        int64_t x = -1, y = -1;
        if (!RunOne<Lanes>(two, i, &x).ok || x != 2 * i + 1) ++wrong;
        if (!RunOne<Lanes>(one, i, &y).ok || y != i) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("a failing step fails its call only, and stops what waits for it", Lanes,
                   HostLanes, TeamLanes, DeviceLanes) {
  Lanes lanes;
  auto bad = std::make_shared<Program>(2, 1, 0, 0, 0, "bad");
  std::atomic<bool> ran_after{false};
  bad->AddLaunch(1, MakeLaunch("boom", [](const Buffer*, int, Buffer*, int, Lane* lane) {
                   lane->current()->Fail("boom in the middle");
                   return 1;
                 }));
  bad->AddRecord(1, 0);
  bad->AddWait(0, 0);
  bad->AddLaunch(0, Lanes::Launch("after", [&](const Buffer*, int, Buffer*) { ran_after = true; }));
  REQUIRE(Problem(*bad) == "");
  auto good = TwoLanes<Lanes>();
  REQUIRE(Problem(*good) == "");
  for (int i = 0; i < 50; ++i) {
    auto result = Lanes::Run(bad, {}, {});
    CHECK_FALSE(result.ok);
    CHECK(result.error == "boom in the middle");
    int64_t out = 0;
    CHECK(RunOne<Lanes>(good, 5, &out).ok);
    CHECK(out == 11);
  }
  CHECK_FALSE(ran_after);
}

TEST_CASE_TEMPLATE("an exception in a step is an error of the call", Lanes, HostLanes, TeamLanes,
                   DeviceLanes) {
  Lanes lanes;
  auto program = std::make_shared<Program>(2, 0, 0, 0, 0, "throws");
  program->AddLaunch(1, MakeLaunch("double", [](const Buffer*, int, Buffer*, int, Lane*) -> int {
                       throw std::runtime_error("thrown");
                     }));
  REQUIRE(Problem(*program) == "");
  auto result = Lanes::Run(program, {}, {});
  CHECK_FALSE(result.ok);
  CHECK(result.error == "step 'double': thrown");
}

TEST_CASE_TEMPLATE("a step that runs the engine is refused, not deadlocked", Lanes, HostLanes,
                   TeamLanes, DeviceLanes) {
  Lanes lanes;
  auto inner = TwoLanes<Lanes>();
  REQUIRE(Problem(*inner) == "");
  for (int lane = 0; lane < 2; ++lane) {
    auto outer = std::make_shared<Program>(2, 0, 0, 0, 0, "outer");
    std::string error;
    outer->AddLaunch(lane, MakeLaunch("nested", [&](const Buffer*, int, Buffer*, int, Lane*) {
                       int64_t out = 0;
                       error = RunOne<Lanes>(inner, 1, &out).error;
                       return 0;
                     }));
    REQUIRE(Problem(*outer) == "");
    CHECK(Lanes::Run(outer, {}, {}).ok);
    CHECK(error.find("nested") != std::string::npos);
  }
}

TEST_CASE_TEMPLATE("misuse is refused", Lanes, HostLanes, TeamLanes, DeviceLanes) {
  Lanes lanes;
  auto program = TwoLanes<Lanes>();
  int64_t out = 0;
  CHECK(RunOne<Lanes>(program, 1, &out).error.find("not finished") != std::string::npos);
  REQUIRE(Problem(*program) == "");
  CHECK(Lanes::Run(program, {}, {}).error.find("got 0 and 0") != std::string::npos);
  CHECK(Lanes::Run(nullptr, {}, {}).error.find("no program") != std::string::npos);
  auto empty = std::make_shared<Program>(0, 0, 0, 0, 0, "empty");
  REQUIRE(Problem(*empty) == "");
  CHECK(Lanes::Run(empty, {}, {}).ok);
}

TEST_CASE_TEMPLATE("a step behind the end of its lane is refused", Lanes, HostLanes, TeamLanes,
                   DeviceLanes) {
  Lanes lanes;
  auto program = std::make_shared<Program>(2, 0, 0, 0, 0, "late");
  program->AddLaunch(1, MakeLaunch("early", [](const Buffer*, int, Buffer*, int, Lane* lane) {
                       // The call stays under way until lane 0 has left it.
                       lane->current()->LaneDone(1);
                       return 0;
                     }));
  std::atomic<bool> ran{false};
  program->AddLaunch(1, Lanes::Launch("late", [&](const Buffer*, int, Buffer*) { ran = true; }));
  program->AddLaunch(0, MakeLaunch("slow", [](const Buffer*, int, Buffer*, int, Lane*) {
                       std::this_thread::sleep_for(std::chrono::milliseconds(30));
                       return 0;
                     }));
  REQUIRE(Problem(*program) == "");
  auto result = Lanes::Run(program, {}, {});
  CHECK_FALSE(result.ok);
  CHECK(result.error.find("'late' comes after its lane") != std::string::npos);
  CHECK_FALSE(ran);
}

TEST_CASE_TEMPLATE("random programs compute what a sequential run computes", Lanes, HostLanes,
                   TeamLanes, DeviceLanes PJRT_LANES) {
  Lanes lanes;
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    auto [program, expect] = MakeRandom<Lanes>(random, 3);
    REQUIRE(Problem(*program) == "");
    int64_t in = 3;
    std::vector<int64_t> got(expect.size(), -1);
    std::vector<void*> results;
    for (auto& value : got) results.push_back(&value);
    void* args[] = {&in};
    REQUIRE(Lanes::Run(program, args, results).ok);
    CHECK(got == expect);
  }
}
