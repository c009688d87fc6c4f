"""Matrix products and convolutions on one core.

Fitted to XLA:CPU of jaxlib 0.10 on one core of a 2024 server processor with AVX-512. What products take
besides their operations was measured on one with AVX2 (``benchmarks/studies/products.py``), and is stated
for the other one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from dynaflow_xla.frontends.jax.capture.costs import sharing

GEMM_FLOPS_PER_NS = 220.0
GEMM_LAID_OUT_NS = 0.2
"""Of products of several matrices: an element of a factor in which these do not lie one after another (heads
of an attention). XLA copies it first."""

_PACKED_NS = {4096: 1.28, 2048: 0.84, 512: 0.5, 1: 0.16}
"""Of Eigen's products: an element of a factor whose sums run across its rows, by what divides the bytes of a
row. The rows of wide matrices fall into the same lines of a cache."""

_CROWDED = {4096: 2.0, 2048: 1.4}
"""How much longer Eigen's products take whose right factor has such rows, and more than that cache holds."""
_CROWDED_ROWS, _CROWDING_ROWS, _HALF_CROWDED = 128, 64, 1.25

_EIGEN_NS = 240.0  # to start one product of several, with XLA's default flags
_YNNPACK_NS = 16.0

_TURNED_NS, _SEVERAL_TURNED_NS = 0.08, 0.24
"""Of YNNPACK's products: an element of a right factor that lies transposed; of several products."""

_ROW_NS, _UNEVEN_ROW_NS, _ODD_SUM_NS = 1.4, 3.0, 4.0
"""Of YNNPACK's products: a row of the result; one that no vector fits; with a sum of an odd number."""
_VECTOR, _NARROW = 8, 16

_MOVED_NS = 0.16
"""An element of a factor that XLA transposes first, as sums run over several dimensions of it."""

_INLINED, _SMALLEST = 3, 8
"""Matrices up to so large are multiplied in a loop over elements; several smaller than that in Eigen."""

_COMPLEX, _FLOAT64, _INTEGERS, _SHORT_INTEGERS = 0.11, 0.5, 0.13, 0.025
"""Of the rate of float32, counting a multiplication and an addition each. XLA:CPU has loops of its own for
integers, unless short ones become those of 32 bits (256 rows of int8: 8 ms, as int32 0.04)."""

_RAGGED = 0.5
"""Of that rate, for each group as if it had all rows: what XLA:CPU makes of ``ragged_dot``."""

CONV_FLOPS_PER_NS = 180.0
CONV_KERNEL_GRADIENT = 0.45  # of that rate: a window as large as the image
CONV_GATHER_NS = 8.5
"""Of Eigen's convolutions: what it takes to collect one row of a window, however few elements it has. Of
groups: each pixel of a window, for each group."""
CONV_GATHER_1D_NS = 20.0
"""The same in one dimension: a window is one row."""
CONV_COLLECTED_NS = 0.05
"""Of Eigen's convolutions: what an element of a window adds to that."""
CONV_APART = 0.5
"""Of Eigen's convolutions whose windows have gaps: a pixel of a window, in rows of one without."""
CONV_3D = 0.2  # XLA:CPU has a library's convolution for one and two spatial dimensions
CONV_GROUPED_1D = 0.1


def _rate(ins: Sequence[Any], out: Any) -> float:
    """Of ``GEMM_FLOPS_PER_NS``."""
    if jnp.issubdtype(out.dtype, jnp.complexfloating):
        return _COMPLEX
    if jnp.issubdtype(out.dtype, jnp.floating):
        return _FLOAT64 if out.dtype.itemsize > 4 else 1.0
    if out.dtype.itemsize < 4:
        return _SHORT_INTEGERS
    return 1.0 if all(x.dtype.itemsize == 1 for x in ins[:2]) else _INTEGERS


def product(ins: Sequence[Any], out: Any, params: dict[str, Any]) -> tuple[float, float]:
    """(operations, nanoseconds) of a ``dot_general``, or of a ``ragged_dot_general`` of groups.

    Args:
        ins: The operands, abstractly.
        out: The result.
        params: Of the equation.
    """
    ragged = params.get("ragged_dot_dimension_numbers")
    numbers = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    (contract, _), batches = numbers
    flops = 2.0 * math.prod(out.shape) * math.prod(ins[0].shape[d] for d in contract)
    ns = flops / (GEMM_FLOPS_PER_NS * _rate(ins, out))
    if ragged is not None:
        return flops, ns * ins[2].shape[-1] / _RAGGED
    if jnp.issubdtype(out.dtype, jnp.floating):
        ns = _laid_out_ns(ins, params, ns)
    apart = (
        math.prod(x.shape)
        for x, dims in zip(ins[:2], batches, strict=True)
        if not sharing.come_first(dims)
    )
    return flops, ns + GEMM_LAID_OUT_NS * sum(apart)


def _laid_out_ns(ins: Sequence[Any], params: dict[str, Any], computing: float) -> float:
    """Nanoseconds of products of floating point numbers, with what their shapes and layouts cost.

    Args:
        ins: The factors.
        params: The equation's.
        computing: What their operations take where sizes are even and all lies in order.
    """
    left, right = ins[:2]
    numbers = params["dimension_numbers"]
    (left_summed, right_summed), _ = numbers
    number, rows, columns, depth = sharing.Matrices.of(ins, numbers)
    left_size, right_size = math.prod(left.shape), math.prod(right.shape)
    behind = len(left.shape) - len(left_summed)  # where a left factor's sums have to begin
    moved = _MOVED_NS * (
        left_size * _is_moved(left_summed, behind) + right_size * _is_moved(right_summed)
    )
    if min(rows, columns, depth) <= 1 or max(rows, columns, depth) <= _INLINED:
        return computing + moved
    right_turned = right_summed[-1] == len(right.shape) - 1
    small = number > 1 and max(rows, columns, depth) < _SMALLEST
    if small or not sharing.is_product_of_ynnpack(left, right, params):
        ns = computing
        if len(left.shape) - 1 not in left_summed:
            ns += _packing(rows * left.dtype.itemsize) * left_size
        if right_turned:
            ns += _packing(depth * right.dtype.itemsize) * right_size
        else:
            ns += computing * (_crowding(columns * right.dtype.itemsize, depth) - 1)
        return ns + moved + (_EIGEN_NS * number if number > 1 else 0.0)
    step = _VECTOR if columns > _VECTOR // 2 else _VECTOR // 2
    uneven = columns % step != 0
    ns = computing * math.ceil(columns / step) * step / columns
    ns += (_UNEVEN_ROW_NS if uneven else _ROW_NS) * number * rows
    if depth % 2 and columns < _NARROW:
        ns += _ODD_SUM_NS * number * rows
    if right_turned:
        ns += (_SEVERAL_TURNED_NS if number > 1 else _TURNED_NS) * right_size
    return ns + moved + (_YNNPACK_NS * number if number > 1 else 0.0)


def _is_moved(summed: Sequence[int], first: int | None = None) -> bool:
    """Whether XLA transposes a factor first to sum over several of its dimensions as if they were one.

    Args:
        summed: They, in the order of the other factor's.
        first: Where they have to begin; None: anywhere.
    """
    first = summed[0] if first is None and summed else first
    return len(summed) > 1 and list(summed) != [*range(first or 0, (first or 0) + len(summed))]


def _packing(row_bytes: int) -> float:
    """Nanoseconds an element of a factor whose rows have so many bytes."""
    return next(ns for size, ns in _PACKED_NS.items() if row_bytes % size == 0)


def _crowding(row_bytes: int, depth: int) -> float:
    """How much longer a product takes with so many such rows in its right factor."""
    if depth <= _CROWDING_ROWS:
        return 1.0
    most = _HALF_CROWDED if depth <= _CROWDED_ROWS else math.inf
    return min(most, next((more for n, more in _CROWDED.items() if row_bytes % n == 0), 1.0))


def convolution(ins: Sequence[Any], out: Any, params: dict[str, Any]) -> tuple[float, float]:
    """(operations, nanoseconds) of a convolution; XLA:CPU computes a grouped one as a dense one.

    Args:
        ins: Image and kernel, abstractly.
        out: The result.
        params: Of the equation.
    """
    numbers = params["dimension_numbers"]
    kernel = ins[1].shape
    flops = 2.0 * math.prod(out.shape) * math.prod(kernel) / max(kernel[numbers.rhs_spec[0]], 1)
    groups = int(params.get("feature_group_count", 1)) * int(params.get("batch_group_count", 1))
    rate = CONV_FLOPS_PER_NS
    spatial = len(kernel) - 2
    if spatial > 2:
        rate *= CONV_3D
    elif groups > 1 and spatial < 2:
        rate *= CONV_GROUPED_1D
    window = math.prod(kernel[d] for d in numbers.rhs_spec[2:])
    image = math.prod(out.shape[d] for d in numbers.out_spec[2:])
    collected = elements = 0.0
    if window > image:
        rate *= CONV_KERNEL_GRADIENT
    elif groups > 1 and spatial == 2:
        collected = image * window * groups
    elif groups == 1 and spatial and not sharing.is_of_ynnpack(ins[0], ins[1], params):
        in_row = kernel[numbers.rhs_spec[-1]]
        apart = spatial > 1 and in_row > 1 and params["rhs_dilation"][-1:] not in ((), (1,))
        collected = image * window * (CONV_APART if apart else 1 / in_row)
        elements = image * window * kernel[numbers.rhs_spec[1]]
    images = out.shape[numbers.out_spec[0]]
    row_ns = CONV_GATHER_1D_NS if spatial == 1 else CONV_GATHER_NS
    gathered = images * (row_ns * collected + CONV_COLLECTED_NS * elements)
    return flops, flops * groups / rate + gathered
