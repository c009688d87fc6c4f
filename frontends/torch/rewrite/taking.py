"""``take_along_dim`` of open sizes: PyTorch's own function in C++ asks sizes as numbers, which fixes them."""

from __future__ import annotations

from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import operators


def _take_along_dim(x: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> Any:
    """What it is made of: both broadcast in all other dimensions, and gathered."""
    if dim is None:
        return x.reshape(-1).gather(0, indices.reshape(-1))
    fits = x.ndim == indices.ndim and -x.ndim <= dim < x.ndim
    if not fits or indices.dtype != torch.int64:  # narrower ones, which gather takes
        return operators.GO_ON  # an error of PyTorch's own
    dim %= x.ndim
    of, at = list(x.shape), list(indices.shape)
    for d in range(x.ndim):
        if d == dim:
            continue
        if of[d] == 1:
            of[d] = at[d]
        elif at[d] == 1:
            at[d] = of[d]
    return x.expand(of).gather(dim, indices.expand(at))


operators.made_of(torch.ops.aten.take_along_dim.default, _take_along_dim)
