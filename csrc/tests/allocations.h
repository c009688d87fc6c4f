// Allocations that fail on purpose: the tests' operator new (failures_test.cc) counts them.
#pragma once
#include <cstdint>

namespace dfx_test {

// How many more allocations of this thread succeed; below 0, all do.
extern thread_local int64_t allocations_left;

class FailAllocationsAfter {
 public:
  explicit FailAllocationsAfter(int64_t n) { allocations_left = n; }
  ~FailAllocationsAfter() { allocations_left = -1; }
};

}  // namespace dfx_test
