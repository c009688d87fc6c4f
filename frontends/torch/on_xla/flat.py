"""A module or function over a flat list of tensors, for exports that know no other arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

INNER = "inner"
"""Where the original hangs; not part of a scope."""


class Flat(torch.nn.Module):
    """``forward(*tensors)`` calls ``original(*args, **kwargs)``.

    Args:
        original: A module or function.
        args: Its arguments; the tensors among their leaves are those of ``forward``, in order.
        kwargs: Its keyword arguments, likewise.
    """

    def __init__(self, original: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.call = original if not isinstance(original, torch.nn.Module) else None
        if self.call is None:
            setattr(self, INNER, original)
        leaves, self.tree = pytree.tree_flatten((args, kwargs))
        self.leaves = [None if isinstance(x, torch.Tensor) else (x,) for x in leaves]

    def forward(self, *tensors: Any) -> Any:
        """Calls the original with the tensors in their places among the arguments; returns its result."""
        given = iter(tensors)
        leaves = [next(given) if x is None else x[0] for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return (self.call or getattr(self, INNER))(*args, **kwargs)


def state_of(original: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers under the names that an export of the flat form has for them."""
    if not isinstance(original, torch.nn.Module):
        return {}
    named = {**dict(original.named_parameters()), **dict(original.named_buffers())}
    return {f"{INNER}.{name}": x for name, x in named.items()}


def strip(path: Sequence[str]) -> list[str]:
    """A module path as seen from the original."""
    return list(path[1:] if path[:1] == [INNER] else path)
