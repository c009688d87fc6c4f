// What host and device engines share: the check of a call, and one step of a lane.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "dfx/call.h"
#include "dfx/lane.h"
#include "dfx/program.h"

namespace dfx {

// Throws std::invalid_argument saying why a program cannot run with these lists.
void CheckCallable(const Program* program, std::span<void* const> args,
                   std::span<void* const> results);

// Buffers of one launch; on the stack unless there are many.
class BufferList {
 public:
  std::span<Buffer> Resolve(const Call& call, const std::vector<int32_t>& ids) {
    Buffer* list = small_;
    if (ids.size() > kSmall) {
      large_.resize(ids.size());
      list = large_.data();
    }
    for (size_t i = 0; i < ids.size(); ++i) list[i] = call.GetBuffer(ids[i]);
    return {list, ids.size()};
  }

 private:
  static constexpr size_t kSmall = 16;
  Buffer small_[kSmall];
  std::vector<Buffer> large_;
};

// Launches the step on its buffers; what it throws becomes the call's error. The lists are the
// caller's, so that a lane allocates them once.
void RunStep(Lane& lane, Call& call, const LaunchDesc& launch, BufferList& ins,
             BufferList& outs) noexcept;

}  // namespace dfx
