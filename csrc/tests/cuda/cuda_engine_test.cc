// CUDA lanes on the fake driver: that Run only enqueues, and what the caller's stream orders.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/cuda_support.h"

namespace {

using dfx::Buffer;
using dfx::CudaEngine;
using dfx::Program;
using dfx::test::CleanDriver;
using dfx::test::Device;
using dfx::test::DeviceLanes;
using dfx::test::IsRight;
using dfx::test::kLanes;
using dfx::test::Memory;
using dfx::test::RunOnDevice;
using dfx::test::Squares;
using dfx_test::Problem;
namespace fake = dfx::fake;

}  // namespace

TEST_CASE("Run enqueues and returns while the device is busy") {
  CleanDriver clean;
  Device device;
  fake::Stream caller;
  std::atomic<bool> release{false};
  std::atomic<int> ran{0};
  auto p = std::make_shared<Program>(2, 1, 0, 0, 64, "gated");
  p->AddLaunch(1, DeviceLanes::Launch("gate", [&](const Buffer*, int, Buffer*) {
                 while (!release) std::this_thread::yield();
                 ++ran;
               }));
  p->AddRecord(1, 0);
  p->AddWait(0, 0);
  p->AddLaunch(0, DeviceLanes::Launch("after", [&](const Buffer*, int, Buffer*) { ++ran; }));
  REQUIRE(Problem(*p) == "");
  for (int i = 0; i < 10; ++i) REQUIRE(RunOnDevice(*device.engine, p, {}, {}, caller.get()).ok);
  CHECK(ran == 0);
  CHECK(fake::BlockingCalls() == 0);
  p.reset();  // the program may go: the device has what it needs
  release = true;
  CHECK(caller.Synchronize() == 0);
  CHECK(ran == 20);
  CHECK(device.engine->stats().lane_sets == 1);
}

TEST_CASE("the caller's stream orders what comes before and after, call by call") {
  CleanDriver clean;
  Device device;
  auto program = Squares();
  fake::Stream caller;
  Memory memory(0);
  constexpr int kCalls = 200;
  std::vector<Memory> seen(kCalls, Memory(0));
  for (int64_t i = 0; i < kCalls; ++i) {
    fake::Launch(caller.get(), [&memory, i] {
      for (size_t k = 0; k < kLanes; ++k) memory.args[k] = 10 * i + static_cast<int64_t>(k);
      return true;
    });
    REQUIRE(
        RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get()).ok);
    fake::Launch(caller.get(), [&memory, &at = seen[static_cast<size_t>(i)]] {
      at.args = memory.args;
      at.results = memory.results;
      return true;
    });
  }
  REQUIRE(caller.Synchronize() == 0);
  for (const Memory& m : seen) REQUIRE(IsRight(m));
  CHECK(fake::BlockingCalls() == 0);
}

TEST_CASE("scratch may be the caller's") {
  CleanDriver clean;
  Device device;
  auto program = Squares();
  fake::Stream caller;
  Memory memory(3);
  alignas(64) char scratch[64 * kLanes];
  REQUIRE(RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get(),
                      scratch)
              .ok);
  REQUIRE(caller.Synchronize() == 0);
  CHECK(IsRight(memory));
  CHECK(fake::Calls("cuMemAllocAsync") == 0);
}

#if !defined(__SANITIZE_THREAD__)  // which would rightly report the race
TEST_CASE("the tests notice a missing wait") {
  CleanDriver clean;
  Device device;
  auto program = Squares();
  alignas(64) char scratch[64 * kLanes] = {};
  fake::IgnoreWaits(true);
  int wrong = 0;
  for (int i = 0; i < 300; ++i) {
    fake::Stream caller;
    Memory memory(i + 1);
    RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get(),
                scratch);
    caller.Synchronize();
    wrong += IsRight(memory) ? 0 : 1;
    device.engine.reset();  // waits for the lanes, which nobody joined
    device.engine = std::make_unique<CudaEngine>(fake::Driver(), CudaEngine::Options{});
  }
  CHECK(wrong > 0);
}
#endif

TEST_CASE("threads with streams of their own") {
  CleanDriver clean;
  Device device;
  auto program = Squares();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      fake::Stream caller;
      for (int i = 0; i < 100; ++i) {
        Memory memory(100 * t + i);
        if (!RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get())
                 .ok) {
          ++wrong;
        }
        if (caller.Synchronize() != 0 || !IsRight(memory)) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(device.engine->stats().lane_sets <= 4);
  CHECK(device.engine->stats().calls == 400);
  CHECK(fake::BlockingCalls() == 0);
}
