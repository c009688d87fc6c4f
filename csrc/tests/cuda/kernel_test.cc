// User kernels as steps, on the fake driver.
#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "dfx/cuda/kernel.h"
#include "steps.h"

namespace {

using dfx::BufferKind;
using dfx::CudaEngine;
using dfx::KernelParameter;
using dfx::KernelSpec;
using dfx::LaunchDesc;
using dfx::Program;
using dfx::test::RunOnDevice;
using dfx::test::RunOnHost;
using dfx_test::Problem;
namespace fake = dfx::fake;

template <typename T>
KernelParameter Constant(T value) {
  KernelParameter p{KernelParameter::kConstant, 0, {}};
  p.bytes.resize(sizeof(T));
  std::memcpy(p.bytes.data(), &value, sizeof(T));
  return p;
}

// out[0] = in[0] * factor + in[1], all int64; the parameters are (out, in 1, factor, in 0).
KernelSpec MultiplyAdd(int64_t factor) {
  fake::DefineKernel("multiply_add", {8, 8, 8, 8}, [](void* const* p) {
    auto address = [p](int i) { return *static_cast<int64_t* const*>(p[i]); };
    *address(0) = *address(3) * *static_cast<const int64_t*>(p[2]) + *address(1);
    return true;
  });
  KernelSpec step;
  step.image = "fake";
  step.name = "multiply_add";
  step.block[0] = 32;
  step.parameters = {{KernelParameter::kOutput, 0, {}},
                     {KernelParameter::kInput, 1, {}},
                     Constant(factor),
                     {KernelParameter::kInput, 0, {}}};
  return step;
}

struct Fixture {
  CudaEngine engine{fake::Driver(), {}};

  std::string Error(KernelSpec step) {
    try {
      dfx::MakeKernelStep("multiply-add", engine, std::move(step));
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }
};

std::shared_ptr<Program> OneKernel(std::unique_ptr<dfx::Step> step,
                                   std::vector<int32_t> ins = {0, 1}) {
  auto p = std::make_shared<Program>(2, 0, 2, 1, 0, "kernel");
  p->AddBuffer({BufferKind::kArg, 0, 0, 8});
  p->AddBuffer({BufferKind::kArg, 1, 0, 8});
  p->AddBuffer({BufferKind::kResult, 0, 0, 8});
  p->AddLaunch(1, LaunchDesc{std::move(step), std::move(ins), {2}});
  REQUIRE(Problem(*p) == "");
  return p;
}

}  // namespace

TEST_CASE_FIXTURE(Fixture, "a kernel gets addresses and constants in its own order") {
  fake::SetMaxDelayUs(100);
  auto program = OneKernel(dfx::MakeKernelStep("multiply-add", engine, MultiplyAdd(7)));
  fake::Stream caller;
  for (int64_t i = 0; i < 50; ++i) {
    int64_t a = i, b = 1000, out = -1;
    void* args[] = {&a, &b};
    void* results[] = {&out};
    REQUIRE(RunOnDevice(engine, program, args, results, caller.get()).error == "");
    REQUIRE(caller.Synchronize() == 0);
    REQUIRE(out == 7 * i + 1000);
  }
}

TEST_CASE_FIXTURE(Fixture, "an image is loaded once") {
  const int64_t before = fake::Calls("cuModuleLoadData");
  for (int64_t i = 0; i < 5; ++i) dfx::MakeKernelStep("multiply-add", engine, MultiplyAdd(i));
  CHECK(fake::Calls("cuModuleLoadData") == before + 1);
}

TEST_CASE_FIXTURE(Fixture, "a kernel that cannot be loaded says why") {
  auto step = MultiplyAdd(1);
  step.image = "no image";
  CHECK(Error(step).find("cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE") == 0);
  step = MultiplyAdd(1);
  step.name = "nobody";
  CHECK(Error(step).find("cuModuleGetFunction of 'nobody' failed: CUDA_ERROR_NOT_FOUND") == 0);
  step = MultiplyAdd(1);
  step.shared_bytes = 1 << 20;
  CHECK(Error(step).find("cuFuncSetAttribute") == 0);
  step.shared_bytes = 200 * 1024;
  CHECK(Error(step) == "");
  step.block[2] = 0;
  CHECK(Error(step).find("block of size 0") != std::string::npos);
  step = MultiplyAdd(1);
  step.parameters[0].index = -1;
  CHECK(Error(step).find("negative index") != std::string::npos);
}

TEST_CASE_FIXTURE(Fixture, "a launch that cannot be is an error of the call") {
  fake::Stream caller;
  int64_t a = 1, b = 2, out = -1;
  void* args[] = {&a, &b};
  void* results[] = {&out};
  auto error = [&](const std::shared_ptr<Program>& p) {
    return RunOnDevice(engine, p, args, results, caller.get()).error;
  };
  CHECK(error(OneKernel(dfx::MakeKernelStep("multiply-add", engine, MultiplyAdd(7)), {0}))
            .find("takes input 1 and output 0; the step has 1 inputs") != std::string::npos);
  auto wide = MultiplyAdd(7);
  wide.block[0] = 2048;
  CHECK(error(OneKernel(dfx::MakeKernelStep("multiply-add", engine, wide)))
            .find("cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE") != std::string::npos);
  auto good = OneKernel(dfx::MakeKernelStep("multiply-add", engine, MultiplyAdd(7)));
  CHECK(error(good) == "");
  CHECK(caller.Synchronize() == 0);
  CHECK(out == 9);
  auto on_host = RunOnHost(good, args, results);
  CHECK(on_host.error.find("needs a CUDA lane; lane 1 runs on the host") != std::string::npos);
}
