// What the files of Python bindings share.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "dfx/cuda/cuda_engine.h"
#include "dfx/program.h"

namespace dfx::ffi {

// The Python handle of a program, under construction or finished.
struct ProgramHandle {
  std::shared_ptr<Program> program;
  bool limit_blas = false;
};

// The Python handle of an engine. What C++ keeps of it is the engine itself and no Python object,
// so that an XLA thread can let go of it.
struct CudaEngineHandle {
  std::shared_ptr<CudaEngine> engine;
};

template <typename T>
T* Pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline std::vector<void*> Pointers(const std::vector<uintptr_t>& addresses) {
  std::vector<void*> pointers;
  for (uintptr_t address : addresses) pointers.push_back(Pointer<void>(address));
  return pointers;
}

// Programs on host lanes, and what the process shares (bindings.cc).
void BindPrograms(nanobind::module_& m);
// CUDA lanes, kernels and XLA executables as steps (cuda_bindings.cc).
void BindCuda(nanobind::module_& m);
// What AOTInductor compiled, run through its C interface without the interpreter lock (aoti.cc).
void BindAoti(nanobind::module_& m);
// The type FastCall, and what it looks at before a call: captures and forks (fast_call.cc).
void BindFastCall(nanobind::module_& m);
// What a call looks like, to be compared with later ones (call_match.cc).
void BindCallMatch(nanobind::module_& m);

}  // namespace dfx::ffi
