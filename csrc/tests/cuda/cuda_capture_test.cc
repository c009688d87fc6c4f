// CUDA lanes on the fake driver: stream capture, and streams of somebody else.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/cuda_support.h"

namespace {

using dfx::CudaEngine;
using dfx::Program;
using dfx::test::CleanDriver;
using dfx::test::Device;
using dfx::test::IsRight;
using dfx::test::kLanes;
using dfx::test::MakeLaunch;
using dfx::test::Memory;
using dfx::test::RunOnDevice;
using dfx::test::RunsRight;
using dfx::test::Squares;
using dfx_test::Problem;
namespace fake = dfx::fake;

}  // namespace

TEST_CASE("a captured call replays") {
  CleanDriver clean;
  Device device;
  auto program = Squares();
  fake::Stream caller;
  Memory memory(3);
  for (int round = 0; round < 3; ++round) {
    REQUIRE(fake::BeginCapture(caller.get()) == 0);
    for (int calls = 0; calls < 2; ++calls) {  // two calls in one graph
      REQUIRE(
          RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get())
              .ok);
    }
    std::shared_ptr<fake::Graph> graph;
    REQUIRE(fake::EndCapture(caller.get(), &graph) == 0);
    for (int replay = 0; replay < 50; ++replay) {
      for (size_t i = 0; i < kLanes; ++i) memory.args[i] = 10 * replay + static_cast<int64_t>(i);
      memory.results = {};
      REQUIRE(fake::LaunchGraph(graph, caller.get()) == 0);
      REQUIRE(caller.Synchronize() == 0);
      REQUIRE(IsRight(memory));
    }
    CHECK(RunsRight(*device.engine, program));
  }
  CHECK(device.engine->stats().lane_sets == 1);
  CHECK(fake::BlockingCalls() == 0);
}

TEST_CASE("captures and plain calls side by side do not share streams") {
  CleanDriver clean;
  Device device;
  auto program = Squares();
  fake::Stream first, second, plain;
  Memory a(1), b(50), c(100);
  std::shared_ptr<fake::Graph> graph_a, graph_b;
  auto run = [&](Memory& m, fake::Stream& stream) {
    return RunOnDevice(*device.engine, program, m.arg_list, m.result_list, stream.get()).ok;
  };
  REQUIRE(fake::BeginCapture(first.get()) == 0);
  REQUIRE(run(a, first));
  REQUIRE(fake::BeginCapture(second.get()) == 0);
  REQUIRE(run(c, plain));
  REQUIRE(run(b, second));
  REQUIRE(run(a, first));
  REQUIRE(plain.Synchronize() == 0);
  CHECK(IsRight(c));
  REQUIRE(fake::EndCapture(second.get(), &graph_b) == 0);
  REQUIRE(fake::EndCapture(first.get(), &graph_a) == 0);
  CHECK(device.engine->stats().lane_sets == 2);
  CHECK(a.results[0] == -1);  // nothing ran so far
  REQUIRE(fake::LaunchGraph(graph_a, first.get()) == 0);
  REQUIRE(fake::LaunchGraph(graph_b, second.get()) == 0);
  REQUIRE(first.Synchronize() == 0);
  REQUIRE(second.Synchronize() == 0);
  CHECK(IsRight(a));
  CHECK(IsRight(b));
  REQUIRE(run(c, plain));  // the captures are over: their sets serve again
  REQUIRE(plain.Synchronize() == 0);
  CHECK(device.engine->stats().lane_sets == 2);
}

TEST_CASE("a step that fails in a capture leaves the capture joined, and the engine fit") {
  CleanDriver clean;
  Device device;
  auto program = Squares([](int lane) { return lane == 1; });
  fake::Stream caller;
  Memory memory(3);
  REQUIRE(fake::BeginCapture(caller.get()) == 0);
  CHECK_FALSE(
      RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get()).ok);
  std::shared_ptr<fake::Graph> graph;
  CHECK(fake::EndCapture(caller.get(), &graph) == 0);
  CHECK(fake::BlockingCalls() == 0);
  CHECK(RunsRight(*device.engine, Squares()));
}

TEST_CASE("an invalid capture is refused, and ends without harm") {
  CleanDriver clean;
  Device device;
  auto program = Squares();
  fake::Stream caller, other;
  Memory memory(3);
  auto run = [&] {
    return RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get());
  };
  REQUIRE(fake::BeginCapture(caller.get()) == 0);
  REQUIRE(run().ok);
  // Somebody waits for the capturing stream on the host, which invalidates the capture.
  {
    CUctx_st* context = nullptr;
    fake::Driver().DevicePrimaryCtxRetain(&context, 0);
    dfx::CudaContextScope scope(fake::Driver(), context);
    CHECK(fake::Driver().StreamSynchronize(caller.get()) == 900);
    fake::Driver().DevicePrimaryCtxRelease(0);
  }
  auto result = run();
  CHECK_FALSE(result.ok);
  CHECK(result.error.find("capture") != std::string::npos);
  CHECK(RunsRight(*device.engine, program));  // on another set: the first is still captured
  std::shared_ptr<fake::Graph> graph;
  CHECK(fake::EndCapture(caller.get(), &graph) == 901);
  CHECK(run().ok);
  CHECK(caller.Synchronize() == 0);
  CHECK(device.engine->stats().lane_sets == 2);
}

TEST_CASE("lanes on streams of somebody else: one set, callers take turns") {
  CleanDriver clean;
  std::vector<std::unique_ptr<fake::Stream>> streams;
  CudaEngine::Options options;
  for (int i = 0; i < kLanes; ++i) {
    streams.push_back(std::make_unique<fake::Stream>());
    options.streams.push_back(streams.back()->get());
  }
  Device device(options);
  auto program = Squares();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) wrong += RunsRight(*device.engine, program) ? 0 : 1;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(device.engine->stats().lane_sets == 1);

  fake::Stream caller;
  Memory memory(3);
  REQUIRE(fake::BeginCapture(streams[1]->get()) == 0);
  auto run = [&] {
    return RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get());
  };
  auto result = run();
  CHECK_FALSE(result.ok);
  CHECK(result.error.find("capture") != std::string::npos);
  std::shared_ptr<fake::Graph> graph;
  CHECK(fake::EndCapture(streams[1]->get(), &graph) == 0);
  CHECK(run().ok);
  CHECK(caller.Synchronize() == 0);

  auto wide = std::make_shared<Program>(kLanes + 1, 0, 0, 0, 0, "wide");
  wide->AddLaunch(kLanes, MakeLaunch("x", dfx::test::Nothing));
  REQUIRE(Problem(*wide) == "");
  CHECK(RunOnDevice(*device.engine, wide, {}, {}, caller.get()).error.find("3 streams") !=
        std::string::npos);
}
