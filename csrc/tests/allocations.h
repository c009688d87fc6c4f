// Allocations that fail on purpose: the tests' operator new (failures_test.cc) counts them.
#pragma once
#include <cstdint>

namespace dfx_test {

// How many more allocations of this thread succeed; below 0, all do.
int64_t& AllocationsLeft();

class FailAllocationsAfter {
 public:
  explicit FailAllocationsAfter(int64_t n) { AllocationsLeft() = n; }
  ~FailAllocationsAfter() { AllocationsLeft() = -1; }
};

}  // namespace dfx_test
