#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_driver.h"
#include "dfx/call.h"
#include "dfx/cuda/cuda_engine.h"
#include "dfx/cuda/kernel.h"

namespace dfx {
namespace {

constexpr unsigned kDefaultSharedBytes = 48 * 1024;  // more must be asked for

class KernelStep : public Step {
 public:
  KernelStep(std::string name, CudaEngine& engine, KernelSpec kernel)
      : Step(std::move(name)), driver_(engine.driver()), kernel_(std::move(kernel)) {
    for (const unsigned* size : {kernel_.grid, kernel_.block}) {
      if (size[0] == 0 || size[1] == 0 || size[2] == 0) {
        throw std::invalid_argument("kernel '" + kernel_.name + "' has a grid or block of size 0");
      }
    }
    for (const KernelParameter& p : kernel_.parameters) {
      if (p.index < 0) throw std::invalid_argument("a kernel parameter has a negative index");
      const auto needed = static_cast<size_t>(p.index) + 1;
      if (p.kind == KernelParameter::kInput) inputs_ = std::max(inputs_, needed);
      if (p.kind == KernelParameter::kOutput) outputs_ = std::max(outputs_, needed);
    }
    CudaContextScope scope(driver_, engine.context());
    const std::string what = "cuModuleGetFunction of '" + kernel_.name + "'";
    CheckCuda(driver_,
              driver_.ModuleGetFunction(&function_, engine.LoadModule(kernel_.image),
                                        kernel_.name.c_str()),
              what.c_str());
    if (kernel_.shared_bytes > kDefaultSharedBytes) {
      CheckCuda(driver_,
                driver_.FuncSetAttribute(function_, kMaxDynamicSharedBytes,
                                         static_cast<int>(kernel_.shared_bytes)),
                "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)");
    }
  }

  std::string Describe() const override { return "CUDA kernel " + kernel_.name; }

  void Launch(std::span<const Buffer> ins, std::span<Buffer> outs, Lane& lane) override {
    CudaLane* cuda = lane.cuda();
    if (cuda == nullptr) {
      throw std::invalid_argument("a CUDA kernel needs a CUDA lane; lane " +
                                  std::to_string(lane.index()) + " runs on the host");
    }
    if (inputs_ > ins.size() || outputs_ > outs.size()) {
      throw std::invalid_argument(
          "kernel '" + kernel_.name + "' takes input " + std::to_string(inputs_ - 1) +
          " and output " + std::to_string(outputs_ - 1) + "; the step has " +
          std::to_string(ins.size()) + " inputs and " + std::to_string(outs.size()) + " outputs");
    }
    // The driver copies what these point to during the launch.
    std::vector<void*> parameters;
    parameters.reserve(kernel_.parameters.size());
    for (KernelParameter& p : kernel_.parameters) {
      switch (p.kind) {
        case KernelParameter::kInput:
          parameters.push_back(const_cast<void**>(&ins[static_cast<size_t>(p.index)].data));
          break;
        case KernelParameter::kOutput:
          parameters.push_back(&outs[static_cast<size_t>(p.index)].data);
          break;
        case KernelParameter::kConstant:
          parameters.push_back(p.bytes.data());
          break;
      }
    }
    CheckCuda(
        driver_,
        driver_.LaunchKernel(function_, kernel_.grid[0], kernel_.grid[1], kernel_.grid[2],
                             kernel_.block[0], kernel_.block[1], kernel_.block[2],
                             kernel_.shared_bytes, cuda->stream(), parameters.data(), nullptr),
        "cuLaunchKernel");
  }

 private:
  const CudaDriver& driver_;
  KernelSpec kernel_;
  CUfunc_st* function_ = nullptr;
  size_t inputs_ = 0, outputs_ = 0;  // how many of the step's the parameters name
};

}  // namespace

std::unique_ptr<Step> MakeKernelStep(std::string name, CudaEngine& engine, KernelSpec kernel) {
  return std::make_unique<KernelStep>(std::move(name), engine, std::move(kernel));
}

}  // namespace dfx
