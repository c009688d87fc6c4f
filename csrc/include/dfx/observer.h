// Trace records of a profiled call.
#pragma once
#include <cstdint>

namespace dfx {

// Ids of the engine's own records: a launch is -1 - launch, a wait is kWaitTraceId + event. Other
// ids are the step's own numbers, which steps pass to Call::Trace.
constexpr int kWaitTraceId = 1 << 24;

struct TraceRecord {
  int id;
  int lane;
  int64_t t0_ns;
  int64_t t1_ns;
};

// steady_clock, in nanoseconds.
int64_t NowNs();

}  // namespace dfx
