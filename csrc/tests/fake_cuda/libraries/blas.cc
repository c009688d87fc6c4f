// libcublas.so.13 and libcublasLt.so.13: handles, descriptors as lists of attributes, products and
// triangular systems, each enqueued as a kernel named after the call (products.cc computes them).
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "products.h"

#define DFX_EXPORT extern "C" __attribute__((visibility("default")))

namespace fake = dfx::fake;

extern "C" int fake_missing(const char* name);

namespace {

constexpr int kInvalidValue = 7;
constexpr int kF32 = 0, kF64 = 1, kF16 = 2, kC64 = 4, kC128 = 5, kI32 = 10;  // of cudaDataType

struct Handle {
  CUstream_st* stream = nullptr;
  int math = 0, pointers = 0, atomics = 0;
};

struct Descriptor {
  std::map<int, std::vector<char>> attributes;
};

template <typename T>
void Put(Descriptor* to, int attribute, const T& value) {
  const char* bytes = reinterpret_cast<const char*>(&value);
  to->attributes[attribute].assign(bytes, bytes + sizeof value);
}

int Set(Descriptor* to, int attribute, const void* value, size_t bytes) {
  const char* from = static_cast<const char*>(value);
  to->attributes[attribute].assign(from, from + bytes);
  return 0;
}

int Get(Descriptor* of, int attribute, void* value, size_t bytes, size_t* written) {
  std::memset(value, 0, bytes);
  const std::vector<char>& kept = of->attributes[attribute];
  std::memcpy(value, kept.data(), std::min(bytes, kept.size()));
  if (written != nullptr) *written = bytes;
  return 0;
}

}  // namespace

DFX_EXPORT const char* cublasGetStatusString(int status) {
  static thread_local char text[48];
  std::snprintf(text, sizeof text, "cuBLAS status %d (of a stand-in)", status);
  return text;
}
DFX_EXPORT const char* cublasGetStatusName(int status) { return cublasGetStatusString(status); }
DFX_EXPORT const char* cublasLtGetStatusString(int status) { return cublasGetStatusString(status); }
DFX_EXPORT const char* cublasLtGetStatusName(int status) { return cublasGetStatusString(status); }

DFX_EXPORT int cublasCreate_v2(Handle** handle) {
  *handle = new Handle;
  return 0;
}
DFX_EXPORT int cublasDestroy_v2(Handle* handle) {
  delete handle;
  return 0;
}
DFX_EXPORT int cublasGetVersion_v2(Handle*, int* version) {
  *version = 130000;
  return 0;
}
DFX_EXPORT size_t cublasGetCudartVersion() { return 13000; }
DFX_EXPORT int cublasGetProperty(int type, int* value) {
  *value = type == 0 ? 13 : 0;
  return 0;
}
DFX_EXPORT int cublasSetStream_v2(Handle* handle, CUstream_st* stream) {
  handle->stream = stream;
  return 0;
}
DFX_EXPORT int cublasGetStream_v2(Handle* handle, CUstream_st** stream) {
  *stream = handle->stream;
  return 0;
}
DFX_EXPORT int cublasSetWorkspace_v2(Handle*, void*, size_t) { return 0; }
DFX_EXPORT int cublasSetMathMode(Handle* handle, int mode) {
  handle->math = mode;
  return 0;
}
DFX_EXPORT int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math;
  return 0;
}
DFX_EXPORT int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointers = mode;
  return 0;
}
DFX_EXPORT int cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointers;
  return 0;
}
DFX_EXPORT int cublasSetAtomicsMode(Handle* handle, int mode) {
  handle->atomics = mode;
  return 0;
}
DFX_EXPORT int cublasGetAtomicsMode(Handle* handle, int* mode) {
  *mode = handle->atomics;
  return 0;
}

DFX_EXPORT size_t cublasLtGetVersion() { return 130000; }
DFX_EXPORT size_t cublasLtGetCudartVersion() { return 13000; }
DFX_EXPORT int cublasLtGetProperty(int type, int* value) { return cublasGetProperty(type, value); }
DFX_EXPORT int cublasLtCreate(Handle** handle) { return cublasCreate_v2(handle); }
DFX_EXPORT int cublasLtDestroy(Handle* handle) { return cublasDestroy_v2(handle); }
DFX_EXPORT int cublasLtMatmulDescCreate(Descriptor** made, int compute_type, int scale_type) {
  *made = new Descriptor;
  Put(*made, 0, compute_type);
  Put(*made, 1, scale_type);
  return 0;
}
DFX_EXPORT int cublasLtMatrixLayoutCreate(Descriptor** made, int type, uint64_t rows,
                                          uint64_t columns, int64_t leading) {
  *made = new Descriptor;
  Put(*made, 0, type);
  Put(*made, 2, rows);
  Put(*made, 3, columns);
  Put(*made, 4, leading);
  return 0;
}
DFX_EXPORT int cublasLtMatmulPreferenceCreate(Descriptor** made) {
  *made = new Descriptor;
  return 0;
}
#define DFX_DESCRIPTOR(kind)                                                                      \
  DFX_EXPORT int kind##Destroy(Descriptor* descriptor) {                                          \
    delete descriptor;                                                                            \
    return 0;                                                                                     \
  }                                                                                               \
  DFX_EXPORT int kind##SetAttribute(Descriptor* to, int attribute, const void* value, size_t n) { \
    return Set(to, attribute, value, n);                                                          \
  }                                                                                               \
  DFX_EXPORT int kind##GetAttribute(Descriptor* of, int attribute, void* value, size_t n,         \
                                    size_t* written) {                                            \
    return Get(of, attribute, value, n, written);                                                 \
  }
DFX_DESCRIPTOR(cublasLtMatmulDesc)
DFX_DESCRIPTOR(cublasLtMatrixLayout)
DFX_DESCRIPTOR(cublasLtMatmulPreference)

struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
DFX_EXPORT int cublasLtMatmulAlgoGetHeuristic(Handle*, Descriptor*, Descriptor*, Descriptor*,
                                              Descriptor*, Descriptor*, Descriptor*, int wanted,
                                              Heuristic* results, int* n) {
  *n = wanted > 0 ? 1 : 0;
  if (*n > 0) *results = Heuristic{{}, 0, 0, 1.0f, {}};
  return 0;
}

namespace {

template <typename T>
T Of(Descriptor* of, int attribute, T otherwise) {
  const auto found = of->attributes.find(attribute);
  if (found == of->attributes.end() || found->second.size() < sizeof(T)) return otherwise;
  std::memcpy(&otherwise, found->second.data(), sizeof(T));
  return otherwise;
}

fake::Operand Matrix(Descriptor* layout, const void* data, int transposed = 0) {
  const int order = Of(layout, 1, 0);
  if (order > 1) fake_missing(("cublasLtMatmul in the order " + std::to_string(order)).c_str());
  return {static_cast<char*>(const_cast<void*>(data)),
          Of(layout, 0, 0),
          Of(layout, 4, int64_t{0}),
          Of(layout, 6, int64_t{0}),
          order == 1,
          transposed};
}

}  // namespace

DFX_EXPORT int cublasLtMatmul(Handle*, Descriptor* how, const void* alpha, const void* a,
                              Descriptor* a_layout, const void* b, Descriptor* b_layout,
                              const void* beta, const void* c, Descriptor* c_layout, void* d,
                              Descriptor* d_layout, const void*, void*, size_t,
                              CUstream_st* stream) {
  fake::Product p;
  p.name = "cublasLtMatmul";
  p.a = Matrix(a_layout, a, Of(how, 3, 0));
  p.b = Matrix(b_layout, b, Of(how, 4, 0));
  p.c = Matrix(c_layout, c);
  p.d = Matrix(d_layout, d);
  p.m = Of(d_layout, 2, int64_t{0});
  p.n = Of(d_layout, 3, int64_t{0});
  p.k = Of(a_layout, p.a.transposed == 0 ? 3 : 2, int64_t{0});
  if (Of(a_layout, p.a.transposed == 0 ? 2 : 3, int64_t{0}) != p.m ||
      Of(b_layout, p.b.transposed == 0 ? 2 : 3, int64_t{0}) != p.k ||
      Of(b_layout, p.b.transposed == 0 ? 3 : 2, int64_t{0}) != p.n) {
    return kInvalidValue;
  }
  p.batches = Of(d_layout, 5, 1);
  const int mode = Of(how, 2, 0), scale = Of(how, 1, 0);
  if (mode > 1) fake_missing(("cublasLtMatmul with pointer mode " + std::to_string(mode)).c_str());
  p.alpha = fake::FactorAt(alpha, scale, mode == 1);
  p.beta = fake::FactorAt(beta, scale, mode == 1);
  for (int attribute : {17, 18}) {
    if (const void* at = Of<const void*>(how, attribute, nullptr); at != nullptr) {
      p.scales.push_back({1, at, kF32});
    }
  }
  p.epilogue = Of(how, 7, 1);
  p.bias.data = Of<char*>(how, 8, nullptr);
  p.bias.type = Of(how, 26, p.d.type);
  p.bias.stride = Of(how, 10, int64_t{0});
  p.auxiliary.data = Of<char*>(how, 11, nullptr);
  p.auxiliary.type = Of(how, 22, p.d.type);
  p.auxiliary.leading = Of(how, 12, int64_t{0});
  p.auxiliary.stride = Of(how, 13, int64_t{0});
  return fake::Launch(std::move(p), stream);
}

namespace {

fake::Operand Matrix(const void* data, int type, int leading, long long stride = 0,
                     int transposed = 0) {
  return {static_cast<char*>(const_cast<void*>(data)), type, leading, stride, false, transposed};
}

// The type of alpha and beta.
int ScaleType(int compute, bool complex) {
  if (compute == 70 || compute == 71) return complex ? kC128 : kF64;
  if (compute == 72 || compute == 73) return kI32;
  if (compute == 64 || compute == 65) return kF16;
  return complex ? kC64 : kF32;
}

struct Shape {
  int a, b, m, n, k;  // transposed, and sizes
};

int Multiply(const char* name, Handle* handle, Shape shape, const void* alpha, fake::Operand a,
             fake::Operand b, const void* beta, fake::Operand c, int scale, int batches = 1) {
  fake::Product p;
  p.name = name;
  p.m = shape.m, p.n = shape.n, p.k = shape.k, p.batches = batches;
  p.a = a, p.b = b, p.c = p.d = c;
  p.a.transposed = shape.a, p.b.transposed = shape.b;
  p.alpha = fake::FactorAt(alpha, scale, handle->pointers == 1);
  p.beta = fake::FactorAt(beta, scale, handle->pointers == 1);
  return fake::Launch(std::move(p), handle->stream);
}

struct Triangle {
  int side, fill, diagonal;  // as cuBLAS has them
};

int Substitute(const char* name, Handle* handle, Triangle how, int m, int n, const void* alpha,
               fake::Operand a, fake::Operand b, int batches = 1) {
  fake::Solve s;
  s.name = name;
  s.right = how.side == 1, s.upper = how.fill == 1, s.unit = how.diagonal == 1;
  s.m = m, s.n = n, s.batches = batches;
  s.a = a, s.b = b;
  s.alpha = fake::FactorAt(alpha, a.type, handle->pointers == 1);
  return fake::Launch(std::move(s), handle->stream);
}

bool IsComplex(int type) { return type == kC64 || type == kC128; }

}  // namespace

DFX_EXPORT int cublasGemmEx(Handle* handle, int ta, int tb, int m, int n, int k, const void* alpha,
                            const void* a, int a_type, int lda, const void* b, int b_type, int ldb,
                            const void* beta, void* c, int c_type, int ldc, int compute, int) {
  return Multiply("cublasGemmEx", handle, {ta, tb, m, n, k}, alpha, Matrix(a, a_type, lda),
                  Matrix(b, b_type, ldb), beta, Matrix(c, c_type, ldc),
                  ScaleType(compute, IsComplex(c_type)));
}

DFX_EXPORT int cublasGemmStridedBatchedEx(Handle* handle, int ta, int tb, int m, int n, int k,
                                          const void* alpha, const void* a, int a_type, int lda,
                                          long long a_stride, const void* b, int b_type, int ldb,
                                          long long b_stride, const void* beta, void* c, int c_type,
                                          int ldc, long long c_stride, int batches, int compute,
                                          int) {
  return Multiply("cublasGemmStridedBatchedEx", handle, {ta, tb, m, n, k}, alpha,
                  Matrix(a, a_type, lda, a_stride), Matrix(b, b_type, ldb, b_stride), beta,
                  Matrix(c, c_type, ldc, c_stride), ScaleType(compute, IsComplex(c_type)), batches);
}

DFX_EXPORT int cublasGemmBatchedEx(Handle* handle, int ta, int tb, int m, int n, int k,
                                   const void* alpha, const void* const a[], int a_type, int lda,
                                   const void* const b[], int b_type, int ldb, const void* beta,
                                   void* const c[], int c_type, int ldc, int batches, int compute,
                                   int) {
  fake::Operand x = Matrix(a, a_type, lda), y = Matrix(b, b_type, ldb), z = Matrix(c, c_type, ldc);
  x.at = a, y.at = b, z.at = c;
  return Multiply("cublasGemmBatchedEx", handle, {ta, tb, m, n, k}, alpha, x, y, beta, z,
                  ScaleType(compute, IsComplex(c_type)), batches);
}

#define DFX_GEMM(name, type)                                                                     \
  DFX_EXPORT int name(Handle* handle, int ta, int tb, int m, int n, int k, const void* alpha,    \
                      const void* a, int lda, const void* b, int ldb, const void* beta, void* c, \
                      int ldc) {                                                                 \
    return Multiply(#name, handle, {ta, tb, m, n, k}, alpha, Matrix(a, type, lda),               \
                    Matrix(b, type, ldb), beta, Matrix(c, type, ldc), type);                     \
  }
DFX_GEMM(cublasSgemm_v2, kF32)
DFX_GEMM(cublasDgemm_v2, kF64)
DFX_GEMM(cublasCgemm_v2, kC64)
DFX_GEMM(cublasZgemm_v2, kC128)

#define DFX_TRSM(name, type)                                                                   \
  DFX_EXPORT int name(Handle* handle, int side, int fill, int transposed, int diagonal, int m, \
                      int n, const void* alpha, const void* a, int lda, void* b, int ldb) {    \
    return Substitute(#name, handle, {side, fill, diagonal}, m, n, alpha,                      \
                      Matrix(a, type, lda, 0, transposed), Matrix(b, type, ldb));              \
  }
DFX_TRSM(cublasStrsm_v2, kF32)
DFX_TRSM(cublasDtrsm_v2, kF64)
DFX_TRSM(cublasCtrsm_v2, kC64)
DFX_TRSM(cublasZtrsm_v2, kC128)

#define DFX_TRSM_BATCHED(name, type)                                                             \
  DFX_EXPORT int name(Handle* handle, int side, int fill, int transposed, int diagonal, int m,   \
                      int n, const void* alpha, const void* const a[], int lda, void* const b[], \
                      int ldb, int batches) {                                                    \
    fake::Operand x = Matrix(a, type, lda, 0, transposed), y = Matrix(b, type, ldb);             \
    x.at = a, y.at = b;                                                                          \
    return Substitute(#name, handle, {side, fill, diagonal}, m, n, alpha, x, y, batches);        \
  }
DFX_TRSM_BATCHED(cublasStrsmBatched, kF32)
DFX_TRSM_BATCHED(cublasDtrsmBatched, kF64)
DFX_TRSM_BATCHED(cublasCtrsmBatched, kC64)
DFX_TRSM_BATCHED(cublasZtrsmBatched, kC128)

#define DFX_GETRF_BATCHED(name, type)                                                           \
  DFX_EXPORT int name(Handle* handle, int n, void* const a[], int lda, int* pivots, int* infos, \
                      int batches) {                                                            \
    fake::Operand x = Matrix(a, type, lda);                                                     \
    x.at = a;                                                                                   \
    return fake::Launch(fake::Factors{#name, n, x, pivots, infos, batches}, handle->stream);    \
  }
DFX_GETRF_BATCHED(cublasSgetrfBatched, kF32)
DFX_GETRF_BATCHED(cublasDgetrfBatched, kF64)
DFX_GETRF_BATCHED(cublasCgetrfBatched, kC64)
DFX_GETRF_BATCHED(cublasZgetrfBatched, kC128)
