#include "products.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

extern "C" {
int fake_missing(const char* name);
int fake_enqueue(const char* name, CUstream_st* stream, int (*run)(void*), void (*drop)(void*),
                 void* data, const uint64_t* accesses, int n);
int fake_device_memory(uint64_t address, size_t bytes);
void fake_touches(const uint64_t* accesses, int n);
}

namespace dfx::fake {
namespace {

using Complex = std::complex<double>;
constexpr int kExecutionFailed = 13, kNotSupported = 15;

// Of cudaDataType.
enum Type {
  kF32 = 0,
  kF64 = 1,
  kF16 = 2,
  kI8 = 3,
  kC64 = 4,
  kC128 = 5,
  kI32 = 10,
  kBf16 = 14,
  kE4m3 = 28,
  kE5m2 = 29
};

size_t Bytes(int type) {
  switch (type) {
    case kI8:
    case kE4m3:
    case kE5m2:
      return 1;
    case kF16:
    case kBf16:
      return 2;
    case kF32:
    case kI32:
      return 4;
    case kF64:
    case kC64:
      return 8;
    case kC128:
      return 16;
    default:
      return 0;
  }
}

template <typename T>
T Get(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
void Put(char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

// An eight-bit number with a sign, an exponent and a mantissa; `finite` has no infinity.
double Narrow(uint8_t bits, int mantissa, int bias, bool finite) {
  const int exponent = (bits & 0x7f) >> mantissa, rest = bits & ((1 << mantissa) - 1);
  const int largest = (1 << (7 - mantissa)) - 1;
  double value;
  if (exponent == largest && (!finite || rest == (1 << mantissa) - 1)) {
    value = rest == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = std::ldexp(rest, 1 - bias - mantissa);
  } else {
    value = std::ldexp((1 << mantissa) + rest, exponent - bias - mantissa);
  }
  return (bits & 0x80) != 0 ? -value : value;
}

Complex Load(const char* at, int type) {
  switch (type) {
    case kF32:
      return Get<float>(at);
    case kF64:
      return Get<double>(at);
    case kF16:
      return static_cast<double>(Get<_Float16>(at));
    case kI8:
      return Get<int8_t>(at);
    case kI32:
      return Get<int32_t>(at);
    case kC64:
      return Complex(Get<std::complex<float>>(at));
    case kC128:
      return Get<Complex>(at);
    case kBf16: {
      const uint32_t bits = static_cast<uint32_t>(Get<uint16_t>(at)) << 16;
      return Get<float>(reinterpret_cast<const char*>(&bits));
    }
    case kE4m3:
      return Narrow(Get<uint8_t>(at), 3, 7, true);
    default:
      return Narrow(Get<uint8_t>(at), 2, 15, false);
  }
}

uint16_t ToBf16(double value) {
  const auto number = static_cast<float>(value);
  if (std::isnan(number)) return 0x7fc0;
  const auto bits = Get<uint32_t>(reinterpret_cast<const char*>(&number));
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void Store(char* at, int type, Complex value) {
  const double real = value.real();
  switch (type) {
    case kF32:
      return Put(at, static_cast<float>(real));
    case kF64:
      return Put(at, real);
    case kF16:
      return Put(at, static_cast<_Float16>(real));
    case kI8:
      return Put(at, static_cast<int8_t>(std::lround(std::clamp(real, -128.0, 127.0))));
    case kI32:
      return Put(at, static_cast<int32_t>(std::llround(real)));
    case kC64:
      return Put(at, std::complex<float>(value));
    case kC128:
      return Put(at, value);
    default:
      return Put(at, ToBf16(real));
  }
}

bool IsComplex(int type) { return type == kC64 || type == kC128; }

template <typename T>
T As(Complex value) {
  if constexpr (std::is_same_v<T, double>) {
    return value.real();
  } else {
    return value;
  }
}

char* Batch(const Operand& of, int64_t batch) {
  if (of.at != nullptr) return static_cast<char*>(const_cast<void*>(of.at[batch]));
  return of.data + batch * of.stride * static_cast<int64_t>(Bytes(of.type));
}

// Where the element lies, of the matrix as it is stored.
char* Element(const Operand& of, char* first, int64_t row, int64_t column) {
  const int64_t at = of.rows_first ? row * of.leading + column : column * of.leading + row;
  return first + at * static_cast<int64_t>(Bytes(of.type));
}

// op(X), row by row.
template <typename T>
std::vector<T> Dense(const Operand& of, int64_t batch, int64_t rows, int64_t columns) {
  std::vector<T> dense(static_cast<size_t>(rows * columns));
  char* first = Batch(of, batch);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const char* at = of.transposed != 0 ? Element(of, first, j, i) : Element(of, first, i, j);
      const Complex value = Load(at, of.type);
      dense[static_cast<size_t>(i * columns + j)] =
          As<T>(of.transposed == 2 ? std::conj(value) : value);
    }
  }
  return dense;
}

Complex ValueOf(const Factor& factor) {
  return factor.device == nullptr ? factor.value
                                  : Load(static_cast<const char*>(factor.device), factor.type);
}

constexpr int kRelu = 2, kBias = 4, kGelu = 32, kKeep = 128;  // of epilogues, bit by bit

template <typename T>
void Compute(const Product& p) {
  Complex scale = ValueOf(p.alpha);
  for (const Factor& factor : p.scales) scale *= ValueOf(factor);
  const T alpha = As<T>(scale), beta = As<T>(ValueOf(p.beta));
  for (int64_t batch = 0; batch < p.batches; ++batch) {
    const std::vector<T> a = Dense<T>(p.a, batch, p.m, p.k), b = Dense<T>(p.b, batch, p.k, p.n);
    std::vector<T> sums(static_cast<size_t>(p.m * p.n));
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t l = 0; l < p.k; ++l) {
        const T x = a[static_cast<size_t>(i * p.k + l)];
        for (int64_t j = 0; j < p.n; ++j) {
          sums[static_cast<size_t>(i * p.n + j)] += x * b[static_cast<size_t>(l * p.n + j)];
        }
      }
    }
    char *from = Batch(p.c, batch), *to = Batch(p.d, batch);
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t j = 0; j < p.n; ++j) {
        T value = alpha * sums[static_cast<size_t>(i * p.n + j)];
        if (beta != T{}) value += beta * As<T>(Load(Element(p.c, from, i, j), p.c.type));
        if ((p.epilogue & kBias) != 0) {
          value += As<T>(Load(Element(p.bias, Batch(p.bias, batch), i, 0), p.bias.type));
        }
        if constexpr (std::is_same_v<T, double>) {
          if ((p.epilogue & kKeep) != 0) {
            const Operand& kept = p.auxiliary;
            Store(Element(kept, Batch(kept, batch), i, j), kept.type, value);
          }
          if ((p.epilogue & kRelu) != 0) value = std::max(value, 0.0);
          if ((p.epilogue & kGelu) != 0) {
            const double inner = 0.7978845608028654 * (value + 0.044715 * value * value * value);
            value = 0.5 * value * (1 + std::tanh(inner));
          }
        }
        Store(Element(p.d, to, i, j), p.d.type, value);
      }
    }
  }
}

// Substitution, column by column of the result; op(A) is a triangle of the other kind if
// transposed.
void Compute(const Solve& s, int64_t batch) {
  const int64_t size = s.right ? s.n : s.m;
  std::vector<Complex> a = Dense<Complex>(s.a, batch, size, size);
  char* b = Batch(s.b, batch);
  bool upper = s.upper != (s.a.transposed != 0);
  if (s.right) {  // X op(A) = B is op(A)^T X^T = B^T
    for (int64_t i = 0; i < size; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        std::swap(a[static_cast<size_t>(i * size + j)], a[static_cast<size_t>(j * size + i)]);
      }
    }
    upper = !upper;
  }
  const Complex alpha = ValueOf(s.alpha);
  std::vector<Complex> x(static_cast<size_t>(size));
  for (int64_t column = 0; column < (s.right ? s.m : s.n); ++column) {
    auto at = [&](int64_t i) {
      return s.right ? Element(s.b, b, column, i) : Element(s.b, b, i, column);
    };
    for (int64_t step = 0; step < size; ++step) {
      const int64_t i = upper ? size - 1 - step : step;
      Complex value = alpha * Load(at(i), s.b.type);
      for (int64_t done = 0; done < step; ++done) {
        const int64_t j = upper ? size - 1 - done : done;
        value -= a[static_cast<size_t>(i * size + j)] * x[static_cast<size_t>(j)];
      }
      if (!s.unit) value /= a[static_cast<size_t>(i * size + i)];
      x[static_cast<size_t>(i)] = value;
    }
    for (int64_t i = 0; i < size; ++i) Store(at(i), s.b.type, x[static_cast<size_t>(i)]);
  }
}

void Compute(const Factors& f, int64_t batch) {
  char* first = Batch(f.a, batch);
  std::vector<Complex> a = Dense<Complex>(f.a, batch, f.n, f.n);
  auto at = [&](int64_t i, int64_t j) -> Complex& { return a[static_cast<size_t>(i * f.n + j)]; };
  int info = 0;
  for (int64_t k = 0; k < f.n; ++k) {
    int64_t largest = k;
    for (int64_t i = k + 1; f.pivots != nullptr && i < f.n; ++i) {
      if (std::abs(at(i, k)) > std::abs(at(largest, k))) largest = i;
    }
    if (f.pivots != nullptr) f.pivots[batch * f.n + k] = static_cast<int>(largest) + 1;
    if (at(largest, k) == Complex(0)) {
      if (info == 0) info = static_cast<int>(k) + 1;
      continue;
    }
    for (int64_t j = 0; largest != k && j < f.n; ++j) std::swap(at(k, j), at(largest, j));
    for (int64_t i = k + 1; i < f.n; ++i) {
      at(i, k) /= at(k, k);
      for (int64_t j = k + 1; j < f.n; ++j) at(i, j) -= at(i, k) * at(k, j);
    }
  }
  for (int64_t i = 0; i < f.n; ++i) {
    for (int64_t j = 0; j < f.n; ++j) Store(Element(f.a, first, i, j), f.a.type, at(i, j));
  }
  f.infos[batch] = info;
}

struct Touched {
  // Matrices of a list on the device: which they are is known when the product runs.
  struct Listed {
    Operand of;
    int64_t rows, columns, batches;
    bool write;
  };
  std::vector<uint64_t> accesses;  // address, bytes, 1 for a write, of each
  std::vector<Listed> listed;

  int n() const { return static_cast<int>(accesses.size() / 3); }
  void Add(const void* at, size_t bytes, bool write) {
    if (at == nullptr || bytes == 0) return;
    accesses.insert(accesses.end(), {reinterpret_cast<uint64_t>(at), bytes, write ? 1u : 0u});
  }
  void Add(const Operand& of, int64_t rows, int64_t columns, int64_t batches, bool write) {
    if (rows == 0 || columns == 0) return;
    if (of.at != nullptr) {
      Add(of.at, static_cast<size_t>(batches) * sizeof(void*), false);
      listed.push_back({of, rows, columns, batches, write});
      return;
    }
    const int64_t last =
        of.rows_first ? (rows - 1) * of.leading + columns : (columns - 1) * of.leading + rows;
    const int64_t elements = (batches - 1) * of.stride + last;
    Add(of.data, static_cast<size_t>(elements) * Bytes(of.type), write);
  }
  void Add(const Factor& factor) { Add(factor.device, Bytes(factor.type), false); }
  // What the lists name now.
  Touched Named() const {
    Touched named;
    for (const Listed& list : listed) {
      Operand one = list.of;
      one.at = nullptr;
      for (int64_t batch = 0; batch < list.batches; ++batch) {
        one.data = Batch(list.of, batch);
        named.Add(one, list.rows, list.columns, 1, list.write);
      }
    }
    return named;
  }
  // As on a device: what is no memory of it is a fault.
  bool Sound() const {
    for (size_t i = 0; i < accesses.size(); i += 3) {
      if (fake_device_memory(accesses[i], accesses[i + 1]) == 0) return false;
    }
    return true;
  }
};

int Enqueue(const char* name, CUstream_st* stream, Touched touched, std::function<void()> compute) {
  using Run = std::function<bool()>;
  auto* run = new Run([touched, compute = std::move(compute)] {
    if (!touched.Sound()) return false;
    const Touched named = touched.Named();
    if (!named.Sound()) return false;
    if (named.n() > 0) fake_touches(named.accesses.data(), named.n());
    compute();
    return true;
  });
  auto call = [](void* data) { return (*static_cast<Run*>(data))() ? 0 : 1; };
  auto drop = [](void* data) { delete static_cast<Run*>(data); };
  const int status =
      fake_enqueue(name, stream, call, drop, run, touched.accesses.data(), touched.n());
  return status == 0 ? 0 : kExecutionFailed;
}

void AddOp(Touched& to, const Operand& of, int64_t rows, int64_t columns, int64_t batches) {
  if (of.transposed != 0) std::swap(rows, columns);
  to.Add(of, rows, columns, batches, false);
}

}  // namespace

Factor FactorAt(const void* at, int type, bool device) {
  if (device) return {1, at, type};
  return {at == nullptr ? Complex(0) : Load(static_cast<const char*>(at), type), nullptr, type};
}

bool Known(const Product& p) {
  const auto say = [&p](const std::string& what) {
    fake_missing((std::string(p.name) + " with " + what).c_str());
    return false;
  };
  for (const Operand* each : {&p.a, &p.b, &p.c, &p.d}) {
    if (Bytes(each->type) == 0) return say("type " + std::to_string(each->type));
  }
  if (p.d.type == kE4m3 || p.d.type == kE5m2) return say("a result of 8 bits");
  const int known = 1 | kRelu | kBias | kGelu | kKeep;
  const bool mask = (p.epilogue & kKeep) != 0 && (p.epilogue & kGelu) == 0;  // of signs, bit by bit
  if ((p.epilogue & ~known) != 0 || mask) return say("epilogue " + std::to_string(p.epilogue));
  return true;
}

int Launch(Product p, CUstream_st* stream) {
  if (!Known(p)) return kNotSupported;
  Touched touched;
  AddOp(touched, p.a, p.m, p.k, p.batches);
  AddOp(touched, p.b, p.k, p.n, p.batches);
  if (p.beta.device != nullptr || p.beta.value != Complex(0)) {
    touched.Add(p.c, p.m, p.n, p.batches, false);
  }
  if ((p.epilogue & kBias) != 0) touched.Add(p.bias, p.m, 1, p.batches, false);
  if ((p.epilogue & kKeep) != 0) touched.Add(p.auxiliary, p.m, p.n, p.batches, true);
  for (const Factor& factor : p.scales) touched.Add(factor);
  touched.Add(p.alpha);
  touched.Add(p.beta);
  touched.Add(p.d, p.m, p.n, p.batches, true);
  const bool complex = IsComplex(p.d.type) || IsComplex(p.a.type);
  return Enqueue(p.name, stream, std::move(touched), [p = std::move(p), complex] {
    complex ? Compute<Complex>(p) : Compute<double>(p);
  });
}

int Launch(Solve s, CUstream_st* stream) {
  Touched touched;
  const int64_t size = s.right ? s.n : s.m;
  touched.Add(s.a, size, size, s.batches, false);
  touched.Add(s.alpha);
  touched.Add(s.b, s.m, s.n, s.batches, true);
  return Enqueue(s.name, stream, std::move(touched), [s] {
    for (int64_t batch = 0; batch < s.batches; ++batch) Compute(s, batch);
  });
}

int Launch(Factors f, CUstream_st* stream) {
  Touched touched;
  const auto batches = static_cast<size_t>(f.batches), n = static_cast<size_t>(f.n);
  touched.Add(f.a, f.n, f.n, f.batches, true);
  touched.Add(f.pivots, batches * n * sizeof(int), true);
  touched.Add(f.infos, batches * sizeof(int), true);
  return Enqueue(f.name, stream, std::move(touched), [f] {
    for (int64_t batch = 0; batch < f.batches; ++batch) Compute(f, batch);
  });
}

}  // namespace dfx::fake
