// What the driver's handles point to. The names of the structures are those of cuda.h.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda.h"

namespace dfx::fake {

enum class Kind { kEmpty, kKernel, kCopy, kSet, kHost, kAlloc, kFree, kGraph, kConditional };

// Memory that an operation touches.
struct Access {
  CudaAddress address = 0;
  size_t bytes = 0;
  bool write = false;
};

// How a kernel was launched. Arguments are copies, taken when the launch was asked for.
struct KernelLaunch {
  CUfunc_st* function = nullptr;
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  std::vector<std::vector<char>> arguments;
};

// What a stream or a graph's node does. `run` says whether the device is still sound.
struct Work {
  Kind kind = Kind::kEmpty;
  std::string label;
  std::function<bool()> run;
  std::vector<Access> accesses;
  std::shared_ptr<const KernelLaunch> launch;
  void* host_function = nullptr;  // of kHost
  void* host_data = nullptr;
  mutable uint64_t traced = 0;  // its number in the trace
};

// What an event's last record stands for.
struct Ticket {
  std::atomic<uint32_t> done{0};
  double when = 0;  // seconds, of a steady clock
  void Set();
  void Wait() {
    while (done.load(std::memory_order_acquire) == 0) done.wait(0, std::memory_order_acquire);
  }
};

// Numbers of traced operations, after which something comes.
using Order = std::set<uint64_t>;
using Nodes = std::set<CUgraphNode_st*>;

struct Capture {
  unsigned long long id = 0;
  CUstream_st* origin = nullptr;
  bool valid = true;
  bool ended = false;
  int mode = 0;  // of CUstreamCaptureMode
  std::thread::id thread;
  std::shared_ptr<CUgraph_st> graph;
  std::set<CUstream_st*> streams;
};

class Graph {
 public:
  std::shared_ptr<CUgraph_st> graph;
};

}  // namespace dfx::fake

struct CUctx_st {
  int device = 0;
  int retained = 0;
};

struct CUfunc_st {
  std::string name;
  CUmod_st* module = nullptr;
  std::vector<size_t> sizes;  // of its parameters
  unsigned max_shared_bytes = 48 * 1024;
  dfx::fake::Kernel run;  // what tests defined it to be
};

struct CUmod_st {
  uint64_t id = 0;
  int device = 0;
  std::string image;  // if it is a text
  std::map<std::string, std::unique_ptr<CUfunc_st>> functions;
  std::map<std::string, std::pair<dfx::CudaAddress, size_t>> globals;
};

struct CUdevResourceDesc_st {
  unsigned sms = 0;
};
struct CUgreenCtx_st {
  unsigned sms = 0;
};

struct CUgraphNode_st {
  uint64_t id = 0;
  CUgraph_st* graph = nullptr;
  dfx::fake::Work work;
  dfx::fake::Nodes after;
  bool enabled = true;
  std::shared_ptr<CUgraph_st> child;                // of kGraph
  std::vector<std::shared_ptr<CUgraph_st>> bodies;  // of kConditional
  int conditional = 0;                              // of CUgraphConditionalNodeType
  unsigned long long handle = 0;                    // that the conditional reads
  std::vector<void*> argument_pointers;             // what GetParams gave out
};

struct CUgraph_st {
  uint64_t id = 0;
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
};

// A copy of its graph; updates name the nodes of the original.
struct CUgraphExec_st {
  uint64_t id = 0;
  std::shared_ptr<CUgraph_st> graph;
  std::map<CUgraphNode_st*, CUgraphNode_st*> copies;
  int64_t launches = 0;
  int64_t updates = 0;
};

struct CUevent_st {
  int device = 0;
  std::shared_ptr<dfx::fake::Ticket> ticket;    // of the last record outside captures
  dfx::fake::Order order;                       // what that record comes after, if traced
  std::shared_ptr<dfx::fake::Capture> capture;  // or the capture of the last record,
  dfx::fake::Nodes frontier;                    // and the nodes that it stands for
};

struct CUstream_st {
  CUstream_st() : thread([this] { Loop(); }) {}
  ~CUstream_st();
  void Push(std::function<void()> work);
  bool Idle();
  void Loop();

  uint64_t id = 0;
  int device = 0;
  int priority = 0;
  unsigned flags = 0;
  bool is_default = false;                      // the legacy stream, which cannot be captured
  CUgreenCtx_st* green = nullptr;               // that it is confined to
  std::shared_ptr<dfx::fake::Capture> capture;  // guarded by the driver's mutex, as are
  dfx::fake::Nodes frontier;                    // the nodes that its next node comes after,
  dfx::fake::Order order;                       // and the traced operations its next one is after
  std::vector<std::shared_ptr<dfx::fake::Ticket>> ignored;  // waits, while waits are ignored
  std::mutex mutex;                                         // guards the rest
  std::condition_variable wake;
  std::deque<std::function<void()>> queue;
  bool busy = false;
  bool stop = false;
  std::thread thread;  // last: it starts when the rest is there
};
