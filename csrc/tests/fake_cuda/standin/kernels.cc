// Kernels that are known by their names.
#include <algorithm>
#include <chrono>

#include "exports.h"

namespace dfx::fake {
namespace {

template <typename T>
T Value(void* const* parameters, int i) {
  T value;
  std::memcpy(&value, parameters[i], sizeof value);
  return value;
}

void SetCondition(unsigned long long handle, unsigned value) {
  LOCK;
  S().conditions[handle] = value;
}

// Of XLA: makes one of up to eight branches the one that runs; an index out of range means the
// last.
bool SetCase(void* const* p) {
  const auto* index = Value<const unsigned char*>(p, 8);
  const bool is_bool = Value<unsigned char>(p, 9) != 0;
  const int offset = Value<int>(p, 10), branches = Value<int>(p, 11);
  int chosen = is_bool ? (*index != 0 ? 0 : 1) : *reinterpret_cast<const int*>(index);
  chosen -= offset;
  if (Value<unsigned char>(p, 12) != 0 && (chosen < 0 || chosen >= branches)) chosen = branches - 1;
  for (int i = 0; i < branches; ++i) SetCondition(Value<unsigned long long>(p, i), i == chosen);
  return true;
}

bool SetWhile(void* const* p) {
  SetCondition(Value<unsigned long long>(p, 0), *Value<const bool*>(p, 1));
  return true;
}

// Of tests/gpu: y = a x.
bool Scale(void* const* p) {
  const auto* x = Value<const float*>(p, 0);
  auto* y = Value<float*>(p, 1);
  for (unsigned i = 0; i < Value<unsigned>(p, 3); ++i) y[i] = Value<float>(p, 2) * x[i];
  return true;
}

// Of tests/gpu: takes so many cycles of a clock of 1 GHz, and never more than 20 ms.
bool Wait(void* const* p) {
  const auto ns = std::min(Value<unsigned long long>(p, 0), 20'000'000ull);
  std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
  return true;
}

}  // namespace

Kernel KnownKernel(const std::string& name, const std::vector<size_t>& sizes) {
  if (name == "set_case_condition" && sizes.size() == 13) return SetCase;
  if (name == "set_while_condition" && sizes.size() == 2) return SetWhile;
  if (name == "scale" && sizes == std::vector<size_t>{8, 8, 4, 4}) return Scale;
  if (name == "delay" && sizes == std::vector<size_t>{8}) return Wait;
  return nullptr;
}

}  // namespace dfx::fake
