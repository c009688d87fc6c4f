// CUDA lanes on the fake driver: that Run only enqueues, what the caller's stream orders, what
// happens when a driver call or a kernel fails, and stream capture.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "steps.h"

namespace {

using dfx::Buffer;
using dfx::BufferKind;
using dfx::CudaEngine;
using dfx::CudaError;
using dfx::Engine;
using dfx::Lane;
using dfx::Program;
using dfx::test::At;
using dfx::test::DeviceLanes;
using dfx::test::MakeLaunch;
namespace fake = dfx::fake;

constexpr int kLanes = 3;

// An engine on a fake driver with delays.
struct Device {
  explicit Device(CudaEngine::Options options = {}) {
    fake::SetMaxDelayUs(200);
    engine = std::make_unique<CudaEngine>(fake::Driver(), std::move(options));
  }
  std::unique_ptr<CudaEngine> engine;
};

// Checks and clears the driver's books around a test; the shared engine of DeviceLanes must be
// gone.
struct CleanDriver {
  CleanDriver() {
    delete DeviceLanes::engine();
    DeviceLanes::engine() = nullptr;
    std::string why;
    fake::Reset(&why);
    CHECK(why == "");
  }
  ~CleanDriver() {
    std::string why;
    fake::Reset(&why);
    CHECK(why == "");
    DeviceLanes::engine() = new CudaEngine(fake::Driver(), {});
  }
};

// Results and arguments that the device may touch until the caller's stream is past the call.
struct Memory {
  std::array<int64_t, kLanes> args{}, results{};
  std::vector<void*> arg_list, result_list;
  explicit Memory(int64_t first) {
    for (size_t i = 0; i < kLanes; ++i) {
      args[i] = first + static_cast<int64_t>(i);
      results[i] = -1;
      arg_list.push_back(&args[i]);
      result_list.push_back(&results[i]);
    }
  }
};

// Lane i squares argument i into scratch; then each lane adds up the squares of all lanes.
std::shared_ptr<Program> Squares(std::function<bool(int lane)> fail = nullptr) {
  auto p = std::make_shared<Program>(kLanes, kLanes, kLanes, kLanes, 64 * kLanes, "squares");
  std::vector<int32_t> scratch;
  for (int i = 0; i < kLanes; ++i) {
    const int arg = p->AddBuffer({BufferKind::kArg, i, 0, 8, 0, {}});
    scratch.push_back(p->AddBuffer({BufferKind::kScratch, -1, 64 * i, 8, 0, {}}));
    p->AddLaunch(i, DeviceLanes::Launch("square",
                                        [](const Buffer* in, int, Buffer* out) {
                                          At(out[0]) = At(in[0]) * At(in[0]);
                                        },
                                        {arg}, {scratch.back()}));
    p->AddRecord(i, i);
  }
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) {
      if (j != i) p->AddWait(i, j);
    }
    if (fail != nullptr) {
      p->AddLaunch(i, MakeLaunch("may fail", [fail, i](const Buffer*, int, Buffer*, int, Lane*) {
                     return fail(i) ? 7 : 0;
                   }));
    }
    const int result = p->AddBuffer({BufferKind::kResult, i, 0, 8, 0, {}});
    p->AddLaunch(i, DeviceLanes::Launch("add",
                                        [i](const Buffer* in, int n, Buffer* out) {
                                          int64_t sum = i;
                                          for (int k = 0; k < n; ++k) sum += At(in[k]);
                                          At(out[0]) = sum;
                                        },
                                        scratch, {result}));
  }
  REQUIRE(p->Finish() == "");
  return p;
}

bool IsRight(const Memory& memory) {
  int64_t sum = 0;
  for (int64_t arg : memory.args) sum += arg * arg;
  for (size_t i = 0; i < kLanes; ++i) {
    if (memory.results[i] != sum + static_cast<int64_t>(i)) return false;
  }
  return true;
}

bool RunsRight(CudaEngine& engine, const std::shared_ptr<Program>& program) {
  fake::Stream caller;
  Memory memory(3);
  auto result =
      engine.Run(program, memory.arg_list.data(), memory.result_list.data(), caller.get());
  return result.ok && caller.Synchronize() == 0 && IsRight(memory);
}

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
  REQUIRE(p->Finish() == "");
  for (int i = 0; i < 10; ++i) REQUIRE(device.engine->Run(p, nullptr, nullptr, caller.get()).ok);
  CHECK(ran == 0);
  CHECK(fake::BlockingCalls() == 0);
  p.reset();  // the program may go: the device has what it needs
  release = true;
  CHECK(caller.Synchronize() == 0);
  CHECK(ran == 20);
  CHECK(device.engine->lane_sets() == 1);
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
        device.engine->Run(program, memory.arg_list.data(), memory.result_list.data(), caller.get())
            .ok);
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
  REQUIRE(
      device.engine
          ->Run(program, memory.arg_list.data(), memory.result_list.data(), caller.get(), scratch)
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
    device.engine->Run(program, memory.arg_list.data(), memory.result_list.data(), caller.get(),
                       scratch);
    caller.Synchronize();
    wrong += IsRight(memory) ? 0 : 1;
    device.engine.reset();  // waits for the lanes, which nobody joined
    device.engine = std::make_unique<CudaEngine>(fake::Driver(), CudaEngine::Options{});
  }
  CHECK(wrong > 0);
}
#endif

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
      Engine::Result result;
      {
        fake::Stream caller;
        auto memory = std::make_unique<Memory>(3);
        result = device.engine->Run(program, memory->arg_list.data(), memory->result_list.data(),
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
      CHECK(device.engine->failures() == 1);
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
        device.engine->Run(program, memory.arg_list.data(), memory.result_list.data(), caller.get())
            .ok);
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
    auto result = device.engine->Run(program, memory->arg_list.data(), memory->result_list.data(),
                                     caller.get());
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
  REQUIRE(p->Finish() == "");
  auto result = device.engine->Run(p, nullptr, nullptr, caller.get());
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
  REQUIRE(p->Finish() == "");
  fake::Stream caller;
  CHECK(device.engine->Run(p, nullptr, nullptr, caller.get()).ok);  // nobody knows yet
  release = true;
  CHECK(caller.Synchronize() == 700);
  for (int i = 0; i < 3; ++i) {
    auto result = device.engine->Run(p, nullptr, nullptr, caller.get());
    CHECK_FALSE(result.ok);
    CHECK(result.error.find("CUDA_ERROR_ILLEGAL_ADDRESS") != std::string::npos);
    if (i > 0) CHECK(result.error.find("the CUDA context is lost") != std::string::npos);
  }
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
          device.engine
              ->Run(program, memory.arg_list.data(), memory.result_list.data(), caller.get())
              .ok);
      caller.Synchronize();
      auto later = device.engine->Run(program, memory.arg_list.data(), memory.result_list.data(),
                                      caller.get());
      const bool launch = std::string(symbol) == "cuLaunchKernel";
      // What a step's own launch returned is the step's affair; the engine's calls it sees itself.
      CHECK(later.ok == launch);
      if (!launch) CHECK(later.error.find("the CUDA context is lost") != std::string::npos);
      caller.Synchronize();
    }
  }
}

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
        if (!device.engine
                 ->Run(program, memory.arg_list.data(), memory.result_list.data(), caller.get())
                 .ok) {
          ++wrong;
        }
        if (caller.Synchronize() != 0 || !IsRight(memory)) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(device.engine->lane_sets() <= 4);
  CHECK(device.engine->calls() == 400);
  CHECK(fake::BlockingCalls() == 0);
}

TEST_CASE("a captured call replays") {
  CleanDriver clean;
  Device device;
  auto program = Squares();
  fake::Stream caller;
  Memory memory(3);
  for (int round = 0; round < 3; ++round) {
    REQUIRE(fake::BeginCapture(caller.get()) == 0);
    for (int calls = 0; calls < 2; ++calls) {  // two calls in one graph
      REQUIRE(device.engine
                  ->Run(program, memory.arg_list.data(), memory.result_list.data(), caller.get())
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
  CHECK(device.engine->lane_sets() == 1);
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
    return device.engine->Run(program, m.arg_list.data(), m.result_list.data(), stream.get()).ok;
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
  CHECK(device.engine->lane_sets() == 2);
  CHECK(a.results[0] == -1);  // nothing ran so far
  REQUIRE(fake::LaunchGraph(graph_a, first.get()) == 0);
  REQUIRE(fake::LaunchGraph(graph_b, second.get()) == 0);
  REQUIRE(first.Synchronize() == 0);
  REQUIRE(second.Synchronize() == 0);
  CHECK(IsRight(a));
  CHECK(IsRight(b));
  REQUIRE(run(c, plain));  // the captures are over: their sets serve again
  REQUIRE(plain.Synchronize() == 0);
  CHECK(device.engine->lane_sets() == 2);
}

TEST_CASE("a step that fails in a capture leaves the capture joined, and the engine fit") {
  CleanDriver clean;
  Device device;
  auto program = Squares([](int lane) { return lane == 1; });
  fake::Stream caller;
  Memory memory(3);
  REQUIRE(fake::BeginCapture(caller.get()) == 0);
  CHECK_FALSE(
      device.engine->Run(program, memory.arg_list.data(), memory.result_list.data(), caller.get())
          .ok);
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
    return device.engine->Run(program, memory.arg_list.data(), memory.result_list.data(),
                              caller.get());
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
  CHECK(device.engine->lane_sets() == 2);
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
  CHECK(device.engine->lane_sets() == 1);

  fake::Stream caller;
  Memory memory(3);
  REQUIRE(fake::BeginCapture(streams[1]->get()) == 0);
  auto run = [&] {
    return device.engine->Run(program, memory.arg_list.data(), memory.result_list.data(),
                              caller.get());
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
  REQUIRE(wide->Finish() == "");
  CHECK(device.engine->Run(wide, nullptr, nullptr, caller.get()).error.find("3 streams") !=
        std::string::npos);
}

TEST_CASE("an engine that cannot be made says why, and leaves nothing behind") {
  CleanDriver clean;
  auto error = [](CudaEngine::Options options) -> std::string {
    try {
      CudaEngine engine(fake::Driver(), std::move(options));
    } catch (const CudaError& e) {
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
  } catch (const CudaError& e) {
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
    auto result = device.engine->Run(program, memory.arg_list.data(), memory.result_list.data(),
                                     caller.get());
    _exit(!result.ok && result.error.find("forked") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}
#endif
