"""Arguments that share memory, where the function writes into some.

What a graph does then depends on which arguments share what. PyTorch's guards see most changes of that, not
all: a view in the place of a tensor of its own would get results other than the original's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def pattern(args: Any, kwargs: Any) -> tuple[tuple[int, ...], ...]:
    """Which tensors of a call overlap: pairs of leaves, with their places in memory."""
    leaves = [
        (number, x)
        for number, x in enumerate(pytree.tree_leaves((args, kwargs)))
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_meta
    ]
    if len(leaves) < 2:
        return ()
    at: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for number, x in leaves:
        at.setdefault(x.untyped_storage().data_ptr(), []).append((number, x))
    return tuple(
        (i, j, int(x.storage_offset()), int(y.storage_offset()))
        for memory, group in at.items()
        if memory
        for n, (i, x) in enumerate(group)
        for j, y in group[n + 1 :]
        if x is not y and _overlap(x, y)  # one object in two places is seen by the guards
    )


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common."""
    if not x.numel() or not y.numel():
        return False
    marks = torch.zeros(x.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes(marks, x).fill_(True)
    return bool(_bytes(marks, y).any())


def _bytes(marks: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    size = x.element_size()
    strides = [stride * size for stride in x.stride()]
    return marks.as_strided([*x.shape, size], [*strides, 1], x.storage_offset() * size)
