#include "dfx/scratch.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <set>
#include <vector>

#include "dfx/program.h"

namespace dfx {
namespace {

// Blocks that wait for a call; more are freed. First use of memory is slow, so some are kept.
constexpr size_t kWaiting = 8;

// Blocks go that were too large for so many calls.
constexpr uint64_t kCalls = 256;

// Calls without scratch look after blocks this often: they take no lock else.
constexpr uint64_t kLook = 32;

struct Block {
  char* data;
  size_t size;
  uint64_t wanted;  // the count of calls when more than half of it was last needed
  bool needed;      // by who holds it now
};

class Pool {
 public:
  // Never destroyed: lanes may outlive static destructors.
  static Pool& Get() {
    static Pool* const pool = new Pool;
    return *pool;
  }

  Block Take(size_t bytes) {
    Block found{nullptr, 0, 0, false};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++calls_;
      // The smallest that suffices; else the largest one goes, so that what takes its place lies
      // not beside it: calls one after another need one block, as large as the largest.
      auto place = std::find_if(waiting_.begin(), waiting_.end(),
                                [bytes](const Block& b) { return b.size >= bytes; });
      const bool fits = place != waiting_.end();
      if (!fits && !waiting_.empty()) --place;
      if (place != waiting_.end()) {
        found = *place;
        waiting_.erase(place);
        if (!fits) held_ -= static_cast<int64_t>(found.size);
      }
      if (fits) {
        found.needed = found.size / 2 < bytes;
        return found;
      }
    }
    std::free(found.data);
    auto* data = static_cast<char*>(std::aligned_alloc(static_cast<size_t>(kAlignment), bytes));
    if (data == nullptr) throw std::bad_alloc();
    std::lock_guard<std::mutex> lock(mutex_);
    held_ += static_cast<int64_t>(bytes);
    return {data, bytes, calls_, true};
  }

  void Give(Block block) noexcept {
    Unwanted unwanted;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (block.needed) block.wanted = calls_;
      DropOld(unwanted);
      if (waiting_.size() < kWaiting && block.size <= Largest() &&
          calls_ - block.wanted <= kCalls) {
        const auto place = std::find_if(waiting_.begin(), waiting_.end(),
                                        [&](const Block& b) { return b.size >= block.size; });
        waiting_.insert(place, block);  // room was reserved
      } else {
        Drop(block, unwanted);
      }
    }
    Free(unwanted);
  }

  // A call that needs no scratch.
  void Pass() noexcept {
    if (++calls_ % kLook != 0) return;
    Unwanted unwanted;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      DropOld(unwanted);
    }
    Free(unwanted);
  }

  void Join(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    needs_.insert(bytes);
  }

  // In a forked child, where the mutex may be held by a thread that is not there, nothing is done.
  void Leave(size_t bytes) noexcept {
    if (getpid() != pid_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    needs_.erase(needs_.find(bytes));
    while (!waiting_.empty() && waiting_.back().size > Largest()) {
      held_ -= static_cast<int64_t>(waiting_.back().size);
      std::free(waiting_.back().data);
      waiting_.pop_back();
    }
  }

  int64_t Held() {
    std::lock_guard<std::mutex> lock(mutex_);
    return held_;
  }

 private:
  // Blocks to be freed when the mutex is no longer held.
  struct Unwanted {
    std::array<char*, kWaiting + 1> data{};
    size_t count = 0;
  };

  Pool() { waiting_.reserve(kWaiting); }

  void Drop(const Block& block, Unwanted& unwanted) noexcept {
    held_ -= static_cast<int64_t>(block.size);
    unwanted.data[unwanted.count++] = block.data;
  }

  void DropOld(Unwanted& unwanted) noexcept {
    std::erase_if(waiting_, [&](const Block& block) {
      const bool old = calls_ - block.wanted > kCalls;
      if (old) Drop(block, unwanted);
      return old;
    });
  }

  static void Free(const Unwanted& unwanted) noexcept {
    for (size_t i = 0; i < unwanted.count; ++i) std::free(unwanted.data[i]);
  }

  size_t Largest() const { return needs_.empty() ? 0 : *needs_.rbegin(); }

  const pid_t pid_ = getpid();
  std::mutex mutex_;
  std::vector<Block> waiting_;   // by size
  std::multiset<size_t> needs_;  // of the programs that are there
  int64_t held_ = 0;
  std::atomic<uint64_t> calls_ = 0;
};

size_t Rounded(int64_t bytes) {
  constexpr auto kUnit = static_cast<size_t>(kAlignment);
  return (static_cast<size_t>(bytes) + kUnit - 1) / kUnit * kUnit;
}

}  // namespace

Scratch::Scratch(int64_t bytes) {
  if (bytes <= 0) {
    Pool::Get().Pass();
    return;
  }
  const Block block = Pool::Get().Take(Rounded(bytes));
  data_ = block.data;
  size_ = block.size;
  wanted_ = block.wanted;
  needed_ = block.needed;
}

Scratch::~Scratch() {
  if (data_ != nullptr) Pool::Get().Give({data_, size_, wanted_, needed_});
}

int64_t Scratch::Held() { return Pool::Get().Held(); }

ScratchNeed::ScratchNeed(int64_t bytes) : bytes_(bytes) {
  if (bytes > 0) Pool::Get().Join(Rounded(bytes));
}

ScratchNeed::~ScratchNeed() {
  if (bytes_ > 0) Pool::Get().Leave(Rounded(bytes_));
}

}  // namespace dfx
