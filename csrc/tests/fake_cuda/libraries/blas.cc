// libcublas.so.13 and libcublasLt.so.13: handles, and a product that is a launch of a kernel named
// after the call. Descriptors are lists of attributes; nobody computes the products.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#define DFX_EXPORT extern "C" __attribute__((visibility("default")))

struct CUstream_st;
extern "C" int fake_launch(const char* name, CUstream_st* stream, const uint64_t* arguments, int n);

namespace {

constexpr int kExecutionFailed = 13;

struct Handle {
  CUstream_st* stream = nullptr;
  int math = 0, pointers = 0, atomics = 0;
};

struct Descriptor {
  std::map<int, std::vector<char>> attributes;
};

int Launch(const char* name, CUstream_st* stream, std::initializer_list<const void*> pointers) {
  std::vector<uint64_t> arguments;
  for (const void* pointer : pointers) arguments.push_back(reinterpret_cast<uint64_t>(pointer));
  const int n = static_cast<int>(arguments.size());
  return fake_launch(name, stream, arguments.data(), n) == 0 ? 0 : kExecutionFailed;
}

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
DFX_EXPORT int cublasLtMatmul(Handle*, Descriptor*, const void*, const void* a, Descriptor*,
                              const void* b, Descriptor*, const void*, const void* c, Descriptor*,
                              void* d, Descriptor*, const void*, void*, size_t,
                              CUstream_st* stream) {
  return Launch("cublasLtMatmul", stream, {a, b, c, d});
}

// Of the others only that they were called, and on which stream.
#define DFX_PRODUCT(name) \
  DFX_EXPORT int name(Handle* handle) { return Launch(#name, handle->stream, {}); }
DFX_PRODUCT(cublasSgemm_v2)
DFX_PRODUCT(cublasDgemm_v2)
DFX_PRODUCT(cublasCgemm_v2)
DFX_PRODUCT(cublasZgemm_v2)
DFX_PRODUCT(cublasGemmEx)
DFX_PRODUCT(cublasGemmStridedBatchedEx)
DFX_PRODUCT(cublasGemmBatchedEx)
DFX_PRODUCT(cublasStrsm_v2)
DFX_PRODUCT(cublasDtrsm_v2)
