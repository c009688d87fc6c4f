// The XLA FFI handlers, as addresses for PyCapsules.
#pragma once

namespace dfx::ffi {

void* RunInstantiateHandler();
void* RunExecuteHandler();
void* GateHandler();
void* FailHandler();
void* StateTypeId();
void* StateTypeInfo();

}  // namespace dfx::ffi
