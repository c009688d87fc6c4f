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

}  // namespace dfx
