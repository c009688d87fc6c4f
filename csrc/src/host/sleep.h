// Sleeping in the kernel while a word has a value. Not std::atomic's own wait, which yields the
// core a few times before it sleeps: on a busy machine each of these costs a time slice of somebody
// else's.
#pragma once
#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

namespace dfx {

// May return though the word still has the value. Orders nothing: the caller reads the word again.
inline void SleepWhile(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  static_assert(sizeof(word) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  word.wait(value, std::memory_order_relaxed);
#endif
}

// After a change of the word. It may be gone already, if a sleeper went on without this.
inline void WakeAll(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
  word.notify_all();
#endif
}

}  // namespace dfx
