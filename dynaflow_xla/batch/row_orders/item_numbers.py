"""Integers that follow from the number of an item alone, looked at one by one in every trace."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dynaflow_xla.batch.states import (
    POSITION,
    ItemNumbers,
    Listed,
    Permutation,
    Position,
    Refuse,
    Rows,
    Same,
    State,
)

MOST_ITEMS = 1 << 22
"""Numbers of so many items are looked at one by one; of more nothing is said."""


def counts_up(state: ItemNumbers) -> bool:
    """Whether each item has its own number."""
    return all(np.array_equal(t, np.arange(t.size)) for t in state.tables)


def counting(axis: int, outer: int, inner: int, sizes: Sequence[int]) -> ItemNumbers:
    """0, 1, 2... along an axis of ``outer * inner`` items for each row."""
    lengths = [n * outer * inner for n in sizes]
    if max(lengths) > MOST_ITEMS:
        raise Refuse(POSITION)
    return numbered(axis, outer, inner, [np.arange(n) for n in lengths])


def numbered(
    axis: int, outer: int, inner: int, tables: Sequence[Any], order: Permutation | None = None
) -> ItemNumbers:
    """Numbers of items, given for each trace."""
    made = tuple(np.asarray(t) for t in tables)
    digest = hashlib.blake2b(digest_size=16)
    for table in made:
        digest.update(f"{table.shape}{table.dtype.kind}".encode())
        digest.update(np.ascontiguousarray(table).tobytes())
    return ItemNumbers(axis, outer, inner, made, order, digest.digest())


def numbers(state: State, sizes: Sequence[int]) -> ItemNumbers | None:
    """A state as numbers of items, if it is that."""
    if isinstance(state, Position) and state.dim is None:
        return counting(state.axis, 1, 1, sizes)
    return state if isinstance(state, ItemNumbers) else None


def settled(state: ItemNumbers) -> State:
    """A known value instead, if all numbers are one."""
    first = state.tables[0].reshape(-1)[:1]
    if first.size and all(bool((t == first[0]).all()) for t in state.tables):
        # True of all elements, hence in every order.
        return Rows(state.axis, state.outer, state.inner, 0, first[0].item())
    return state


def by_row(state: ItemNumbers) -> bool:
    """Whether the numbers are the same for all rows, in all traces: they say nothing of the row then."""
    rows = [t.reshape(state.outer, -1, state.inner) for t in state.tables]
    return all(bool((t == rows[0][:, :1]).all()) for t in rows)


def elementwise(
    function: Callable[..., Any], operands: Sequence[State], sizes: Sequence[int]
) -> State | None:
    """A function of integers, element by element, of numbers of items and known values."""
    given = [numbers(s, sizes) or s for s in operands]
    found = [s for s in given if isinstance(s, ItemNumbers)]
    if not found or any((s.axis, s.order) != (found[0].axis, found[0].order) for s in found):
        return None
    if len({tuple(t.size for t in s.tables) for s in found}) != 1:
        return None
    others = [_fills(s, len(sizes)) for s in given if not isinstance(s, ItemNumbers)]
    if None in others:
        return None
    tables = []
    for trace in range(len(sizes)):
        fills = iter([o[trace] for o in others if o is not None])
        values = [s.tables[trace] if isinstance(s, ItemNumbers) else next(fills) for s in given]
        try:
            with np.errstate(all="raise"):
                tables.append(np.broadcast_to(function(*values), found[0].tables[trace].shape))
        except (ArithmeticError, TypeError, ValueError):
            return None
    if any(t.dtype.kind not in "iub" for t in tables):
        return None
    like = found[0]
    return settled(numbered(like.axis, like.outer, like.inner, tables, like.order))


def _fills(state: State, traces: int) -> list[Any] | None:
    """The value of every element in each trace, if it is known."""
    if isinstance(state, Listed) and all(len(set(v)) == 1 for v in state.values):
        return [v[0] for v in state.values]  # one that follows the batch size, say
    if isinstance(state, Same | Rows) and state.fill is not None and not state.power:
        return [state.fill] * traces
    return None


def to_rows(
    tables: Sequence[np.ndarray], items: tuple[int, int], rows: tuple[int, int], sizes: Sequence[int]
) -> bool:  # fmt: skip
    """Whether the numbers address the item's own row, in all rows and traces the same place in it.

    Args:
        tables: For each trace the number that each item has.
        items: Outer and inner of the items.
        rows: Outer and inner of what is addressed.
        sizes: Rows of the batch in each trace.
    """
    places = []
    for table, n in zip(tables, sizes, strict=True):
        if table.dtype.kind not in "iu" or not within(table, n * rows[0] * rows[1]):
            return False
        outer, rest = np.divmod(table.reshape(items[0], n, items[1]), n * rows[1])
        row, inner = np.divmod(rest, rows[1])
        if not bool((row == np.arange(n)[None, :, None]).all()):
            return False
        places.append(outer * rows[1] + inner)
    return all(bool((p == places[0][:, :1]).all()) for p in places)


def within(table: np.ndarray, count: int) -> bool:
    """Whether all numbers are those of ``count`` elements."""
    return bool(table.size) and int(table.min()) >= 0 and int(table.max()) < count


def distinct(tables: Sequence[np.ndarray]) -> bool:
    """Whether no number occurs twice in a trace."""
    return all(np.unique(t).size == t.size for t in tables)


def reshaped_numbers(
    state: ItemNumbers, old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], sizes: Sequence[int]
) -> State | None:  # fmt: skip
    """Numbers of items, reshaped row-major; ``old`` and ``new`` are the shapes in each trace."""
    if len({len(shape) for shape in new}) > 1:
        return None  # another reshape at another batch size
    if [math.prod(shape) for shape in old] != [math.prod(shape) for shape in new]:
        return None
    if any(o[state.axis] != t.size for o, t in zip(old, state.tables, strict=True)):
        return None
    if state.order is not None:
        # The axis itself, with dimensions of size 1 that come or go around it, or others beside it.
        for axis in range(len(new[0])):
            if all(
                n[axis] == o[state.axis] and math.prod(n[:axis]) == math.prod(o[: state.axis])
                for o, n in zip(old, new, strict=True)
            ):
                return replace(state, axis=axis)
        return None
    full = []
    for table, before, after in zip(state.tables, old, new, strict=True):
        if math.prod(before) > MOST_ITEMS:
            return None
        shape = [-1 if d == state.axis else 1 for d in range(len(before))]
        full.append(np.broadcast_to(table.reshape(shape), before).reshape(after))
    for axis in range(len(new[0])):
        others = tuple(d for d in range(len(new[0])) if d != axis)
        if any(int(np.ptp(x, axis=others).max(initial=0)) for x in full if others):
            continue
        each, rest = divmod(new[0][axis], sizes[0])
        if rest or any(n[axis] != each * b for n, b in zip(new, sizes, strict=True)):
            continue
        lines = [np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)[:, 0] for x in full]
        return settled(numbered(axis, 1, each, lines))
    return None
