#include "blas_limit.h"

#include <mutex>
#include <vector>

namespace dfx::ffi {
namespace {

struct Blas {
  int (*get)();
  void (*set)(int);
  int saved;
};

struct State {
  std::mutex mutex;
  std::vector<Blas> libraries;
  int holders = 0;
};
State& GetState() {
  static State* state = new State;
  return *state;
}

}  // namespace

void AddBlas(uintptr_t get_threads, uintptr_t set_threads) {
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  const Blas blas{reinterpret_cast<int (*)()>(get_threads),
                  reinterpret_cast<void (*)(int)>(set_threads), 1};
  for (const Blas& known : state.libraries) {
    if (known.set == blas.set) return;
  }
  state.libraries.push_back(blas);
}

BlasLimit::BlasLimit(bool wanted) : wanted_(wanted) {
  if (!wanted_) return;
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (state.holders++ > 0) return;
  for (Blas& blas : state.libraries) {
    blas.saved = blas.get();
    if (blas.saved != 1) blas.set(1);
  }
}

BlasLimit::~BlasLimit() {
  if (!wanted_) return;
  State& state = GetState();
  std::lock_guard<std::mutex> lock(state.mutex);
  if (--state.holders > 0) return;
  for (Blas& blas : state.libraries) {
    if (blas.saved != 1) blas.set(blas.saved);
  }
}

}  // namespace dfx::ffi
