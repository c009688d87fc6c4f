// Copies in a device's memory, in the order of a stream that somebody else owns.
#pragma once
#include <cstddef>

struct CUstream_st;

namespace dfx {

// Enqueues a copy on the stream, also while it is captured. Throws CudaError, or Error without a
// driver. The driver takes the context from the stream.
void CopyOnStream(void* to, const void* from, size_t bytes, CUstream_st* stream);

}  // namespace dfx
