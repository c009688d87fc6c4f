// Kernels that are known by their names.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "exports.h"

namespace dfx::fake {
namespace {

template <typename T>
T Value(void* const* parameters, int i) {
  T value;
  std::memcpy(&value, parameters[i], sizeof value);
  return value;
}

// What a kernel touches, for the trace. If that is no memory of a device it faults, as there.
bool Touches(const void* address, size_t bytes, bool write) {
  const auto at = reinterpret_cast<CudaAddress>(address);
  if (fake_device_memory(at, bytes) == 0) return false;
  LOCK;
  TraceAccesses({{at, bytes, write}});
  return true;
}

void SetCondition(unsigned long long handle, unsigned value) {
  LOCK;
  S().conditions[handle] = value;
}

// Of XLA, as its PTX text says: makes one of up to eight branches the one that runs. A predicate is
// its number (false is 0); of branches in several groups this is the one that begins at `offset`.
// An index out of range means the last branch, if that is in this group.
bool SetCase(void* const* p) {
  const auto* at = Value<const unsigned char*>(p, 8);
  int32_t index = 0;
  const bool boolean = Value<unsigned char>(p, 9) != 0;
  if (!Touches(at, boolean ? 1 : sizeof index, false)) return false;
  if (boolean) {
    index = static_cast<signed char>(*at);
  } else {
    std::memcpy(&index, at, sizeof index);
  }
  const int offset = Value<int>(p, 10), branches = Value<int>(p, 11);
  int chosen = index - offset;
  if (Value<unsigned char>(p, 12) != 0 && (index < 0 || chosen >= branches)) chosen = branches - 1;
  for (int i = 0; i < branches; ++i) SetCondition(Value<unsigned long long>(p, i), i == chosen);
  return true;
}

bool SetWhile(void* const* p) {
  const auto* at = Value<const bool*>(p, 1);
  if (!Touches(at, 1, false)) return false;
  SetCondition(Value<unsigned long long>(p, 0), *at);
  return true;
}

// Of tests/gpu: y = a x.
bool Scale(void* const* p) {
  const auto* x = Value<const float*>(p, 0);
  auto* y = Value<float*>(p, 1);
  const auto n = Value<unsigned>(p, 3);
  if (!Touches(x, n * sizeof *x, false) || !Touches(y, n * sizeof *y, true)) return false;
  for (unsigned i = 0; i < n; ++i) y[i] = Value<float>(p, 2) * x[i];
  return true;
}

// Of tests of random plans, "mix_INS_OUTS": result o becomes three times the sum of all inputs, and
// a constant, and o; before that it holds garbage.
bool Mix(void* const* p, int ins, int outs) {
  const auto n = Value<unsigned>(p, ins + outs);
  const auto constant = Value<unsigned>(p, ins + outs + 1);
  for (int i = 0; i < ins + outs; ++i) {
    if (!Touches(Value<unsigned*>(p, i), n * sizeof(unsigned), i >= ins)) return false;
  }
  std::vector<unsigned> sums(n, constant);
  for (int i = 0; i < ins; ++i) {
    const auto* in = Value<const unsigned*>(p, i);
    for (unsigned k = 0; k < n; ++k) sums[k] += 3 * in[k];
  }
  for (const bool last : {false, true}) {
    for (int o = 0; o < outs; ++o) {
      auto* out = Value<unsigned*>(p, ins + o);
      for (unsigned k = 0; k < n; ++k) {
        out[k] = last ? sums[k] + static_cast<unsigned>(o) : 0xdeadbeef;
      }
    }
  }
  return true;
}

// Of tests/gpu: takes so many cycles of a clock of 1 GHz, and never more than 20 ms.
bool Wait(void* const* p) {
  const auto ns = std::min(Value<unsigned long long>(p, 0), 20'000'000ull);
  std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
  return true;
}

// Of XLA and of jaxlib, in front of a batched product: addresses that are `bytes` apart.
bool BatchPointers(char* first, size_t bytes, size_t count, char** to) {
  if (!Touches(to, count * sizeof *to, true)) return false;
  for (size_t i = 0; i < count; ++i) to[i] = first + i * bytes;
  return true;
}

// Of jaxlib: rows as they stand after the swaps of an LU decomposition, for each matrix of a batch.
bool PivotsToPermutation(void* const* p) {
  const auto* pivots = Value<const int*>(p, 0);
  auto* rows = Value<int*>(p, 1);
  const auto batches = Value<int64_t>(p, 2);
  const int n_pivots = Value<int>(p, 3), n_rows = Value<int>(p, 4);
  if (!Touches(pivots, static_cast<size_t>(batches * n_pivots) * sizeof(int), false) ||
      !Touches(rows, static_cast<size_t>(batches * n_rows) * sizeof(int), true)) {
    return false;
  }
  for (int64_t batch = 0; batch < batches; ++batch, pivots += n_pivots, rows += n_rows) {
    for (int i = 0; i < n_rows; ++i) rows[i] = i;
    for (int i = 0; i < n_pivots; ++i) {
      if (pivots[i] >= i && pivots[i] < n_rows) std::swap(rows[i], rows[pivots[i]]);
    }
  }
  return true;
}

}  // namespace

Kernel KnownKernel(const std::string& name, std::vector<size_t>& sizes) {
  if (name == "set_case_condition" && sizes.size() == 13) return SetCase;
  if (name == "set_while_condition" && sizes.size() == 2) return SetWhile;
  if (name == "scale" && sizes == std::vector<size_t>{8, 8, 4, 4}) return Scale;
  int ins = 0, outs = 0;
  if (std::sscanf(name.c_str(), "mix_%d_%d", &ins, &outs) == 2 &&
      sizes.size() == static_cast<size_t>(ins + outs) + 2) {
    return [ins, outs](void* const* p) { return Mix(p, ins, outs); };
  }
  const auto ends = [&name](const char* end) { return name.ends_with(end); };
  if (ends("MakeBatchPointersEPcmmPPv")) {  // (char*, size_t, size_t, void**)
    sizes.assign(4, 8);
    return [](void* const* p) {
      return BatchPointers(Value<char*>(p, 0), Value<size_t>(p, 1), Value<size_t>(p, 2),
                           Value<char**>(p, 3));
    };
  }
  if (ends("MakeBatchPointersAsyncKernelEPcPPvll")) {  // (char*, void**, int64_t, int64_t)
    sizes.assign(4, 8);
    return [](void* const* p) {
      return BatchPointers(Value<char*>(p, 0), Value<size_t>(p, 3), Value<size_t>(p, 2),
                           Value<char**>(p, 1));
    };
  }
  if (ends("LuPivotsToPermutationKernelEPKiPilii")) {  // (int*, int*, int64_t, int32_t, int32_t)
    sizes = {8, 8, 8, 4, 4};
    return PivotsToPermutation;
  }
  if (name == "delay" && sizes == std::vector<size_t>{8}) return Wait;
  return nullptr;
}

}  // namespace dfx::fake
