// A CPU client of a PJRT plugin (the package xla-cpu-pjrt), made and driven through XLA's own
// header.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dfx/pjrt.h"
#include "steps.h"

namespace dfx::test {

// The process's one client; never destroyed. Throws std::runtime_error.
class PjrtClient {
 public:
  static PjrtClient& Get();
  const void* api() const;
  void* client() const;
  // Compiles StableHLO text; the executable is destroyed with the last holder.
  std::shared_ptr<void> Compile(const std::string& stablehlo);

 private:
  PjrtClient();
  struct Impl;
  Impl* impl_;
};

constexpr int kF32 = 11;
constexpr int kS64 = 5;

// A function of `n_ins` tensors<`shape`>, `body` computing %r from %0, %1, ...; it returns %r
// `n_outs` times, each aliased with a donated argument if `in_place`.
std::string StableHlo(const std::string& shape, size_t n_ins, size_t n_outs, bool in_place,
                      const std::string& body);

// A step that several programs, and several lanes at a time, launch.
class SharedStep : public Step {
 public:
  SharedStep(std::string name, std::shared_ptr<Step> step)
      : Step(std::move(name)), step_(std::move(step)) {}
  std::string Describe() const override { return step_->Describe(); }
  void Launch(std::span<const Buffer> ins, std::span<Buffer> outs, Lane& lane) override {
    step_->Launch(ins, outs, lane);
  }

 private:
  const std::shared_ptr<Step> step_;
};

PjrtSpec MakeStep(const std::string& stablehlo, PjrtTensor tensor, size_t n_ins, size_t n_outs,
                  bool in_place, std::shared_ptr<PjrtCounters> counters = nullptr);

// Host lanes whose steps are XLA executables.
struct PjrtLanes : HostLanes {
  static LaunchDesc Compute(const std::string& name, const Affine& of, std::vector<int32_t> ins,
                            std::vector<int32_t> outs);
};

}  // namespace dfx::test
