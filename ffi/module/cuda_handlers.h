// The XLA FFI handlers for programs on CUDA, as addresses for PyCapsules.
#pragma once

#include <cstdint>

namespace dfx::ffi {

void* CudaRunInstantiateHandler();
void* CudaRunExecuteHandler();
void* CudaRunGraphHandler();
void* CudaStateTypeId();
void* CudaStateTypeInfo();
void* LaneStreamHandler();
uintptr_t TakeLaneStream();

}  // namespace dfx::ffi
