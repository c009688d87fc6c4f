// The part of libcuda that XLA's CUDA plugin needs beyond the engine's (library.cc), on the fake
// driver's objects. Only what NVIDIA's headers document; build.py makes a stub that says its name
// of every other function that the plugin can look up.
#pragma once
#include <cuda.h>

#include <cstring>

#include "../state.h"

#define DFX_EXPORT extern "C" __attribute__((visibility("default")))
#define RETURN(status) return static_cast<CUresult>(status)
// Start of a call; the driver's mutex is held from here on.
#define BEGIN(...) \
  LOCK;            \
  if (dfx::CudaStatus entered = dfx::fake::Enter(__VA_ARGS__); entered != 0) RETURN(entered)

namespace dfx::fake {

int Setting(const char* name, int otherwise);

// ---- memory.cc: all with S().mutex held ----
enum class Memory { kDevice, kHost, kManaged };
struct Block {
  size_t bytes = 0;
  Memory kind = Memory::kDevice;
  int device = 0;
};
// The block that holds the address, or null.
const Block* Find(CudaAddress address, CudaAddress* begin = nullptr);
CudaStatus Allocate(CudaAddress* address, size_t bytes, Memory kind, int device);
// A copy, with the addresses checked when it runs.
Work CheckedCopy(CudaAddress to, CudaAddress from, size_t bytes);
Work CheckedSet(CudaAddress to, unsigned value, size_t width, size_t count);

// ---- image.cc ----
bool HasKernel(const std::string& ptx, const std::string& kernel);
// Sizes of the parameters of a kernel in a PTX text; empty if the text has no such kernel.
std::vector<size_t> ParameterSizes(const std::string& ptx, const std::string& kernel);
// Size and contents of a global variable of a PTX text; false if the text has none of that name.
bool GlobalOf(const std::string& ptx, const std::string& name, std::vector<char>* bytes);

// ---- kernels.cc ----
// What a kernel does that is known by its name: those of XLA's conditionals and of tests/gpu. Of a
// kernel in a binary, whose parameters' sizes nobody can read, it tells those, too.
Kernel KnownKernel(const std::string& name, std::vector<size_t>& sizes);

// ---- modules.cc: S().mutex is held ----
std::vector<CUmod_st*>& Modules();
CUfunc_st* FunctionOf(CUmod_st* module, const std::string& name);
// Tells the name, once, and remembers it.
CudaStatus Missing(const std::string& name);

}  // namespace dfx::fake

// For the libraries around the driver, which are libraries of their own.
DFX_EXPORT int fake_missing(const char* name);
// A kernel that a library launches: its name, and arguments of eight bytes.
DFX_EXPORT int fake_launch(const char* name, CUstream_st* stream, const uint64_t* arguments, int n);
// Another operation of a library, for which the data is kept: it runs on the stream (other than 0
// is a fault) and touches memory: address, bytes, and 1 for a write, of each.
DFX_EXPORT int fake_enqueue(const char* name, CUstream_st* stream, int (*run)(void*),
                            void (*drop)(void*), void* data, const uint64_t* accesses, int n);
// In such an operation: memory that it touches as well, which is known only now.
DFX_EXPORT void fake_touches(const uint64_t* accesses, int n);
DFX_EXPORT int fake_current_device();
DFX_EXPORT int fake_device_memory(dfx::CudaAddress address, size_t bytes);
// A kernel that a program registered with the CUDA runtime.
DFX_EXPORT CUfunc_st* fake_registered(const char* name);
