// Trace records of a profiled call.
#pragma once
#include <chrono>
#include <cstdint>

namespace dfx {

// Ids of records: a launch is -1 - launch, a wait is kWaitTraceId + event. Others are the numbers
// that steps pass to Call::Trace; a gate's are a region, and kCopyTraceId + region for its copies.
inline constexpr int kWaitTraceId = 1 << 24;
inline constexpr int kCopyTraceId = 1 << 25;

struct TraceRecord {
  int id;
  int lane;
  int64_t t0_ns;
  int64_t t1_ns;
};

// steady_clock, in nanoseconds.
inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace dfx
