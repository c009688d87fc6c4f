#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_driver.h"
#include "dfx/call.h"
#include "dfx/cuda_engine.h"
#include "dfx/kernel.h"

namespace dfx {
namespace {

constexpr unsigned kDefaultSharedBytes = 48 * 1024;  // more must be asked for

class Kernel {
 public:
  Kernel(CudaEngine& engine, KernelStep step) : driver_(engine.driver()), step_(std::move(step)) {
    for (const unsigned* size : {step_.grid, step_.block}) {
      if (size[0] == 0 || size[1] == 0 || size[2] == 0) {
        throw std::invalid_argument("kernel '" + step_.name + "' has a grid or block of size 0");
      }
    }
    for (const KernelParameter& p : step_.parameters) {
      if (p.index < 0) throw std::invalid_argument("a kernel parameter has a negative index");
      if (p.kind == KernelParameter::kInput) inputs_ = std::max(inputs_, p.index + 1);
      if (p.kind == KernelParameter::kOutput) outputs_ = std::max(outputs_, p.index + 1);
    }
    CudaContextScope scope(driver_, engine.context());
    const std::string what = "cuModuleGetFunction of '" + step_.name + "'";
    CheckCuda(
        driver_,
        driver_.ModuleGetFunction(&function_, engine.LoadModule(step_.image), step_.name.c_str()),
        what.c_str());
    if (step_.shared_bytes > kDefaultSharedBytes) {
      CheckCuda(driver_,
                driver_.FuncSetAttribute(function_, kMaxDynamicSharedBytes,
                                         static_cast<int>(step_.shared_bytes)),
                "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)");
    }
  }

  void Launch(const Buffer* ins, int n_ins, Buffer* outs, int n_outs, Lane* lane) {
    CudaLane* cuda = lane->cuda();
    if (cuda == nullptr) {
      throw std::invalid_argument("a CUDA kernel needs a CUDA lane; lane " +
                                  std::to_string(lane->index()) + " runs on the host");
    }
    if (inputs_ > n_ins || outputs_ > n_outs) {
      throw std::invalid_argument(
          "kernel '" + step_.name + "' takes input " + std::to_string(inputs_ - 1) +
          " and output " + std::to_string(outputs_ - 1) + "; the step has " +
          std::to_string(n_ins) + " inputs and " + std::to_string(n_outs) + " outputs");
    }
    // The driver copies what these point to during the launch.
    std::vector<void*> parameters;
    parameters.reserve(step_.parameters.size());
    for (KernelParameter& p : step_.parameters) {
      switch (p.kind) {
        case KernelParameter::kInput:
          parameters.push_back(const_cast<void**>(&ins[p.index].data));
          break;
        case KernelParameter::kOutput:
          parameters.push_back(&outs[p.index].data);
          break;
        case KernelParameter::kConstant:
          parameters.push_back(p.bytes.data());
          break;
      }
    }
    CheckCuda(driver_,
              driver_.LaunchKernel(function_, step_.grid[0], step_.grid[1], step_.grid[2],
                                   step_.block[0], step_.block[1], step_.block[2],
                                   step_.shared_bytes, cuda->stream(), parameters.data(), nullptr),
              "cuLaunchKernel");
  }

 private:
  const CudaDriver& driver_;
  KernelStep step_;
  CUfunc_st* function_ = nullptr;
  int inputs_ = 0;
  int outputs_ = 0;
};

int LaunchKernel(void* user, const Buffer* ins, int n_ins, Buffer* outs, int n_outs, Lane* lane) {
  static_cast<Kernel*>(user)->Launch(ins, n_ins, outs, n_outs, lane);
  return 0;
}

}  // namespace

Launcher MakeKernelLauncher(CudaEngine& engine, KernelStep step) {
  return Launcher{&LaunchKernel, std::make_shared<Kernel>(engine, std::move(step))};
}

}  // namespace dfx
