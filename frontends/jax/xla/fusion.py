"""What XLA puts into one kernel on a GPU, as far as gates depend on it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dynaflow_xla.frontends.jax.capture import costs
from dynaflow_xla.ir.graph import Graph, Operator

# Operators that XLA computes inside the kernel of their reader: it is the reader that is ordered.
ABSORBED = frozenset(
    "broadcast_in_dim bitcast_convert_type convert_element_type copy expand_dims iota reshape "
    "slice squeeze stop_gradient transpose".split()
)

# Operators that XLA does not compute in the kernel of what they read.
UNFUSED = frozenset(
    "dot_general ragged_dot conv_general_dilated fft sort top_k scan while cond ffi_call pallas_call "
    "cholesky lu geqrf qr householder_product eigh eig svd schur hessenberg tridiagonal "
    "triangular_solve tridiagonal_solve psum psum_invariant pmax pmin all_gather "
    "all_gather_invariant all_to_all ppermute reduce_scatter psum_scatter ragged_all_to_all".split()
)

# Operators that XLA computes in the kernel of such a reader, whatever they read themselves.
ELEMENTWISE = ABSORBED | costs.ELEMENTWISE

# XLA cuts the summed axis of products whose results have few elements for its length. Read back on
# 0.10.2 and 0.12.0: none of (elements >= 1024 * length) is cut for an H200.
_UNCUT = 1024

# A reduction over fewer elements than a warp has is computed where it is read, as element-wise
# operators are: read back on 0.10.2 and 0.12.0, a softmax over 16 is no kernel, one over 32 is.
_WARP = 32

BOUNDED = ("float16", "float32", "float64", "bfloat16", "int", "uint", "bool")
"""How the types are called that have a maximum with a smallest number."""


def is_small_reduction(graph: Graph, op: Operator) -> bool:
    """Whether a reduction is computed where its result is read."""
    if not op.kind.startswith("reduce_") or "axes" not in op.payload.params:
        return False
    shape = graph.values[op.inputs[0]].shape
    return math.prod(shape[axis] for axis in op.payload.params["axes"]) < _WARP


def ends_in_maximum(graph: Graph, index: int, region: Iterable[Operator]) -> bool:
    """Whether an operator is a matrix product in whose kernel XLA takes the maximum of its result.

    Not where another product of the region reads the same (XLA makes one of the two), nor where XLA would
    cut the summed axis to fill the GPU.
    """
    op, values = graph.ops[index], graph.values
    if op.kind != "dot_general" or not values[op.outputs[0]].dtype.startswith(BOUNDED):
        return False
    products = [r for r in region if r.kind == "dot_general" and r is not op]
    if any(not set(op.inputs).isdisjoint(r.inputs) for r in products):
        return False
    (summed, _), (batch, _) = op.payload.params["dimension_numbers"]
    shape = values[op.inputs[0]].shape
    width = math.prod(shape[axis] for axis in summed)
    return not batch and values[op.outputs[0]].size >= _UNCUT * width
