#include "state.h"

#include <chrono>
#include <cstdlib>
#include <random>

namespace dfx::fake {

State& S() {
  static State* state = new State;
  return *state;
}

thread_local std::vector<CUctx_st*> contexts;

int& InsideDriver::Depth() {
  thread_local int depth = 0;
  return depth;
}

namespace {

void Delay() {
  const int max = S().max_delay_us.load(std::memory_order_relaxed);
  if (max == 0) return;
  thread_local std::mt19937 random(std::random_device{}());
  const int us = static_cast<int>(random() % static_cast<unsigned>(max + 1));
  if (us > max / 2) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

}  // namespace

CudaStatus Enter(const char* symbol, Needs needs) {
  State& s = S();
  ++s.calls[symbol];
  if (s.fail_symbol == symbol && s.fail_skip-- == 0) {
    s.fail_symbol.clear();
    s.fail_taken = true;
    return s.fail_status;
  }
  if (s.sticky != 0) return s.sticky;
  if (needs == kContext && (contexts.empty() || contexts.back() != &s.context)) {
    return kInvalidContext;
  }
  return 0;
}

CudaStatus Misuse(const std::string& what) {
  if (S().misuse.empty()) S().misuse = what;
  return kInvalidHandle;
}

bool Known(CUstream_st* stream) { return S().streams.count(stream) != 0; }

CudaStatus Enqueue(CUstream_st* stream, std::function<void()> run) {
  if (!Known(stream)) return Misuse("work for a stream that does not exist");
  if (stream->capture != nullptr) {
    Capture& capture = *stream->capture;
    if (!capture.valid) return kCaptureIsInvalid;
    capture.nodes.push_back(Node{std::move(run), stream->frontier});
    stream->frontier = {capture.nodes.size() - 1};
    return 0;
  }
  stream->Push(std::move(run));
  return 0;
}

std::function<void()> AsKernel(std::function<bool()> function) {
  return [function = std::move(function)] {
    if (S().sticky != 0) return;  // the context is gone: nothing runs
    Delay();
    if (!function()) S().sticky = kIllegalAddress;
  };
}

bool Reset(std::string* why) {
  LOCK;
  State& s = S();
  *why = s.misuse;
  auto count = [why](size_t n, const char* what) {
    if (n != 0) why->append(" ").append(std::to_string(n)).append(" ").append(what).append(" left");
  };
  count(s.streams.size(), "streams");
  count(s.events.size(), "events");
  count(s.greens.size(), "green contexts");
  // What a lost context held is gone with it.
  if (s.sticky == 0) count(s.memory.size(), "allocations");
  count(static_cast<size_t>(s.context.retained), "contexts");
  count(contexts.size(), "current contexts");
  for (CudaAddress address : s.memory) std::free(reinterpret_cast<void*>(address));
  s.memory.clear();
  for (CUdevResourceDesc_st* descriptor : s.descriptors) delete descriptor;
  s.descriptors.clear();
  s.max_delay_us = 0;
  s.sticky = 0;
  s.devices = 1;
  s.calls.clear();
  s.fail_symbol.clear();
  s.fail_taken = s.ignore_waits = false;
  s.blocking = 0;
  s.misuse.clear();
  return why->empty();
}

void SetMaxDelayUs(int us) { S().max_delay_us = us; }

void SetDevices(int count) {
  LOCK;
  S().devices = count;
}

void FailCall(const std::string& symbol, CudaStatus status, int skip) {
  LOCK;
  S().fail_symbol = symbol;
  S().fail_status = status;
  S().fail_skip = skip;
  S().fail_taken = false;
}

bool FailureTaken() {
  LOCK;
  S().fail_symbol.clear();
  return S().fail_taken;
}

void IgnoreWaits(bool ignore) {
  LOCK;
  S().ignore_waits = ignore;
}

int64_t Calls(const std::string& symbol) {
  LOCK;
  return S().calls[symbol];
}

int64_t BlockingCalls() {
  LOCK;
  return S().blocking;
}

void DefineKernel(const std::string& name, std::vector<size_t> sizes, Kernel function) {
  LOCK;
  S().kernels[name] = CUfunc_st{std::move(sizes), std::move(function)};
}

CudaStatus Launch(CUstream_st* stream, std::function<bool()> function) {
  ENTER("cuLaunchKernel", kNothing);
  return Enqueue(stream, AsKernel(std::move(function)));
}

}  // namespace dfx::fake

void CUstream_st::Loop() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mutex);
      wake.wait(lock, [this] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      work = std::move(queue.front());
      queue.pop_front();
    }
    work();
  }
}
