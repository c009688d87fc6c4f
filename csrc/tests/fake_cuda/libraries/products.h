// Products of matrices as cuBLAS describes them, computed on the host: D = f(alpha op(A) op(B) +
// beta C).
#pragma once
#include <complex>
#include <cstdint>
#include <functional>
#include <vector>

struct CUstream_st;

namespace dfx::fake {

// One matrix of a product; of a batch, the first one. `at` has the addresses of all, if they are
// not `stride` elements apart.
struct Operand {
  char* data = nullptr;
  int type = 0;  // of cudaDataType
  int64_t leading = 0;
  int64_t stride = 0;
  bool rows_first = false;  // row by row in memory
  int transposed = 0;       // of cublasOperation_t: 2 is the conjugate, too
  const void* const* at = nullptr;
};

// A factor: its value, or where on the device it lies.
struct Factor {
  std::complex<double> value = 1;
  const void* device = nullptr;
  int type = 0;
};

struct Product {
  const char* name = "";
  int64_t m = 0, n = 0, k = 0, batches = 1;
  Operand a, b, c, d;
  Factor alpha, beta;
  std::vector<Factor> scales;  // of narrow types: all are multiplied with alpha
  int epilogue = 1;            // of cublasLtEpilogue_t
  Operand bias, auxiliary;     // of the epilogue; a bias is a column
};

// Whether what its types and epilogue ask for is known; what is not, is told by its name.
bool Known(const Product& product);
// Enqueued as a kernel of that name, with the memory that it touches: a status of cuBLAS.
int Launch(Product product, CUstream_st* stream);

// The solution X of op(A) X = alpha B, or of X op(A) = alpha B, in the place of B; A is triangular.
struct Solve {
  const char* name = "";
  bool right = false, upper = false, unit = false;
  int64_t m = 0, n = 0;
  Operand a, b;
  Factor alpha;
  int64_t batches = 1;
};
int Launch(Solve solve, CUstream_st* stream);

// P A = L U in the place of each A of a batch; rows that changed places, and the first zero pivot.
struct Factors {
  const char* name = "";
  int64_t n = 0;
  Operand a;
  int* pivots = nullptr;
  int* infos = nullptr;
  int64_t batches = 1;
};
int Launch(Factors factors, CUstream_st* stream);

// A factor in the host's memory or, by the handle's mode, in the device's.
Factor FactorAt(const void* at, int type, bool device);

}  // namespace dfx::fake
