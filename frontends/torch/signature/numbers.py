"""Numbers among the inputs of a graph, another one at each call perhaps: plans read them, or are for one."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch

from dynaflow_xla.frontends.torch.batch.rules import pointwise
from dynaflow_xla.frontends.torch.batch.walking.registry import RULES
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.capture.sizes import Binding, Symbol, symbols_of
from dynaflow_xla.ir.graph import Operator

_MANY = 16
"""So many values of a number are planned for before it is told that each has a plan."""


def open_in(captured: Captured) -> frozenset[Symbol]:
    """Symbols of numbers that are operands only, and in no shape: a plan may read them at each call.

    What computes numbers from numbers may read them, too.
    """
    numbers: dict[int, set[Symbol]] = {}
    in_shapes: set[Symbol] = set()
    for value, example in captured.examples.items():
        if isinstance(example, torch.Tensor):
            sizes = (*example.shape, *example.stride(), example.storage_offset())
            in_shapes.update(symbol for size in sizes for symbol in symbols_of(size))
        elif found := symbols_of(example):
            numbers[value] = found
            if len(found) > 1:  # which may follow the batch size as well
                in_shapes |= found
    free = {s for v in captured.graph.inputs if v in numbers for s in numbers[v]} - in_shapes
    for op in captured.graph.ops:
        if any(v not in numbers for v in op.outputs) and not _by_elements(op):
            free.difference_update(*(numbers.get(v, ()) for v in op.payload.reads()))
    return frozenset(free)


def _by_elements(op: Operator) -> bool:
    """Whether an operator goes element by element, so that a number among its operands is one of them."""
    made = RULES.get(op.kind)
    tags = getattr(op.payload.target, "tags", ())
    known = made is not None and made.__module__ == pointwise.__name__
    return known or torch.Tag.pointwise in tags or op.kind == "scalar_tensor"


def of_symbols(captured: Captured, symbols: Set[Symbol]) -> frozenset[int]:
    """Numbers of the graph that depend on any of these symbols."""
    return frozenset(
        v for v, x in captured.examples.items()
        if symbols and not isinstance(x, torch.Tensor) and symbols_of(x) & symbols
    )  # fmt: skip


def many_values(
    captured: Captured,
    bindings: Sequence[Binding],
    planned: Sequence[tuple[Any, ...]],
    key: tuple[Any, ...],
) -> str:
    """That many values of a number have a plan each at the sizes of ``key``; "" if they are few.

    Args:
        captured: The graph.
        bindings: Where the values come from.
        planned: Those there are plans for, None where a plan reads the number.
        key: One of them.
    """
    sizes = [n for n, b in enumerate(bindings) if b.dim >= 0]
    alike = [k for k in planned if all(k[n] == key[n] for n in sizes)]
    changing = [
        n for n, b in enumerate(bindings)
        if b.dim < 0 and key[n] is not None and len({k[n] for k in alike}) >= _MANY
    ]  # fmt: skip
    if not changing:
        return ""
    labels = getattr(captured, "labels", {})
    given = [captured.graph.input_names[bindings[n].position] for n in changing]
    names = ", ".join(labels.get(name) or name for name in given)
    return (
        f"{captured.graph.name!r} was planned for {_MANY} values of {names}, and each "
        "further one takes a plan of its own, as a shape, a position or the proof of the split depends "
        "on it: pass it as a tensor, or keep to few values"
    )
