"""How programs expect their inputs in memory, where what made them may have laid them out otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynaflow_xla.frontends.torch.capture import costs
from dynaflow_xla.frontends.torch.capture.captured import overlapping, place


def is_lazy(x: torch.Tensor) -> bool:
    """Whether memory holds a tensor's negative, or its conjugate: Inductor overlooks the bits that say so."""
    return x.is_neg() or x.is_conj()


@dataclass(frozen=True)
class Layout:
    """How a program expects an input.

    Attributes:
        dtype: Its type.
        strides: Its strides.
        shared: Dimensions along which it repeats the same memory.
    """

    dtype: torch.dtype
    strides: tuple[int, ...]
    shared: tuple[int, ...]

    @classmethod
    def of(cls, example: torch.Tensor) -> Layout:
        """That of an example."""
        return cls(example.dtype, costs.strides_of(example), overlapping(example))

    def fits(self, x: torch.Tensor) -> bool:
        """Whether a tensor has it, where there are elements to tell."""
        found = x.stride()
        if x.dtype is not self.dtype or is_lazy(x):
            return False
        return found == self.strides or not any(
            n > 1 and a != b for n, a, b in zip(x.shape, found, self.strides, strict=True)
        )

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """The same values in this layout."""
        made = torch.empty_strided(x.shape, self.strides, dtype=self.dtype, device=x.device)
        place(made, x.to(self.dtype), self.shared)
        return made


def call(
    function: Callable[..., Sequence[Any]], layouts: Mapping[int, Layout], *inputs: torch.Tensor
) -> Sequence[Any]:
    """Calls a program with those of its inputs laid out as it expects them that may not be."""
    given = list(inputs)
    for position, layout in layouts.items():
        if not layout.fits(given[position]):
            given[position] = layout.copy(given[position])
    return function(*given)
