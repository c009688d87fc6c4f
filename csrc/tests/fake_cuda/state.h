// What the fake driver's files share: its objects, its books, and how a call begins.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda.h"

namespace dfx::fake {

// What an event's last record stands for.
struct Ticket {
  std::atomic<uint32_t> done{0};
  void Set() {
    done.store(1, std::memory_order_release);
    done.notify_all();
  }
  void Wait() {
    while (done.load(std::memory_order_acquire) == 0) done.wait(0, std::memory_order_acquire);
  }
};

struct Node {
  std::function<void()> run;
  std::set<size_t> after;
};

struct Capture {
  unsigned long long id = 0;
  CUstream_st* origin = nullptr;
  bool valid = true;
  bool ended = false;
  std::vector<Node> nodes;
  std::set<CUstream_st*> streams;
};

class Graph {
 public:
  std::vector<Node> nodes;
};

}  // namespace dfx::fake

struct CUctx_st {
  int retained = 0;
};
struct CUmod_st {};
struct CUfunc_st {
  std::vector<size_t> sizes;
  dfx::fake::Kernel run;
};
struct CUdevResourceDesc_st {
  unsigned sms = 0;
};
struct CUgreenCtx_st {
  unsigned sms = 0;
};

struct CUevent_st {
  std::shared_ptr<dfx::fake::Ticket> ticket;    // of the last record outside captures
  std::shared_ptr<dfx::fake::Capture> capture;  // or the capture of the last record,
  std::set<size_t> frontier;                    // and the nodes that it stands for
};

struct CUstream_st {
  CUstream_st() : thread([this] { Loop(); }) {}
  ~CUstream_st() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stop = true;
    }
    wake.notify_all();
    thread.join();
  }
  void Push(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      queue.push_back(std::move(work));
    }
    wake.notify_all();
  }
  void Loop();

  CUgreenCtx_st* green = nullptr;               // that it is confined to
  std::shared_ptr<dfx::fake::Capture> capture;  // guarded by the driver's mutex, as is
  std::set<size_t> frontier;                    // the nodes that its next node comes after
  std::mutex mutex;                             // guards queue and stop
  std::condition_variable wake;
  std::deque<std::function<void()>> queue;
  bool stop = false;
  std::thread thread;  // last: it starts when the rest is there
};

namespace dfx::fake {

constexpr CudaStatus kInvalidValue = 1;
constexpr CudaStatus kInvalidDevice = 101;
constexpr CudaStatus kInvalidImage = 200;
constexpr CudaStatus kInvalidContext = 201;
constexpr CudaStatus kInvalidHandle = 400;
constexpr CudaStatus kNotFound = 500;
constexpr CudaStatus kIllegalAddress = 700;
constexpr CudaStatus kCaptureUnsupported = 900;
constexpr CudaStatus kCaptureIsInvalid = 901;
constexpr CudaStatus kCaptureUnmatched = 903;
constexpr CudaStatus kCaptureUnjoined = 904;
constexpr CudaStatus kCaptureIsolation = 905;
constexpr CudaStatus kInvalidResource = 915;

struct State {
  std::mutex mutex;
  std::atomic<int> max_delay_us{0};
  std::atomic<CudaStatus> sticky{0};
  int devices = 1;
  CUctx_st context;
  std::set<CUstream_st*> streams;
  std::set<CUevent_st*> events;
  std::set<CudaAddress> memory;
  std::set<CUgreenCtx_st*> greens;
  std::set<CUdevResourceDesc_st*> descriptors;
  std::map<std::string, CUfunc_st> kernels;
  CUmod_st module;
  std::map<std::string, int64_t> calls;
  std::string fail_symbol;
  CudaStatus fail_status = 0;
  int fail_skip = 0;
  bool fail_taken = false;
  bool ignore_waits = false;
  int64_t blocking = 0;
  unsigned long long captures = 0;
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
// Makes `run` the stream's next operation; S().mutex is held.
CudaStatus Enqueue(CUstream_st* stream, std::function<void()> run);
// Work that comes after a random delay, and not at all once the context is lost.
std::function<void()> AsKernel(std::function<bool()> function);

// Fills the green contexts' part of the table.
void AddGreenContexts(CudaDriver& driver);

}  // namespace dfx::fake

#define LOCK                      \
  dfx::fake::InsideDriver inside; \
  std::lock_guard<std::mutex> lock(dfx::fake::S().mutex)
#define ENTER(...) \
  LOCK;            \
  if (CudaStatus entered = dfx::fake::Enter(__VA_ARGS__); entered != 0) return entered
