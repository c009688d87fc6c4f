// What nodes of graphs do, from the structures of cuda.h.
#pragma once
#include "exports.h"

namespace dfx::fake {

Work WorkOf(const CUDA_KERNEL_NODE_PARAMS& parameters);
Work WorkOf(const CUDA_MEMCPY3D& parameters);
Work WorkOf(const CUDA_MEMSET_NODE_PARAMS& parameters);
Work WorkOf(CUhostFn function, void* data);
// False for the kinds that have graphs inside, or are missing.
bool WorkOf(const CUgraphNodeParams& parameters, Work* work);

}  // namespace dfx::fake
