"""Estimated work of a JAX primitive: floating point operations, bytes moved, time on one core.

The rates are for one general-purpose core and only rank regions against each other; ``Auto``
measures before it decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

# Fitted to XLA:CPU of jaxlib 0.10 on one core of a 2024 server processor with AVX-512.
GEMM_FLOPS_PER_NS = 220.0
CONV_FLOPS_PER_NS = 180.0
CONV_KERNEL_GRADIENT = 0.45  # of that rate: a window as large as the image
CONV_3D = 0.2  # XLA:CPU has a library's convolution for one and two spatial dimensions
CONV_GROUPED_1D = 0.1
FACTOR_FLOPS_PER_NS = 36.0
FFT_FLOPS_PER_NS = 38.0
BYTES_PER_NS = 50.0  # operators mostly read what is in a cache, or fused into them
SORT_NS, SORT_MORE_NS = 11.0, 2.0  # a comparison with its moves; for each further operand
OP_OVERHEAD_NS = 150.0
WHILE_TRIPS = 100
"""Assumed trip count of a while loop, which its jaxpr does not tell."""

SPREAD_NS = 50_000.0
"""XLA:CPU gives operators of about this much work to all of its threads, if it can: see ``original_ns``."""

ONE_CORE = frozenset("sort top_k approx_top_k custom_call".split())
_ONE_CORE_STARTS = ("cum", "arg", "gather", "scatter", "reduce_window", "select_and")

TRANSCENDENTAL = frozenset(
    "exp exp2 log log1p expm1 tanh logistic sin cos tan erf erf_inv erfc pow sqrt rsqrt cbrt atan2 "
    "asin acos atan sinh cosh asinh acosh atanh lgamma digamma bessel_i0e bessel_i1e igamma".split()
)
FREE = frozenset("reshape squeeze expand_dims stop_gradient copy_p bitcast_convert_type".split())

GENERATORS = frozenset(
    "iota broadcast_in_dim eq ne ge gt le lt and or not xor add sub mul neg abs sign max min rem div "
    "select_n convert_element_type reshape squeeze expand_dims transpose slice rev".split()
)
"""Element-wise and shape operators that XLA fuses into their reader, if all they read is generated."""

COLLECTIVES = frozenset(
    "psum psum2 psum_invariant pmax pmin all_gather all_gather_invariant all_to_all ppermute "
    "reduce_scatter psum_scatter pgather axis_index pbroadcast pvary ragged_all_to_all".split()
)
CALLBACKS = frozenset(
    "pure_callback io_callback debug_callback debug_print outside_call infeed outfeed".split()
)
OUTER_CALLS = frozenset(["dfx_call", "dfx_program", "shard_map", "xla_pmap", "device_put"])

Work = tuple[float, int, float]
"""Flops, bytes moved, nanoseconds."""

Leaf = Callable[[Any, str, dict[str, Any]], Work]

# n is the matrix order; the constants are the usual leading terms (Golub & Van Loan, 4th ed.).
_FACTORIZATIONS = {
    "cholesky": 1 / 3, "cholesky_update": 2.0, "lu": 2 / 3, "geqrf": 4 / 3, "qr": 8 / 3,
    "householder_product": 4 / 3, "eigh": 9.0, "eig": 25.0, "svd": 20.0, "schur": 25.0,
    "hessenberg": 10 / 3, "tridiagonal": 4 / 3, "triangular_solve": 1.0, "tridiagonal_solve": 0.1,
}  # fmt: skip


def aval_bytes(aval: Any) -> int:
    """Bytes of a dense value (a PRNG key counts 16)."""
    dtype = aval.dtype
    itemsize = getattr(dtype, "itemsize", 16)
    return int(np.prod(aval.shape, dtype=np.int64)) * int(itemsize)


def _size(aval: Any) -> int:
    return int(np.prod(aval.shape, dtype=np.int64))


def _inner(jaxpr: Any, leaf: Leaf) -> Work:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    flops, moved, cost = 0.0, 0, 0.0
    for eqn in jaxpr.eqns:
        f, b, c = _walk(eqn, leaf)
        flops, moved, cost = flops + f, moved + b, cost + c
    return flops, moved, cost


def estimate(eqn: Any) -> Work:
    """(flops, bytes moved, nanoseconds on one core) of one equation, control flow included."""
    return _walk(eqn, _primitive)


def original_ns(jaxpr: Any, cores: int) -> float:
    """Nanoseconds that a whole function takes as XLA runs it on so many cores.

    Matrix products, convolutions and large loops over elements run on all of them, inside XLA's own loops
    too; sorts, scans' steps one after another and the like do not. What a plan gains is to be compared
    with this, not with one lane.
    """

    def leaf(eqn: Any, name: str, params: dict[str, Any]) -> Work:
        flops, moved, cost = _primitive(eqn, name, params)
        alone = name in ONE_CORE or name in _FACTORIZATIONS or name.startswith(_ONE_CORE_STARTS)
        return flops, moved, cost if alone or cost < SPREAD_NS else cost / cores

    return _inner(jaxpr, leaf)[2]


def _walk(eqn: Any, leaf: Leaf) -> Work:
    name = eqn.primitive.name
    params = eqn.params
    if name == "scan":
        flops, moved, cost = _inner(params["jaxpr"], leaf)
        n = int(params["length"])
        return flops * n, moved * n, cost * n
    if name == "while":
        f1, b1, c1 = _inner(params["body_jaxpr"], leaf)
        f2, b2, c2 = _inner(params["cond_jaxpr"], leaf)
        return (f1 + f2) * WHILE_TRIPS, (b1 + b2) * WHILE_TRIPS, (c1 + c2) * WHILE_TRIPS
    if name == "cond":
        works = (_inner(branch, leaf) for branch in params["branches"])
        return max(works, key=lambda work: work[2])
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params and hasattr(getattr(params[key], "jaxpr", params[key]), "eqns"):
            return _inner(params[key], leaf)
    return leaf(eqn, name, params)


def _convolution(ins: Any, out: Any, params: dict[str, Any]) -> tuple[float, float]:
    """(flops, nanoseconds on one core). XLA:CPU computes a grouped convolution as a dense one."""
    numbers = params["dimension_numbers"]
    kernel = ins[1].shape
    flops = 2.0 * _size(out) * math.prod(kernel) / max(kernel[numbers.rhs_spec[0]], 1)
    groups = int(params.get("feature_group_count", 1)) * int(params.get("batch_group_count", 1))
    rate = CONV_FLOPS_PER_NS
    spatial = len(kernel) - 2
    if spatial > 2:
        rate *= CONV_3D
    elif groups > 1 and spatial < 2:
        rate *= CONV_GROUPED_1D
    window = math.prod(kernel[d] for d in numbers.rhs_spec[2:])
    if window > math.prod(out.shape[d] for d in numbers.out_spec[2:]):
        rate *= CONV_KERNEL_GRADIENT
    return flops, flops * groups / rate


def _primitive(eqn: Any, name: str, params: dict[str, Any]) -> tuple[float, int, float]:
    ins = [v.aval for v in eqn.invars if hasattr(v.aval, "shape")]
    outs = [v.aval for v in eqn.outvars if hasattr(v.aval, "shape")]
    moved = sum(map(aval_bytes, ins)) + sum(map(aval_bytes, outs))
    out_size = sum(map(_size, outs))
    in_size = max(map(_size, ins), default=0)
    memory_ns = moved / BYTES_PER_NS
    if name in FREE:
        return 0.0, 0, 0.0
    if name == "dot_general":
        (lhs_contract, _), _ = params["dimension_numbers"]
        k = math.prod(ins[0].shape[d] for d in lhs_contract)
        flops = 2.0 * out_size * k
        return flops, moved, max(flops / GEMM_FLOPS_PER_NS, memory_ns) + OP_OVERHEAD_NS
    if name == "conv_general_dilated":
        flops, cost = _convolution(ins, outs[0], params)
        return flops, moved, max(cost, memory_ns) + OP_OVERHEAD_NS
    if name in _FACTORIZATIONS and ins and len(ins[0].shape) >= 2:
        *batch, m, n = ins[0].shape
        flops = _FACTORIZATIONS[name] * math.prod(batch) * m * n * min(m, n)
        if name == "triangular_solve":
            rhs = ins[1].shape
            flops = float(
                math.prod(batch) * m * m * (rhs[-1] if params.get("left_side") else rhs[-2])
            )
        return flops, moved, flops / FACTOR_FLOPS_PER_NS + 2000.0
    if name == "sort":
        dim = params["dimension"]
        work = in_size * math.log2(max(ins[0].shape[dim] if ins[0].shape else 1, 2))
        each = SORT_NS + SORT_MORE_NS * (len(ins) - 1)
        return work, moved, work * each + OP_OVERHEAD_NS
    if name in ("top_k", "approx_top_k"):
        return float(in_size), moved, 1.2 * in_size + OP_OVERHEAD_NS
    if name == "fft":
        work = 5.0 * in_size * max(1.0, math.log2(max(math.prod(params["fft_lengths"]), 2)))
        return work, moved, work / FFT_FLOPS_PER_NS + 1000.0
    if name in ("random_bits", "threefry2x32"):
        return 20.0 * out_size, moved, 3.0 * out_size + OP_OVERHEAD_NS
    if name == "gather" or name.startswith("scatter"):
        moving = out_size if name == "gather" else _size(ins[-1])
        return 0.0, moved, max(1.3 * moving, memory_ns) + OP_OVERHEAD_NS
    if name.startswith(("cum", "arg", "reduce_window", "select_and")):
        return float(in_size), moved, max(4.5 * in_size, memory_ns) + OP_OVERHEAD_NS
    if name.startswith("reduce"):
        return float(in_size), moved, max(0.05 * in_size, memory_ns) + OP_OVERHEAD_NS
    if name in TRANSCENDENTAL:
        return 10.0 * out_size, moved, max(0.4 * out_size, memory_ns) + OP_OVERHEAD_NS
    if name in ("broadcast_in_dim", "iota", "slice", "concatenate", "pad", "transpose", "rev",
                "convert_element_type", "copy", "select_n"):  # fmt: skip
        return 0.0, moved, memory_ns + OP_OVERHEAD_NS
    return float(out_size), moved, max(0.05 * out_size, memory_ns) + OP_OVERHEAD_NS
