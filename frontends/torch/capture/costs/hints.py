"""Sizes of example values as numbers: asking a symbolic size itself would make a guard."""

from __future__ import annotations

import math
from typing import Any

import torch


class NoNumber(Exception):
    """A size is no number: that of a nested tensor along what differs from item to item."""


def hint(number: Any) -> int:
    """An int, or the example value of a symbolic one.

    Raises:
        NoNumber: it has none.
    """
    node = getattr(number, "node", None)
    if node is None:
        return int(number)
    if node.is_nested_int() or isinstance(node.hint, torch.SymInt):
        raise NoNumber("a nested tensor has a size that is no number")
    return int(node.hint or 1)


def shape_of(value: torch.Tensor) -> tuple[int, ...]:
    """Sizes; symbolic ones by the values they had when the graph was captured."""
    return tuple(hint(n) for n in value.shape)


def tensor_bytes(value: torch.Tensor) -> int:
    """Bytes of the dense value."""
    return math.prod(shape_of(value)) * value.element_size()


def strides_of(value: torch.Tensor) -> tuple[int, ...]:
    """Strides; symbolic ones by the values they had when the graph was captured."""
    return tuple(hint(n) for n in value.stride())
