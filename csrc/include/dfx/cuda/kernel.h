// A step that launches a user's CUDA kernel on its lane's stream.
//
// The kernel's parameters are given in order: addresses of inputs and outputs, and constants.
// Modules are loaded once for each image and live as long as the engine's context: a kernel in
// flight, or a graph that was captured, may need one long after the program that launched it is
// gone.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dfx/step.h"

namespace dfx {

class CudaEngine;

struct KernelParameter {
  enum Kind : uint8_t { kInput, kOutput, kConstant } kind;
  int32_t index = 0;          // which input or output of the step
  std::vector<char> bytes{};  // the constant as the kernel takes it
};

struct KernelSpec {
  std::string image;  // PTX text, or a cubin's or fatbin's bytes
  std::string name;   // as in the image: unmangled only for extern "C"
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;  // dynamic
  std::vector<KernelParameter> parameters;
};

// Loads the kernel on the engine's device; the engine must outlive the step. Throws Error (no such
// kernel, an image for another device, more shared memory than there is) and std::invalid_argument
// (a grid or block that cannot be).
std::unique_ptr<Step> MakeKernelStep(std::string name, CudaEngine& engine, KernelSpec kernel);

}  // namespace dfx
