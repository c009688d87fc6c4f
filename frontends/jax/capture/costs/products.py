"""Matrix products and convolutions on one core.

Fitted to XLA:CPU of jaxlib 0.10 on one core of a 2024 server processor with AVX-512.
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
    apart = (
        math.prod(x.shape)
        for x, dims in zip(ins[:2], batches, strict=True)
        if not sharing.come_first(dims)
    )
    return flops, ns + GEMM_LAID_OUT_NS * sum(apart)


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
    collected = 0.0
    if window > image:
        rate *= CONV_KERNEL_GRADIENT
    elif groups > 1 and spatial == 2:
        collected = image * window * groups
    elif groups == 1 and window > 1 and not sharing.is_of_ynnpack(ins[0], ins[1], params):
        collected = image * window / kernel[numbers.rhs_spec[-1]]
    gathered = CONV_GATHER_NS * out.shape[numbers.out_spec[0]] * collected
    return flops, flops * groups / rate + gathered
