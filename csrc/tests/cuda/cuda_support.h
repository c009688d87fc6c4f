// What the tests of the CUDA engine share: an engine on the fake driver, and a program on three
// lanes.
#pragma once
#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "steps.h"

namespace dfx::test {

using dfx_test::Problem;

inline constexpr int kLanes = 3;

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
inline std::shared_ptr<Program> Squares(std::function<bool(int lane)> fail = nullptr) {
  auto p = std::make_shared<Program>(kLanes, kLanes, kLanes, kLanes, 64 * kLanes, "squares");
  std::vector<int32_t> scratch;
  for (int i = 0; i < kLanes; ++i) {
    const int arg = p->AddBuffer({BufferKind::kArg, i, 0, 8});
    scratch.push_back(p->AddBuffer({BufferKind::kScratch, -1, 64 * i, 8}));
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
    const int result = p->AddBuffer({BufferKind::kResult, i, 0, 8});
    p->AddLaunch(i, DeviceLanes::Launch("add",
                                        [i](const Buffer* in, int n, Buffer* out) {
                                          int64_t sum = i;
                                          for (int k = 0; k < n; ++k) sum += At(in[k]);
                                          At(out[0]) = sum;
                                        },
                                        scratch, {result}));
  }
  REQUIRE(Problem(*p) == "");
  return p;
}

inline bool IsRight(const Memory& memory) {
  int64_t sum = 0;
  for (int64_t arg : memory.args) sum += arg * arg;
  for (size_t i = 0; i < kLanes; ++i) {
    if (memory.results[i] != sum + static_cast<int64_t>(i)) return false;
  }
  return true;
}

inline bool RunsRight(CudaEngine& engine, const std::shared_ptr<Program>& program) {
  fake::Stream caller;
  Memory memory(3);
  auto result = RunOnDevice(engine, program, memory.arg_list, memory.result_list, caller.get());
  return result.ok && caller.Synchronize() == 0 && IsRight(memory);
}

}  // namespace dfx::test
