"""What a CUDA graph wrote, as results of a call: copies, as the next replay writes the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Results:
    """Copies of a graph's results that share memory, and have gaps or repeated elements, as these do.

    What shares memory is copied once, and so are elements that a result repeats (``expand``).

    Args:
        outputs: What the graph writes, and values that are no tensors.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)
        together: dict[Any, list[torch.Tensor]] = {}
        for x in outputs:
            if isinstance(x, torch.Tensor):
                together.setdefault(_memory(x), []).append(x)
        shared = {
            key: each
            for key, each in together.items()
            if key is not None and (len(each) > 1 or not _is_dense(each[0]))
        }
        self._ranges = [_range_of(each) for each in shared.values()]
        number = {key: n for n, key in enumerate(shared)}
        begins = [x.storage_offset() for x in self._ranges]
        self._how: list[Callable[[list[Any]], Any]] = [
            _taken(x, number, begins) for x in self.outputs
        ]
        self._plain = not shared

    def copies(self) -> list[Any]:
        """Results with memory of their own; on the caller's stream."""
        if self._plain:
            return [x.clone() if isinstance(x, torch.Tensor) else x for x in self.outputs]
        made = [x.clone() for x in self._ranges]
        return [how(made) for how in self._how]


def _memory(x: torch.Tensor) -> Any:
    """What tells memory from other memory; None for tensors without any."""
    if x.layout is not torch.strided or x.numel() == 0:
        return None
    return x.untyped_storage().data_ptr(), x.dtype, x.is_conj(), x.is_neg()


def _is_dense(x: torch.Tensor) -> bool:
    """Whether a copy has the same strides."""
    return torch.empty_like(x, device="meta").stride() == x.stride()


def _range_of(each: list[torch.Tensor]) -> torch.Tensor:
    """All memory from the first element of any to the last one."""
    begin = min(x.storage_offset() for x in each)
    end = max(
        x.storage_offset()
        + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        for x in each
    )
    return each[0].as_strided((end - begin + 1,), (1,), begin)


def _taken(x: Any, number: dict[Any, int], begins: list[int]) -> Callable[[list[Any]], Any]:
    """From copies of the ranges to a result."""
    if not isinstance(x, torch.Tensor):
        return lambda _: x
    n = number.get(_memory(x))
    if n is None:
        return lambda _: x.clone()
    size, steps, begin = x.shape, x.stride(), x.storage_offset() - begins[n]
    return lambda made: made[n].as_strided(size, steps, begin)
