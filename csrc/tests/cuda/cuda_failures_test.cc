// CUDA lanes on the fake driver: what happens when a driver call, a step or the device fails.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocations.h"
#include "cuda/cuda_support.h"

namespace {

using dfx::Buffer;
using dfx::CudaEngine;
using dfx::Engine;
using dfx::Lane;
using dfx::Program;
using dfx::test::CleanDriver;
using dfx::test::Device;
using dfx::test::kLanes;
using dfx::test::MakeLaunch;
using dfx::test::Memory;
using dfx::test::RunOnDevice;
using dfx::test::RunsRight;
using dfx::test::Squares;
using dfx_test::Outcome;
using dfx_test::Problem;
namespace fake = dfx::fake;

}  // namespace

TEST_CASE("every driver call may fail: an error, nothing left running, and the next call works") {
  const std::vector<std::string> symbols = {"cuStreamCreateWithPriority",
                                            "cuEventCreate",
                                            "cuEventRecord",
                                            "cuStreamWaitEvent",
                                            "cuMemAllocAsync",
                                            "cuMemFreeAsync",
                                            "cuLaunchKernel",
                                            "cuCtxPushCurrent",
                                            "cuStreamGetCaptureInfo"};
  for (const std::string& symbol : symbols) {
    CAPTURE(symbol);
    int failures = 0;
    for (int skip = 0;; ++skip) {
      CAPTURE(skip);
      CleanDriver clean;
      Device device;
      auto program = Squares();
      fake::FailCall(symbol, dfx::kCudaOutOfMemory, skip);
      Outcome result;
      {
        fake::Stream caller;
        auto memory = std::make_unique<Memory>(3);
        result = RunOnDevice(*device.engine, program, memory->arg_list, memory->result_list,
                             caller.get());
        CHECK(caller.Synchronize() == 0);
        // The caller is past the call: no lane may touch this any more (the sanitizers look).
        std::fill(memory->args.begin(), memory->args.end(), -5);
      }
      if (!fake::FailureTaken()) {
        CHECK(result.ok);
        break;
      }
      ++failures;
      CHECK_FALSE(result.ok);
      CHECK(result.error.find("CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
      CHECK(device.engine->stats().failures == 1);
      CHECK(RunsRight(*device.engine, program));
      if (symbol == "cuMemFreeAsync") {  // that memory cannot be had back
        std::string why;
        device.engine.reset();
        fake::Reset(&why);
        CHECK(why == " 1 allocations left");
      }
    }
    CHECK(failures > 0);
  }
}

TEST_CASE(
    "whichever allocation of a call fails, it is an error, and no device memory is left behind") {
  for (const bool warm : {false, true}) {
    CAPTURE(warm);
    int errors = 0;
    bool done = false;
    for (int64_t n = 0; !done; ++n) {
      CAPTURE(n);
      REQUIRE(n < 1000);
      CleanDriver clean;  // at its end it checks what was allocated and not freed
      Device device;
      auto program = Squares();
      if (warm) REQUIRE(RunsRight(*device.engine, program));
      Outcome result;
      {
        fake::Stream caller;
        Memory memory(3);
        {
          dfx_test::FailAllocationsAfter fail(n);
          result = RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list,
                               caller.get());
          done = dfx_test::AllocationsLeft() > 0;
        }
        CHECK(caller.Synchronize() == 0);
        if (result.ok) {
          CHECK(IsRight(memory));
        } else {
          ++errors;
          CHECK_FALSE(result.error.empty());
        }
      }
      CHECK(RunsRight(*device.engine, program));
    }
    CHECK(errors >= 3);
  }
}

TEST_CASE("if lanes cannot be joined on the device, the host waits for them") {
  CleanDriver clean;
  Device device;
  auto program = Squares();
  // The join's records and waits are the last of their kind.
  for (const char* symbol : {"cuEventRecord", "cuStreamWaitEvent"}) {
    REQUIRE(RunsRight(*device.engine, program));
    const int64_t before = fake::Calls(symbol);
    REQUIRE(RunsRight(*device.engine, program));
    const int64_t each = fake::Calls(symbol) - before;
    fake::FailCall(symbol, dfx::kCudaOutOfMemory, static_cast<int>(each) - 1);
    fake::Stream caller;
    Memory memory(3);
    const int64_t blocked = fake::BlockingCalls();
    CHECK_FALSE(
        RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get()).ok);
    CHECK(fake::BlockingCalls() > blocked);
    // The caller's stream still has lane 0's part; nobody else writes any more.
    for (size_t lane = 1; lane < kLanes; ++lane) memory.results[lane] = 0;
    caller.Synchronize();
  }
}

TEST_CASE("a failing step joins what was started") {
  CleanDriver clean;
  Device device;
  for (int bad = 0; bad < kLanes; ++bad) {
    auto program = Squares([bad](int lane) { return lane == bad; });
    auto memory = std::make_unique<Memory>(3);
    fake::Stream caller;
    auto result =
        RunOnDevice(*device.engine, program, memory->arg_list, memory->result_list, caller.get());
    CHECK_FALSE(result.ok);
    CHECK(result.error == "step 'may fail' failed with status 7");
    CHECK(caller.Synchronize() == 0);
    memory.reset();
    CHECK(fake::BlockingCalls() == 0);
  }
  CHECK(RunsRight(*device.engine, Squares()));
}

TEST_CASE("a step may not use events itself") {
  CleanDriver clean;
  Device device;
  fake::Stream caller;
  auto p = std::make_shared<Program>(2, 1, 0, 0, 0, "gates");
  p->AddLaunch(1, MakeLaunch("gate", [](const Buffer*, int, Buffer*, int, Lane* lane) {
                 return lane->current()->WaitEvent(0) ? 0 : 1;
               }));
  REQUIRE(Problem(*p) == "");
  auto result = RunOnDevice(*device.engine, p, {}, {}, caller.get());
  CHECK_FALSE(result.ok);
  CHECK(result.error.find("host lanes only") != std::string::npos);
}

TEST_CASE("a faulting kernel loses the context, and later calls say so") {
  CleanDriver clean;
  Device device;
  std::atomic<bool> release{false};
  auto p = std::make_shared<Program>(2, 0, 0, 0, 64, "faults");
  p->AddLaunch(1, MakeLaunch("fault", [&](const Buffer*, int, Buffer*, int, Lane* lane) {
                 return fake::Launch(lane->cuda()->stream(), [&] {
                   while (!release) std::this_thread::yield();
                   return false;
                 });
               }));
  REQUIRE(Problem(*p) == "");
  fake::Stream caller;
  CHECK(RunOnDevice(*device.engine, p, {}, {}, caller.get()).ok);  // nobody knows yet
  release = true;
  CHECK(caller.Synchronize() == 700);
  for (int i = 0; i < 3; ++i) {
    auto result = RunOnDevice(*device.engine, p, {}, {}, caller.get());
    CHECK_FALSE(result.ok);
    CHECK(result.error.find("CUDA_ERROR_ILLEGAL_ADDRESS") != std::string::npos);
    if (i > 0) CHECK(result.error.find("the CUDA context is lost") != std::string::npos);
  }
}

TEST_CASE("with a check after each step, a faulting kernel is named in the caller") {
  CleanDriver clean;
  CudaEngine::Options options;
  options.check_steps = true;
  Device device(options);
  auto p = std::make_shared<Program>(2, 1, 0, 0, 64, "faults");
  for (bool fault : {false, true}) {
    const std::string name = fault ? "broken" : "fine";
    p->AddLaunch(1, MakeLaunch(name, [fault](const Buffer*, int, Buffer*, int, Lane* lane) {
                   return fake::Launch(lane->cuda()->stream(), [fault] { return !fault; });
                 }));
  }
  p->AddRecord(1, 0);
  p->AddWait(0, 0);
  REQUIRE(Problem(*p) == "");
  fake::Stream caller;
  auto result = RunOnDevice(*device.engine, p, {}, {}, caller.get());
  CHECK(result.error.find("step 'broken': cuStreamSynchronize after it failed: "
                          "CUDA_ERROR_ILLEGAL_ADDRESS") == 0);
  result = RunOnDevice(*device.engine, p, {}, {}, caller.get());
  CHECK(result.error.find("the CUDA context is lost: step 'broken'") == 0);
}

TEST_CASE("with a check after each step, values and captures are the same") {
  CleanDriver clean;
  CudaEngine::Options options;
  options.check_steps = true;
  Device device(options);
  auto program = Squares();
  CHECK(RunsRight(*device.engine, program));
  CHECK(fake::BlockingCalls() > 0);
  const int64_t before = fake::BlockingCalls();
  fake::Stream caller;
  Memory memory(3);
  REQUIRE(fake::BeginCapture(caller.get()) == 0);
  CHECK(RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get()).ok);
  std::shared_ptr<fake::Graph> graph;
  CHECK(fake::EndCapture(caller.get(), &graph) == 0);
  CHECK(fake::BlockingCalls() == before);
}

TEST_CASE("memory of a second device is refused, and the next call works") {
  CleanDriver clean;
  fake::SetDevices(2);
  Device device;
  auto program = Squares();
  fake::Stream caller;
  Memory memory(3);
  auto result = RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list,
                            caller.get(), nullptr, 1);
  CHECK(result.error.find("plan 'squares' has its lanes on CUDA device 0, its arrays are on device "
                          "1: move them there") == 0);
  CHECK(memory.results[0] == -1);
  CHECK(RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get(),
                    nullptr, 0)
            .ok);
  CHECK(caller.Synchronize() == 0);
  CHECK(IsRight(memory));
}

TEST_CASE("a device lost while Run enqueues ends the call, whatever the call was doing") {
  for (const char* symbol : {"cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"}) {
    for (int skip = 0; skip < 4; ++skip) {
      CleanDriver clean;
      Device device;
      auto program = Squares();
      fake::FailCall(symbol, 999, skip);
      fake::Stream caller;
      Memory memory(3);
      CHECK_FALSE(
          RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get())
              .ok);
      caller.Synchronize();
      auto later =
          RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get());
      const bool launch = std::string(symbol) == "cuLaunchKernel";
      // What a step's own launch returned is the step's affair; the engine's calls it sees itself.
      CHECK(later.ok == launch);
      if (!launch) CHECK(later.error.find("the CUDA context is lost") != std::string::npos);
      caller.Synchronize();
    }
  }
}

TEST_CASE("an engine that cannot be made says why, and leaves nothing behind") {
  CleanDriver clean;
  auto error = [](CudaEngine::Options options) -> std::string {
    try {
      CudaEngine engine(fake::Driver(), std::move(options));
    } catch (const dfx::Error& e) {
      return e.what();
    }
    return "";
  };
  CudaEngine::Options second, low, own;
  second.device = 1;
  CHECK(error(second) == "there is no CUDA device 1: this process sees 1");
  low.priorities = {0, -9};
  CHECK(error(low).find("lane 1 cannot have priority -9") != std::string::npos);
  own.priorities = {-1};
  CHECK(error(own).find("lane 0 cannot have priority -1") != std::string::npos);
  for (const char* symbol : {"cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain",
                             "cuCtxPushCurrent", "cuCtxGetStreamPriorityRange"}) {
    CAPTURE(symbol);
    fake::FailCall(symbol, dfx::kCudaOutOfMemory);
    CHECK(error({}).find("CUDA_ERROR_OUT_OF_MEMORY (2)") != std::string::npos);
  }
  CudaEngine::Options good;
  good.priorities = {0, -5, -1};
  CHECK(error(good) == "");
}

TEST_CASE("the real driver loads, or says why not") {
  try {
    const int count = dfx::CudaDeviceCount();
    CHECK(count >= 0);
  } catch (const dfx::Error& e) {
    CHECK(std::string(e.what()).find("CUDA") != std::string::npos);
  }
}

#if !defined(__SANITIZE_THREAD__)
TEST_CASE("a forked child gets an error from the CUDA engine") {
  CleanDriver clean;
  Device device;
  auto program = Squares();
  fake::Stream caller;
  Memory memory(3);
  const pid_t child = fork();
  if (child == 0) {
    auto result =
        RunOnDevice(*device.engine, program, memory.arg_list, memory.result_list, caller.get());
    _exit(!result.ok && result.error.find("forked") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}
#endif
