// A lane: an ordered queue of work. Lane 0 has no thread: it runs on the threads of Run's callers,
// one after the other in ticket order. Lanes 1 and up own a thread each. Lanes live as long as the
// process; a lane runs one call at a time.
#pragma once
#include <atomic>
#include <cstdint>

namespace dfx {

class Call;
class CudaLane;

class Lane {
 public:
  explicit Lane(int index) : index_(index) {}
  virtual ~Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  int index() const { return index_; }
  // This lane as a CUDA stream; nullptr for a host lane.
  virtual CudaLane* cuda() { return nullptr; }
  // The call whose steps this lane runs now. Steps (and code they call on other threads, while the
  // step has not returned) find their call here.
  Call* current() const { return current_.load(std::memory_order_acquire); }
  void SetCurrent(Call* call) { current_.store(call, std::memory_order_release); }
  // Of a profiled call: since when the lane has done what it does now. Its steps keep it.
  int64_t since_ns = 0;
  // What the gates of this lane copied so far. Only the lane writes: a plain addition, read
  // anywhere.
  int64_t copied_bytes() const { return copied_bytes_.load(std::memory_order_relaxed); }
  void AddCopied(int64_t bytes) {
    copied_bytes_.store(copied_bytes() + bytes, std::memory_order_relaxed);
  }

 private:
  const int index_;
  std::atomic<Call*> current_{nullptr};
  std::atomic<int64_t> copied_bytes_{0};
};

// Runs a lane's instructions of a call, then marks the lane done. What a step throws becomes the
// call's error.
void RunLane(Lane& lane, Call& call) noexcept;

}  // namespace dfx
