// Where lane threads may run.
#pragma once
#include <pthread.h>
#include <sched.h>

namespace dfx {

// Keeps a thread off the calling thread's core. Without this the kernel often wakes a lane on the
// core of the thread that woke it, and moves it only some milliseconds later: two lanes then share
// a core beside an idle one. Any other core the caller may use is allowed. Returns the core kept
// free, or -1 if nothing was changed (one core, or no permission): it is a hint, not a need.
inline int KeepOffThisCore(pthread_t thread, int kept_off) {
  const int core = sched_getcpu();
  if (core < 0 || core == kept_off) return kept_off;
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return -1;  // more than 1024 cores
  CPU_CLR(core, &cores);
  if (CPU_COUNT(&cores) == 0) return -1;
  return pthread_setaffinity_np(thread, sizeof(cores), &cores) == 0 ? core : -1;
}

// Moves the calling thread off `core` if it runs there and may run elsewhere. A thread that another
// one woke is often put on that one's core, and stands behind it for milliseconds.
inline void LeaveCore(int core) {
  if (core < 0 || sched_getcpu() != core) return;
  cpu_set_t before;
  if (sched_getaffinity(0, sizeof(before), &before) != 0) return;
  cpu_set_t others = before;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof(others), &others) != 0) return;
  sched_setaffinity(0, sizeof(before), &before);
}

// While it lives, the calling thread stays on `core`, the one that the other lanes are kept off, if
// it is there now. A thread that slept, for the interpreter lock for instance, is otherwise often
// woken on the core of the lane that woke it, and stands behind that one beside an idle core.
// Threads that the caller starts meanwhile inherit the restriction.
class StayOnCore {
 public:
  explicit StayOnCore(int core) {
    if (core < 0 || sched_getcpu() != core) return;
    if (sched_getaffinity(0, sizeof(before_), &before_) != 0 || CPU_COUNT(&before_) < 2) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    stays_ = sched_setaffinity(0, sizeof(one), &one) == 0;
  }
  ~StayOnCore() {
    if (stays_) sched_setaffinity(0, sizeof(before_), &before_);
  }
  StayOnCore(const StayOnCore&) = delete;
  StayOnCore& operator=(const StayOnCore&) = delete;

 private:
  cpu_set_t before_;
  bool stays_ = false;
};

}  // namespace dfx
