// Memory that values of a call on cores lie in, shared by all programs of the process: plans of one
// function that live side by side, of which a call runs one, need as much as the largest of them.
//
// Who owns what: a block belongs to whoever holds its Scratch, else to the pool. What orders
// accesses: the pool's mutex, between the holder that gave a block back and the next one. On
// failure nothing is kept that was not there before.
//
// How much the pool keeps: at most 8 blocks, none larger than what a living program needs, and none
// of which the last 256 calls of the process needed less than half; calls without scratch count
// (they look after blocks every 32 calls only). Who holds a block needs it until it gives it back.
// So what a large program or a burst of calls once needed goes when smaller or fewer calls come.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

namespace dfx {

// A block, given back when it is destroyed.
class Scratch {
 public:
  Scratch() = default;
  // At least so many bytes, aligned; throws std::bad_alloc. None for 0.
  explicit Scratch(int64_t bytes);
  Scratch(Scratch&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        wanted_(other.wanted_),
        needed_(other.needed_) {}
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(wanted_, other.wanted_);
    std::swap(needed_, other.needed_);
    return *this;
  }
  ~Scratch();

  char* data() const { return data_; }

  // Bytes that blocks have now, those that wait for their next call included.
  static int64_t Held();

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
  // The pool's count of calls when more than half of the block was last given back or taken.
  uint64_t wanted_ = 0;
  bool needed_ = false;  // this holder needs more than half of it
};

// A program that needs so much scratch is there as long as this is. Blocks that no program could
// need any more are freed.
class ScratchNeed {
 public:
  ScratchNeed() = default;
  explicit ScratchNeed(int64_t bytes);  // throws std::bad_alloc
  ScratchNeed(const ScratchNeed&) = delete;
  ScratchNeed& operator=(ScratchNeed&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~ScratchNeed();

 private:
  int64_t bytes_ = 0;
};

}  // namespace dfx
