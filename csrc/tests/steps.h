// Steps of tests, and how a test runs a program: on host lanes, or on CUDA lanes of the fake
// driver.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/cuda_driver.h"
#include "dfx/call.h"
#include "dfx/cuda/cuda_engine.h"
#include "dfx/engine.h"
#include "dfx/lane.h"
#include "dfx/program.h"
#include "dfx/team.h"
#include "fake_cuda.h"
#include "support.h"

namespace dfx::test {

// What a step does with memory, wherever that happens.
using Work = std::function<void(const Buffer*, int, Buffer*)>;

using dfx_test::At;
using dfx_test::MakeLaunch;
using dfx_test::Nothing;
using dfx_test::Outcome;
using dfx_test::RunOnHost;

// Each output becomes constant + the sum of weight times input.
struct Affine {
  std::vector<int64_t> weights;
  int64_t constant;
};

template <typename Lanes>
LaunchDesc LaunchAffine(const std::string& name, Affine of, std::vector<int32_t> ins,
                        std::vector<int32_t> outs) {
  const size_t n_outs = outs.size();
  return Lanes::Launch(
      name,
      [of = std::move(of), n_outs](const Buffer* in, int n, Buffer* out) {
        int64_t sum = of.constant;
        for (int i = 0; i < n; ++i) sum += of.weights[static_cast<size_t>(i)] * At(in[i]);
        for (size_t o = 0; o < n_outs; ++o) At(out[o]) = sum;
      },
      std::move(ins), std::move(outs));
}

struct HostLanes {
  HostLanes() {}
  static LaunchDesc Launch(const std::string& name, Work work, std::vector<int32_t> ins = {},
                           std::vector<int32_t> outs = {}) {
    return MakeLaunch(
        name,
        [work = std::move(work)](const Buffer* in, int n, Buffer* out, int, Lane*) {
          work(in, n, out);
          return 0;
        },
        std::move(ins), std::move(outs));
  }
  static Outcome Run(const std::shared_ptr<Program>& program, std::span<void* const> args,
                     std::span<void* const> results) {
    return RunOnHost(program, args, results);
  }
  static LaunchDesc Compute(const std::string& name, Affine of, std::vector<int32_t> ins,
                            std::vector<int32_t> outs) {
    return LaunchAffine<HostLanes>(name, std::move(of), std::move(ins), std::move(outs));
  }
  static int64_t LiveCalls() { return Engine::Get().stats().live; }
};

// Threads of their own for each call: as many members as asked for, that may come late.
class TestTeam : public Team {
 public:
  explicit TestTeam(int members, int latest_us = 0) : members_(members), latest_us_(latest_us) {}
  void Run(Body body, void* state) noexcept override {
    std::vector<std::thread> others;
    for (int member = 1; member < members_; ++member) {
      others.emplace_back([this, body, state, member] {
        std::this_thread::sleep_for(std::chrono::microseconds(latest_us_ * member / members_));
        body(state, member, members_);
      });
    }
    body(state, 0, members_);
    for (auto& other : others) other.join();
  }

 private:
  const int members_;
  const int latest_us_;
};

// Host lanes that a team of the caller's runs: too few members, as many as lanes, and more.
struct TeamLanes : HostLanes {
  static Outcome Run(const std::shared_ptr<Program>& program, std::span<void* const> args,
                     std::span<void* const> results) {
    static std::atomic<int> calls{0};
    const int number = calls.fetch_add(1);
    return dfx_test::Try([&] {
      TestTeam team(1 + number % 5, number % 3 * 100);
      return Engine::Get().Run(program, args, results, false, number % 2 == 0, 0, &team);
    });
  }
};

inline Outcome RunOnDevice(CudaEngine& engine, const std::shared_ptr<Program>& program,
                           std::span<void* const> args, std::span<void* const> results,
                           CUstream_st* caller, void* scratch = nullptr, int device = -1) {
  return dfx_test::Try([&] {
    engine.Run(program, args, results, caller, scratch, device);
    return std::vector<TraceRecord>();
  });
}

// The fake driver with random delays, one engine, and a caller's stream for each thread.
struct DeviceLanes {
  DeviceLanes() { fake::SetMaxDelayUs(100); }

  static CudaEngine*& engine() {
    static CudaEngine* made = new CudaEngine(fake::Driver(), {});
    return made;
  }

  static LaunchDesc Launch(const std::string& name, Work work, std::vector<int32_t> ins = {},
                           std::vector<int32_t> outs = {}) {
    return MakeLaunch(
        name,
        [work = std::move(work)](const Buffer* in, int n_in, Buffer* out, int n_out, Lane* lane) {
          // The lists are the engine's: what runs later needs its own.
          std::vector<Buffer> ins_now(in, in + n_in), outs_now(out, out + n_out);
          CheckCuda(fake::Driver(),
                    fake::Launch(lane->cuda()->stream(),
                                 [=]() mutable {
                                   work(ins_now.data(), n_in, outs_now.data());
                                   return true;
                                 }),
                    "launch");
          return 0;
        },
        std::move(ins), std::move(outs));
  }
  static Outcome Run(const std::shared_ptr<Program>& program, std::span<void* const> args,
                     std::span<void* const> results) {
    fake::Stream caller;
    Outcome result = RunOnDevice(*engine(), program, args, results, caller.get());
    const CudaStatus status = caller.Synchronize();
    if (result.ok && status != kCudaSuccess) result = {false, "the stream failed", {}};
    return result;
  }
  static LaunchDesc Compute(const std::string& name, Affine of, std::vector<int32_t> ins,
                            std::vector<int32_t> outs) {
    return LaunchAffine<DeviceLanes>(name, std::move(of), std::move(ins), std::move(outs));
  }
  static int64_t LiveCalls() { return 0; }
};

}  // namespace dfx::test
