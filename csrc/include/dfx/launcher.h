// Step ABI: what a lane calls to run one step.
#pragma once
#include <cstdint>
#include <memory>

namespace dfx {

class Lane;

// A resolved view of memory handed to a step. `dims` points into the Program.
struct Buffer {
  void* data;
  int64_t bytes;
  int32_t dtype;
  int32_t rank;
  const int64_t* dims;
};

// Returns 0 on success. On failure returns non-zero, after lane->current()->Fail("why").
using LaunchFn = int (*)(void* user, const Buffer* ins, int n_ins, Buffer* outs, int n_outs,
                         Lane* lane);

struct Launcher {
  LaunchFn fn = nullptr;
  std::shared_ptr<void> user;  // kept alive by the Program
};

}  // namespace dfx
