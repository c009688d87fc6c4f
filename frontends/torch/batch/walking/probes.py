"""What the sizes of a captured graph are at two batch sizes that nothing else has.

A size that is the same at both does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_xla.batch.row_orders import orders
from dynaflow_xla.batch.states import (
    Counted,
    Mixed,
    Obstacle,
    Partial,
    Position,
    Rows,
    Same,
    Sizes,
    State,
)

PROBES = (10_007, 20_011)
"""Batch sizes to look at: primes, so that no size is a multiple of them by accident."""

Shape = tuple[int, ...]


def number_state(pair: tuple[Any, Any], *, irregular: bool = False) -> State:
    """State of a number that is known at both probes, and may follow another law elsewhere."""
    first, second = pair
    if irregular:
        return Mixed(Obstacle("mixed", "size", "a number depends on the batch size"))
    if first == second:
        return Same(0, first if isinstance(first, (int, float)) else None)
    for power in (1, 2):
        scale = [n / p**power for n, p in zip(pair, PROBES, strict=True)]
        if scale[0] == scale[1] and scale[0]:
            return Same(power)
    blame = Obstacle("mixed", "size", "a number depends on the batch size")
    return Mixed(blame)


def fits(state: State, shapes: Sequence[Shape], sizes: Sequence[int]) -> bool:
    """Whether a value of these shapes at these batch sizes can have the state."""
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        return False
    state = orders.at(state) or state
    if isinstance(state, Rows | Position | Counted):
        rank, axis = len(shapes[0]), state.axis
        if not 0 <= axis < rank:
            return False
        each = 1 if isinstance(state, Position) else state.inner
        each *= state.outer if isinstance(state, Rows) else 1
        rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        rows = all(s[axis] == each * n for s, n in zip(shapes, sizes, strict=True))
        return rows and len(rest) == 1
    if isinstance(state, Same | Partial | Sizes):
        return len(set(shapes)) == 1
    return True


def varying(shapes: Sequence[Shape]) -> list[int]:
    """The dimensions that depend on the batch size."""
    return [d for d, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]


def rows_by_shape(shapes: Sequence[Shape]) -> Rows | None:
    """The one dimension that is a multiple of the batch, as a state; None if there is no such one."""
    found = varying(shapes)
    if len(found) != 1:
        return None
    each = [shape[found[0]] / n for shape, n in zip(shapes, PROBES, strict=True)]
    if each[0] != each[1] or each[0] != int(each[0]):
        return None
    return Rows(found[0], 1, int(each[0]))
