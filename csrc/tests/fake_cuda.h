// A CUDA driver without a device, for tests: a table of the functions that the engine calls.
//
// A stream is a thread with a queue, device memory is host memory, a kernel is a C++ function. Each
// operation starts after a random delay, so that what the calls do not order comes out of order,
// and the sanitizers see streams as threads. Stream capture builds a graph with the edges that the
// calls made and nothing else; a replay takes a random order that keeps the edges. Like the real
// one, it refuses calls without a current context, calls that a capture forbids, and every call
// after a kernel has faulted.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/cuda_driver.h"

namespace dfx::fake {

const CudaDriver& Driver();

// Back to a driver with one device and no faults; false (and why) if something was leaked or
// misused since the last time. No stream may be in use.
bool Reset(std::string* why);

// The upper end of the random delay before each operation.
void SetMaxDelayUs(int us);
void SetDevices(int count);
// The next call of `symbol`, after `skip` of them, fails with `status` and does nothing.
void FailCall(const std::string& symbol, CudaStatus status, int skip = 0);
bool FailureTaken();
// From now on every call returns `status`, as after a fault that loses the context.
void LoseDevice(CudaStatus status);
// Makes kernels run without the waits of their streams, and without the edges of their graphs: what
// the tests must notice.
void IgnoreWaits(bool ignore);
// Memory that was freed stays, so that what uses it too late hurts nobody else.
void KeepFreed(bool keep);
// Multiprocessors that the stream's work may use.
unsigned SmsOf(CUstream_st* stream);
// Whether this thread is in one of the driver's functions: what the engine's own memory is to lack,
// the driver has.
struct InsideDriver {
  InsideDriver() { ++Depth(); }
  ~InsideDriver() { --Depth(); }
  static int& Depth();  // of this thread
};
// Calls of `symbol` since Reset.
int64_t Calls(const std::string& symbol);
// Calls since Reset that blocked the host.
int64_t BlockingCalls();

// Between the two, what streams and graphs are given is written down (fake_cuda/trace.cc).
void BeginTrace();
std::string EndTrace();

// Makes `function` a kernel of the module image "fake"; `sizes` are its parameters' sizes. It gets
// copies of the parameters; false is a fault that loses the context.
using Kernel = std::function<bool(void* const* parameters)>;
void DefineKernel(const std::string& name, std::vector<size_t> sizes, Kernel function);

// What computes the kernels that no test defined: a kernel's name, its module's number, its
// arguments' addresses and sizes; other than 0 is a fault. Without it they do nothing.
using KernelValues = int (*)(const char* name, uint64_t module, void* const* arguments,
                             const size_t* sizes, int count);
void SetKernelValues(KernelValues function);

// Enqueues a function as a kernel would be.
CudaStatus Launch(CUstream_st* stream, std::function<bool()> function);

// A stream of the test's own, with the device's context made current while it is used.
class Stream {
 public:
  Stream();
  ~Stream();
  CUstream_st* get() const { return stream_; }
  CudaStatus Synchronize();

 private:
  CUstream_st* stream_ = nullptr;
};

class Graph;
CudaStatus BeginCapture(CUstream_st* stream);
// A null graph if the capture was invalid or left a stream unjoined.
CudaStatus EndCapture(CUstream_st* stream, std::shared_ptr<Graph>* graph);
CudaStatus LaunchGraph(const std::shared_ptr<Graph>& graph, CUstream_st* stream);

}  // namespace dfx::fake
