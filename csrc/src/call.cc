#include "dfx/call.h"

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "dfx/error.h"
#include "host/spin.h"

namespace dfx {

Call::Call(const Program& program)
    : program_(program),
      events_(std::make_unique<Event[]>(static_cast<size_t>(program.n_events()))),
      lane_done_(std::make_unique<std::atomic<bool>[]>(static_cast<size_t>(program.n_lanes()))),
      states_(std::make_unique<LaneState[]>(static_cast<size_t>(program.n_lanes()))) {}

Call::Call(const Program& program, void* device_scratch)
    : program_(program),
      scratch_(static_cast<char*>(device_scratch)),
      lane_done_(std::make_unique<std::atomic<bool>[]>(static_cast<size_t>(program.n_lanes()))) {}

Call::~Call() = default;

void Call::TakeScratch() {
  held_ = Scratch(program_.scratch_bytes());
  scratch_ = held_.data();
}

void Call::GiveScratch() noexcept {
  scratch_ = nullptr;
  const Scratch back = std::move(held_);
}

void Call::Reset(void* const* args, void* const* results, bool profile, uint64_t disturb) {
  args_ = args;
  results_ = results;
  profile_ = profile;
  helper_ = nullptr;
  disturb_ = disturb;
  if (disturb != 0 && scratch_ != nullptr) {
    std::memset(scratch_, 0xFF, static_cast<size_t>(program_.scratch_bytes()));
  }
  if (events_ != nullptr) {
    for (int e = 0; e < program_.n_events(); ++e) events_[static_cast<size_t>(e)].Reset();
  }
  // Lanes the program does not use count as done: none of their steps may lower the count below.
  for (int l = 0; l < program_.n_lanes(); ++l) {
    lane_done_[static_cast<size_t>(l)].store(true, std::memory_order_relaxed);
  }
  for (int l : program_.used_lanes()) {
    lane_done_[static_cast<size_t>(l)].store(false, std::memory_order_relaxed);
    if (states_ != nullptr) states_[static_cast<size_t>(l)].at.store(-1, std::memory_order_relaxed);
  }
  lanes_left_.store(static_cast<uint32_t>(program_.used_lanes().size()), std::memory_order_relaxed);
  lanes_inside_.store(lanes_left_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  all_left_.Reset();
  if (program_.used_lanes().empty()) all_left_.Signal();
  failed_.store(false, std::memory_order_relaxed);
  error_.clear();
  trace_.clear();
}

void* Call::BufferData(int id) const {
  const BufferDesc& b = program_.buffers()[static_cast<size_t>(id)];
  switch (b.kind) {
    case BufferKind::kArg:
      return static_cast<char*>(args_[b.index]) + b.offset;
    case BufferKind::kResult:
      return static_cast<char*>(results_[b.index]) + b.offset;
    case BufferKind::kScratch:
      break;
  }
  return scratch_ + b.offset;
}

Buffer Call::GetBuffer(int id) const {
  return Buffer{BufferData(id), program_.buffers()[static_cast<size_t>(id)].bytes};
}

void Call::Fail(std::string_view message) noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      error_ = message;
    } catch (const std::bad_alloc&) {
      error_ = kOutOfMemory;
    }
    failed_.store(true, std::memory_order_release);
  }
  if (events_ == nullptr) return;
  // [Abort]
  for (int e = 0; e < program_.n_events(); ++e) events_[static_cast<size_t>(e)].Abort();
}

std::string Call::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Call::ThrowIfFailed() const {
  if (failed()) throw Error(error());
}

void Call::PauseInTrial(int lane) {
  // A lane's own thread draws, and few lanes draw alike: no state has to be shared.
  thread_local uint64_t random = 0;
  random += disturb_ * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(lane) + 1;
  uint64_t x = random;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  constexpr uint64_t kLongestUs = 2000;
  if ((x & 1) != 0) {
    std::this_thread::sleep_for(std::chrono::microseconds((x >> 8) % kLongestUs));
  }
}

void Call::FailNoEvent(int event) {
  if (events_ == nullptr) {
    Fail("a step of '" + program_.name() + "' signals or awaits event " + std::to_string(event) +
         " itself, which works on host lanes only");
    return;
  }
  Fail("a step of '" + program_.name() + "' names event " + std::to_string(event) + " of " +
       std::to_string(program_.n_events()));
}

void Call::LaneDone(int lane) {
  if (lane < 0 || lane >= program_.n_lanes()) {
    Fail("a step of '" + program_.name() + "' names lane " + std::to_string(lane) + " of " +
         std::to_string(program_.n_lanes()));
    return;
  }
  if (lane_done_[static_cast<size_t>(lane)].exchange(true, std::memory_order_acq_rel)) return;
  if (!profile_) CountDown();
}

void Call::LaneLeft(int lane) {
  const bool early =
      lane_done_[static_cast<size_t>(lane)].exchange(true, std::memory_order_acq_rel);
  lanes_inside_.fetch_sub(1, std::memory_order_release);
  if (!early || profile_) CountDown();
}

void Call::CountDown() {
  if (lanes_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) all_left_.Signal();
}

void Call::WaitAllLanes() { all_left_.Wait(); }

void Call::SpinUntilLeft() const {
  constexpr int64_t kMostNs = 20'000;
  // On one core it would be in the other's way.
  static const bool alone = std::thread::hardware_concurrency() < 2;
  if (alone) return;
  const auto left = [this] { return lanes_inside_.load(std::memory_order_acquire) == 0; };
  for (const int64_t end = NowNs() + kMostNs; !left() && NowNs() < end;) CpuRelax();
}

void Call::Trace(int id, int lane, int64_t t0_ns, int64_t t1_ns) noexcept {
  if (!profile_) return;
  try {
    std::lock_guard<std::mutex> lock(mutex_);
    trace_.push_back({id, lane, t0_ns, t1_ns});
  } catch (const std::bad_alloc&) {
    Fail("no memory for the records of a profiled call");
  }
}

std::vector<TraceRecord> Call::TakeTrace() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::move(trace_);
}

}  // namespace dfx
