// The Python handle of a program.
#pragma once
#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <string>

#include "dfx/cuda_engine.h"
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

// Lists of a call, checked before anybody reads beyond them.
inline void RequireRunnable(const ProgramHandle& handle, size_t args, size_t results) {
  if (!handle.finished) throw nanobind::value_error("call finish() before run()");
  const std::string misfit = handle.program->CheckCounts(args, results);
  if (!misfit.empty()) throw nanobind::value_error(misfit.c_str());
}

// The Python handle of an engine. What C++ keeps of it is the engine itself and no Python object,
// so that an XLA thread can let go of it.
struct CudaEngineHandle {
  std::shared_ptr<CudaEngine> engine;
};

// CUDA lanes, kernels and XLA executables as steps (cuda_bindings.cc).
void BindCuda(nanobind::module_& m);

}  // namespace dfx::ffi
