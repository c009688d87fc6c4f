// One BLAS thread while several lanes run: each lane is one core's share of the machine.
#pragma once

#include <cstdint>

namespace dfx::ffi {

// Adds a BLAS library by the addresses of its `int get_num_threads()` and `set_num_threads(int)`.
void AddBlas(uintptr_t get_threads, uintptr_t set_threads);

// While one lives, every known BLAS uses one thread; the last to go restores the setting that the
// first found. Nothing happens if `wanted` is false.
class BlasLimit {
 public:
  explicit BlasLimit(bool wanted);
  ~BlasLimit();
  BlasLimit(const BlasLimit&) = delete;
  BlasLimit& operator=(const BlasLimit&) = delete;

 private:
  const bool wanted_;
};

}  // namespace dfx::ffi
