// Cumulative sums, products, maxima and minima along an axis, in one pass over memory.
//
// XLA:CPU makes these of windows in several passes. Here every element is read once and written
// once. Sums and products of floating point numbers are carried in float64, sums of float64 with
// their rounding errors (two-sum; Knuth 1969), so that no result is less exact than a tree's.
// Integers wrap around. NaN spreads to every later maximum and minimum.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>

namespace dfx::ffi {

// Numbers of 16 bits as they lie in memory.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Rounded to odd: rounded once more, to fewer bits, it is what one rounding gives.
inline float RoundToOdd(double x) {
  const float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || !std::isfinite(nearest)) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if ((bits & 1) == 0) bits += std::fabs(static_cast<double>(nearest)) < std::fabs(x) ? 1 : -1;
  return std::bit_cast<float>(bits);
}

inline double Widen(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  if (rest < 0x400) {  // denormal; by arithmetic, as threads of XLA may take denormals for zero
    const float magnitude = static_cast<float>(rest) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t exponent = rest < 0x7c00 ? 112u << 23 : 224u << 23;
  return std::bit_cast<float>(sign | ((rest << 13) + exponent));
}
inline double Widen(BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
inline double Widen(float x) { return x; }

template <typename T>
T Narrow(double x);
template <>
inline float Narrow<float>(double x) {
  return static_cast<float>(x);
}
template <>
inline BFloat16 Narrow<BFloat16>(double x) {
  const uint32_t bits = std::bit_cast<uint32_t>(RoundToOdd(x));
  if (x != x) return {static_cast<uint16_t>(0x7fc0u | ((bits >> 16) & 0x8000u))};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
inline Half Narrow<Half>(double x) {
  const uint32_t bits = std::bit_cast<uint32_t>(RoundToOdd(x));
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t made;
  if (x != x) {
    made = 0x7e00u;
  } else if (magnitude >= 0x47800000u) {  // 65536 and more
    made = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p24f;
    made = static_cast<uint32_t>((scaled + 0x1p23f) - 0x1p23f);
  } else {
    const uint32_t moved = magnitude - (112u << 23);
    made = (moved + 0xfffu + ((moved >> 13) & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | made)};
}

// A float64 with what rounding took from it.
struct Exact {
  double value, rest;
};

// Each operation: what elements are joined as, and what is carried along, of one type but for
// Sum<double>.
template <typename T>
struct Sum {
  using Carried = double;
  static Carried Identity() { return 0.0; }
  static Carried Load(T x) { return Widen(x); }
  static Carried Join(Carried a, Carried b) { return a + b; }
  static T Store(Carried a) { return Narrow<T>(a); }
};
template <typename T>
  requires std::is_integral_v<T>
struct Sum<T> {
  using Carried = std::make_unsigned_t<T>;
  static Carried Identity() { return 0; }
  static Carried Load(T x) { return static_cast<Carried>(x); }
  static Carried Join(Carried a, Carried b) { return static_cast<Carried>(a + b); }
  static T Store(Carried a) { return static_cast<T>(a); }
};
template <>
struct Sum<double> {
  using Carried = Exact;
  static Carried Identity() { return {0.0, 0.0}; }
  static double Load(double x) { return x; }
  static double Join(double a, double b) { return a + b; }
  static Carried Join(Carried a, double b) {
    const double sum = a.value + b, second = sum - a.value;
    const double lost = (a.value - (sum - second)) + (b - second);
    return {sum, lost == lost ? a.rest + lost : 0.0};  // of infinities nothing is lost
  }
  static double Store(Carried a) { return a.value + a.rest; }
};

template <typename T>
struct Product : Sum<T> {
  static double Identity() { return 1.0; }
  static double Join(double a, double b) { return a * b; }
};
template <typename T>
  requires std::is_integral_v<T>
struct Product<T> : Sum<T> {
  using Carried = typename Sum<T>::Carried;
  static Carried Identity() { return 1; }
  // Unsigned numbers of 16 bits would be multiplied as signed ones of 32, which may overflow.
  static Carried Join(Carried a, Carried b) {
    return static_cast<Carried>(static_cast<uint64_t>(a) * b);
  }
};

template <typename T, bool kMax>
struct Extreme {
  static constexpr bool kSmall = std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>;
  using Carried = std::conditional_t<kSmall, float, T>;
  using Limits = std::numeric_limits<Carried>;
  static Carried Identity() {
    if constexpr (Limits::has_infinity) return kMax ? -Limits::infinity() : Limits::infinity();
    return kMax ? Limits::lowest() : Limits::max();
  }
  static Carried Load(T x) {
    if constexpr (kSmall) {
      return static_cast<float>(Widen(x));
    } else {
      return x;
    }
  }
  static Carried Join(Carried a, Carried b) {
    if constexpr (std::is_floating_point_v<Carried>) {
      using Bits = std::conditional_t<sizeof(Carried) == 4, uint32_t, uint64_t>;
      const Bits first = std::bit_cast<Bits>(a), second = std::bit_cast<Bits>(b);
      // Of two zeros, 0 is larger than -0; of equal numbers all bits are equal.
      if (a == b) return std::bit_cast<Carried>(kMax ? first & second : first | second);
      if (a != a) return a;
    }
    return (kMax ? a > b : a < b) ? a : b;
  }
  static T Store(Carried a) {
    if constexpr (kSmall) {
      return Narrow<T>(a);
    } else {
      return a;
    }
  }
};

// Along elements that lie side by side; kStep is 1 or -1, x and y are the first in that direction.
// In blocks, whose own results do not wait for what is carried: only one Join a block does.
template <typename Op, int kStep, typename T>
void AlongRow(const T* x, T* y, int64_t count) {
  constexpr int kBlock = 8;
  using Carried = typename Op::Carried;
  Carried carried = Op::Identity();
  for (int64_t blocks = count / kBlock; blocks > 0; --blocks) {
    decltype(Op::Load(*x)) own[kBlock];
    own[0] = Op::Load(x[0]);
    for (int k = 1; k < kBlock; ++k) own[k] = Op::Join(own[k - 1], Op::Load(x[kStep * k]));
    for (int k = 0; k < kBlock; ++k) y[kStep * k] = Op::Store(Op::Join(carried, own[k]));
    carried = Op::Join(carried, own[kBlock - 1]);
    x += kStep * kBlock;
    y += kStep * kBlock;
  }
  for (int64_t left = count % kBlock; left > 0; --left, x += kStep, y += kStep) {
    carried = Op::Join(carried, Op::Load(*x));
    *y = Op::Store(carried);
  }
}

// Along an axis with `inner` elements side by side at each place: whole rows of them at a time, in
// bands whose carried values stay in a core's cache.
template <typename Op, typename T>
void AcrossRows(const T* x, T* y, int64_t count, int64_t inner, bool reverse,
                typename Op::Carried* carried, int64_t band) {
  for (int64_t begin = 0; begin < inner; begin += band) {
    const int64_t width = band < inner - begin ? band : inner - begin;
    for (int64_t j = 0; j < width; ++j) carried[j] = Op::Identity();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (reverse ? count - 1 - i : i) * inner + begin;
      const T* __restrict from = x + at;
      T* __restrict to = y + at;
      typename Op::Carried* __restrict kept = carried;
      for (int64_t j = 0; j < width; ++j) {
        kept[j] = Op::Join(kept[j], Op::Load(from[j]));
        to[j] = Op::Store(kept[j]);
      }
    }
  }
}

// Over a dense array of `outer` x `count` x `inner` elements, along the second axis.
template <typename Op, typename T>
void Accumulate(const T* x, T* y, int64_t outer, int64_t count, int64_t inner, bool reverse) {
  constexpr int64_t kBandBytes = 1 << 16;
  constexpr int64_t kBand = kBandBytes / sizeof(typename Op::Carried);
  std::unique_ptr<typename Op::Carried[]> carried;
  if (inner > 1) carried.reset(new typename Op::Carried[inner < kBand ? inner : kBand]);
  for (int64_t n = 0; n < outer; ++n, x += count * inner, y += count * inner) {
    if (inner > 1) {
      AcrossRows<Op>(x, y, count, inner, reverse, carried.get(), kBand);
    } else if (reverse) {
      AlongRow<Op, -1>(x + count - 1, y + count - 1, count);
    } else {
      AlongRow<Op, 1>(x, y, count);
    }
  }
}

}  // namespace dfx::ffi
