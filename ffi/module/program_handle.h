// The Python handle of a program.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>

#include "dfx/program.h"

namespace dfx::ffi {

// A program under construction or finished.
struct ProgramHandle {
  std::shared_ptr<Program> program;
  bool finished = false;
  bool limit_blas = false;
};

inline void RequireOpen(const ProgramHandle& handle) {
  if (handle.finished) {
    throw nanobind::value_error("the program is finished and can no longer change");
  }
}

// CUDA lanes, kernels and XLA executables as steps (cuda_bindings.cc).
void BindCuda(nanobind::module_& m);

}  // namespace dfx::ffi
