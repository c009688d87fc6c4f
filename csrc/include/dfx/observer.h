// Trace records of a profiled call.
#pragma once
#include <cstdint>

namespace dfx {

// Ids >= 0 are the step's own numbers (see the gates); the engine's launches carry -1 - launch.
struct TraceRecord {
  int id;
  int lane;
  int64_t t0_ns;
  int64_t t1_ns;
};

// steady_clock, in nanoseconds.
int64_t NowNs();

}  // namespace dfx
