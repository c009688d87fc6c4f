// The fake driver's books, and how a call begins.
#pragma once
#include "objects.h"

namespace dfx::fake {

constexpr CudaStatus kInvalidValue = 1;
constexpr CudaStatus kOutOfMemory = 2;
constexpr CudaStatus kInvalidDevice = 101;
constexpr CudaStatus kInvalidImage = 200;
constexpr CudaStatus kInvalidContext = 201;
constexpr CudaStatus kInvalidHandle = 400;
constexpr CudaStatus kIllegalState = 401;
constexpr CudaStatus kNotFound = 500;
constexpr CudaStatus kNotReady = 600;
constexpr CudaStatus kIllegalAddress = 700;
constexpr CudaStatus kNotSupported = 801;
constexpr CudaStatus kCaptureUnsupported = 900;
constexpr CudaStatus kCaptureIsInvalid = 901;
constexpr CudaStatus kCaptureUnmatched = 903;
constexpr CudaStatus kCaptureUnjoined = 904;
constexpr CudaStatus kCaptureIsolation = 905;
constexpr CudaStatus kCapturedEvent = 907;
constexpr CudaStatus kCaptureWrongThread = 908;
constexpr CudaStatus kUpdateFailure = 910;
constexpr CudaStatus kInvalidResourceType = 914;
constexpr CudaStatus kInvalidResource = 915;

constexpr CudaStatus kNotPermitted = 800;
constexpr int kGlobal = 0, kRelaxed = 2;  // of CUstreamCaptureMode
constexpr int kMaxDevices = 8;

struct State {
  State();
  std::mutex mutex;
  std::atomic<int> max_delay_us{0};
  std::atomic<CudaStatus> sticky{0};
  int devices = 1;
  CUctx_st contexts[kMaxDevices];
  std::set<CUstream_st*> streams;
  std::set<CUevent_st*> events;
  std::map<CudaAddress, size_t> memory;        // of MemAllocAsync
  std::set<CudaAddress> freed;                 // of those: their stream is not there yet
  std::map<CudaAddress, size_t> graph_memory;  // that graphs keep
  std::set<CUgreenCtx_st*> greens;
  std::set<CUdevResourceDesc_st*> descriptors;
  unsigned splits = 0;  // of multiprocessors, so far
  std::map<CUgraph_st*, std::shared_ptr<CUgraph_st>> graphs;
  std::set<CUgraphExec_st*> executables;
  std::set<std::shared_ptr<Capture>> capturing;
  std::map<unsigned long long, unsigned> conditions;  // values of conditional handles
  std::map<std::string, std::unique_ptr<CUfunc_st>> kernels;
  CUmod_st module;
  std::map<std::string, int64_t> calls;
  std::map<std::string, int64_t> without_context;  // that were refused because the thread has none
  std::string fail_symbol;
  CudaStatus fail_status = 0;
  int fail_skip = 0;
  bool fail_taken = false;
  std::atomic<bool> ignore_waits{false};
  std::atomic<bool> keep_freed{false};
  int64_t blocking = 0;
  // What takes images other than the tests' "fake", if this is a whole driver.
  CUmod_st* (*load_module)(const void* image) = nullptr;
  CUfunc_st* (*find_function)(CUmod_st* module, const std::string& name) = nullptr;
  uint64_t ids = 0;  // of everything that has a number
  std::string misuse;
};

State& S();

// Of this thread; the last one is current.
extern thread_local std::vector<CUctx_st*> contexts;

enum Needs { kNothing, kContext };

// Start of every call; S().mutex is held. What it returns other than success, the call returns.
CudaStatus Enter(const char* symbol, Needs needs = kContext);
CudaStatus Misuse(const std::string& what);
bool Known(CUstream_st* stream);
CUctx_st* CurrentContext();
int CurrentDevice();
CUstream_st* NewStream(int device, unsigned flags, int priority);
// The stream that a handle stands for, which may be that of the default stream. It is a stream like
// the others: that blocking streams wait for it, and it for them, is not modelled.
CUstream_st* Of(CUstream_st* stream);
// A call that might wait for the device, or is not ordered by streams: while some thread captures,
// it may be forbidden, and ends the capture.
CudaStatus NotWhileCapturing();
bool& InHostFunction();  // of this thread: the driver may not be called in one
int& CaptureMode();      // of this thread: what cuThreadExchangeStreamCaptureMode exchanges

// Makes the work the stream's next operation, or a node of what it captures; S().mutex is held.
CudaStatus Enqueue(CUstream_st* stream, Work work);
// Runs one operation: not at all once the context is lost; false where it faulted.
void Run(const Work& work);
void Delay();
Work HostWork(Kind kind, std::function<void()> run);
// Copies of a launch's arguments.
std::vector<std::vector<char>> Arguments(const CUfunc_st& function, void** parameters,
                                         void** extra);
Work KernelWork(std::shared_ptr<const KernelLaunch> launch);
Work CopyWork(CudaAddress to, CudaAddress from, size_t bytes);

// Graphs (graph.cc); S().mutex is held, but for RunGraph.
std::shared_ptr<CUgraph_st> NewGraph();
CUgraphNode_st* AddNode(CUgraph_st* graph, Work work, Nodes after);
std::shared_ptr<CUgraph_st> Clone(const CUgraph_st& graph,
                                  std::map<CUgraphNode_st*, CUgraphNode_st*>* copies);
CudaStatus BeginCapture(CUstream_st* stream, std::shared_ptr<CUgraph_st> graph, Nodes after,
                        int mode);
CudaStatus EndCaptureLocked(CUstream_st* stream, std::shared_ptr<CUgraph_st>* graph);
CudaStatus LaunchLocked(const std::shared_ptr<CUgraph_st>& graph, uint64_t executable,
                        CUstream_st* stream);
void RunGraph(const CUgraph_st& graph);

// The trace (trace.cc): operations in the order they were asked for, each with those it comes
// after by what the driver was told; S().mutex is held.
bool Tracing();
void TraceWork(CUstream_st* stream, const Work& work);
void TraceGraph(CUstream_st* stream, const CUgraph_st& graph, uint64_t executable);
void TraceText(const std::string& line);
void HostKnows(const Order& order);  // the host saw that these are over
// What the operation that this thread runs touches, where that is known only when it runs.
void TraceAccesses(const std::vector<Access>& accesses);
uint64_t& Running();  // of this thread: the number of that operation, 0 if it is not traced

// Fills the green contexts' part of the table.
void AddGreenContexts(CudaDriver& driver);

}  // namespace dfx::fake

#define LOCK                      \
  dfx::fake::InsideDriver inside; \
  std::lock_guard<std::mutex> lock(dfx::fake::S().mutex)
#define ENTER(...) \
  LOCK;            \
  if (CudaStatus entered = dfx::fake::Enter(__VA_ARGS__); entered != 0) return entered
