"""Estimated time of an operator's kernels on a GPU, which ranks regions against each other.

The rates are an NVIDIA H100's. A kernel that fills few multiprocessors has their share of the rate, and none
takes less than a launch in a CUDA graph does. What regions side by side take from each other is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dynaflow_xla.frontends.torch.capture.costs.hints import shape_of

MULTIPROCESSORS = 132
KERNEL_NS = 2_000.0
"""The least that a kernel takes in a row of others."""

BYTES_PER_NS = 2_500.0
_TILE = 64
"""Rows and columns of a product that one multiprocessor computes."""

_FLOPS_PER_NS = {torch.bfloat16: 600_000.0, torch.float16: 600_000.0, torch.float64: 50_000.0}
_OTHER_FLOPS_PER_NS = 45_000.0
"""Of float32 without TF32."""


def nanoseconds(flops: float, moved: int, outs: Sequence[torch.Tensor], product: bool) -> float:
    """Time of an operator as one kernel.

    Args:
        flops: Operations.
        moved: Bytes read and written.
        outs: Results.
        product: Whether it is a product, a convolution or an attention: those have operations that count.
    """
    took = moved / BYTES_PER_NS
    if product and outs:
        *batch, rows, columns = (1, 1, *shape_of(outs[0]))
        if (
            len(batch) > 2 and columns < _TILE
        ):  # an image's rows and columns are rows of one product
            rows, columns = rows * columns, batch.pop()
        tiles = math.prod(batch) * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
        rate = _FLOPS_PER_NS.get(outs[0].dtype, _OTHER_FLOPS_PER_NS)
        took = max(took, flops / (rate * min(1.0, max(1, tiles) / MULTIPROCESSORS)))
    return KERNEL_NS + took


def least_ns(device: torch.device) -> float:
    """What an operator takes however few rows it has: on a GPU a kernel."""
    return KERNEL_NS if device.type == "cuda" else 0.0
