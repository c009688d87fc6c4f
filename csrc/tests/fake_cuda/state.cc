#include "state.h"

#include <algorithm>
#include <cstdlib>

namespace dfx::fake {

State& S() {
  static State* state = new State;
  return *state;
}

State::State() {
  for (int device = 0; device < kMaxDevices; ++device) contexts[device].device = device;
}

thread_local std::vector<CUctx_st*> contexts;

int& InsideDriver::Depth() {
  thread_local int depth = 0;
  return depth;
}

bool& InHostFunction() {
  thread_local bool inside = false;
  return inside;
}

int& CaptureMode() {
  thread_local int mode = kGlobal;
  return mode;
}

CudaStatus Enter(const char* symbol, Needs needs) {
  State& s = S();
  ++s.calls[symbol];
  if (s.fail_symbol == symbol && s.fail_skip-- == 0) {
    s.fail_symbol.clear();
    s.fail_taken = true;
    return s.fail_status;
  }
  if (s.sticky != 0) return s.sticky;
  if (InHostFunction()) {
    Misuse(std::string(symbol) + " called by a host function");
    return kNotPermitted;
  }
  if (needs == kContext && CurrentContext() == nullptr) {
    ++s.without_context[symbol];
    return kInvalidContext;
  }
  return 0;
}

CudaStatus Misuse(const std::string& what) {
  if (S().misuse.empty()) S().misuse = what;
  return kInvalidHandle;
}

bool Known(CUstream_st* stream) { return S().streams.count(stream) != 0; }

CUctx_st* CurrentContext() { return contexts.empty() ? nullptr : contexts.back(); }

int CurrentDevice() { return contexts.empty() ? 0 : contexts.back()->device; }

CUstream_st* Of(CUstream_st* stream) {
  // Null, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
  if (reinterpret_cast<uintptr_t>(stream) > 2) return stream;
  static std::map<int, CUstream_st*> defaults;
  CUstream_st*& found = defaults[CurrentDevice()];
  if (!Known(found)) {
    found = NewStream(CurrentDevice(), 0, 0);
    found->is_default = true;
  }
  return found;
}

CudaStatus NotWhileCapturing() {
  if (CaptureMode() == kRelaxed) return 0;  // this thread has asked to be trusted
  for (const std::shared_ptr<Capture>& capture : S().capturing) {
    const bool mine = capture->thread == std::this_thread::get_id();
    const bool forbidden =
        mine ? capture->mode != kRelaxed : capture->mode == kGlobal && CaptureMode() == kGlobal;
    if (!forbidden) continue;
    capture->valid = false;
    return kCaptureUnsupported;
  }
  return 0;
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
  for (const CUctx_st& context : s.contexts) {
    count(static_cast<size_t>(context.retained), "contexts");
  }
  count(contexts.size(), "current contexts");
  for (const auto& [address, bytes] : s.memory) std::free(reinterpret_cast<void*>(address));
  s.memory.clear();
  s.freed.clear();
  s.graph_memory.clear();
  for (CUdevResourceDesc_st* descriptor : s.descriptors) delete descriptor;
  s.descriptors.clear();
  s.capturing.clear();
  s.max_delay_us = 0;
  s.sticky = 0;
  s.devices = 1;
  s.calls.clear();
  s.without_context.clear();
  s.fail_symbol.clear();
  s.fail_taken = s.ignore_waits = s.keep_freed = false;
  s.blocking = 0;
  s.misuse.clear();
  return why->empty();
}

void SetMaxDelayUs(int us) { S().max_delay_us = us; }

void SetDevices(int count) {
  LOCK;
  S().devices = std::min(count, kMaxDevices);
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

void LoseDevice(CudaStatus status) { S().sticky = status; }

void IgnoreWaits(bool ignore) { S().ignore_waits = ignore; }

void KeepFreed(bool keep) { S().keep_freed = keep; }

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
  std::unique_ptr<CUfunc_st>& kernel = S().kernels[name];
  if (kernel == nullptr) kernel = std::make_unique<CUfunc_st>();
  kernel->name = name;
  kernel->module = &S().module;
  kernel->sizes = std::move(sizes);
  kernel->run = std::move(function);
}

}  // namespace dfx::fake
