"""Where a result lies in memory: strides and offset as the original's has them.

XLA makes contiguous arrays. Where sizes may change, AOTAutograd makes a result that is a view of another
one, or of an argument, anew: of what that lies in, by the strides and the offset of what came back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import aot
from dynaflow_xla.frontends.torch.capture.captured import overlapping, place
from dynaflow_xla.frontends.torch.on_xla.to_jax import JaxFunction


@dataclass(frozen=True)
class ResultPlace:
    """Of one result.

    Attributes:
        example: What it is like in the original.
        of: The position of the argument to whose beginning ``offset`` is to be added, if it is a view of one.
        offset: Where it begins, from where that argument begins.
    """

    example: torch.Tensor
    of: int | None
    offset: int

    def put(self, x: torch.Tensor, inputs: Sequence[Any]) -> torch.Tensor:
        """The result there, in memory of its own if it is not there already."""
        offset = self.offset + (0 if self.of is None else inputs[self.of].storage_offset())
        strides = self.example.stride()
        if not x.numel() or (offset == x.storage_offset() and _same(x.shape, x.stride(), strides)):
            return x
        last = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
        room = torch.empty(offset + last + 1, dtype=x.dtype, device=x.device)
        if _apart(self.example):
            place(room.as_strided(x.shape, strides, offset), x, overlapping(self.example))
        else:  # windows: several elements lie at one place, and are equal
            numbers = torch.arange(len(room), device=x.device)
            room[numbers.as_strided(x.shape, strides, offset).reshape(-1)] = x.reshape(-1)
        # No view of ``room``: AOTAutograd would look at how that lies, too.
        whole = torch.empty(0, dtype=x.dtype, device=x.device)
        return whole.set_(room.untyped_storage(), offset, x.shape, strides)


def _same(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    return all(n == 1 or a == b for n, a, b in zip(shape, one, other, strict=True))


def _apart(example: torch.Tensor) -> bool:
    """Whether no two elements are at one place, but along dimensions that repeat the same memory."""
    end = 0
    for stride, size in sorted(zip(example.stride(), example.shape, strict=True)):
        if size > 1 and stride:
            if stride <= end:
                return False
            end += stride * (size - 1)
    return True


def result_places(function: JaxFunction) -> dict[int, ResultPlace]:
    """By the position of a result of a forward: of those that XLA may make elsewhere.

    What is kept for the backward may lie anywhere.
    """
    captured = function.captured
    graph, examples = captured.graph, captured.examples
    saved = [aot.is_saved(d) for d in aot.output_descriptions(captured.module)]
    memory = {v: aot.memory_of(node) for node, v in captured.ids.items()}
    inputs = {memory[v]: n for n, v in enumerate(graph.inputs) if memory.get(v) is not None}
    layouts = dict(zip(function.results, function.result_layouts, strict=True))
    added = aot.adds_where_arguments_begin()
    found = {}
    for position, out in enumerate(captured.outputs):
        if out not in layouts or (position < len(saved) and saved[position]):
            continue
        example, of = examples[out], inputs.get(memory.get(out))
        offset = int(example.storage_offset())
        if of is not None:
            offset -= int(examples[graph.inputs[of]].storage_offset())
        elif not offset and _same(example.shape, example.stride(), layouts[out].strides):
            continue
        found[position] = ResultPlace(example, None if added else of, offset)
    return found
