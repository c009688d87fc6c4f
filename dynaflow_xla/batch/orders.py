"""Rows in an order that data gives: what a sort makes, what undoes it, and what may happen in between.

A mixture of experts sorts its tokens by expert, gathers, multiplies group by group, scatters back. Which
place an item gets depends on all items, what becomes of it on that item alone. Three things carry the
proof: values in that order (``InOrder``), numbers of items (``Numbers``) and places of items (``Inverse``).
In between, items are the rows of a batch of their own: whatever treats rows independently may be applied
to them, by the same rules (``into``, ``out_of``). Only what brings an item back to its own row leads out.

Functions give None where they have nothing to say: the ordinary rule decides then, about ``plain`` states.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dynaflow_xla.batch.algebra import homogeneous, linear, product
from dynaflow_xla.batch.indexing import How
from dynaflow_xla.batch.states import (
    ORDERED,
    POSITION,
    InOrder,
    Inverse,
    Key,
    Keyed,
    Numbers,
    Order,
    Origin,
    Partial,
    Position,
    Refuse,
    Rows,
    Same,
    Sizes,
    State,
    is_zero,
)

MOST_ITEMS = 1 << 22
"""Numbers of so many items are looked at one by one; of more nothing is said."""

_ELSEWHERE = "needs rows in the order of the batch"
GROUPS = "assigns rows to groups by their position in the batch"
_OTHER_GROUPS = (
    "multiplies rows in groups whose sizes are not known to be those of these rows: they must be counted "
    "from what the rows are sorted by, and that must be known to be from 0 to the number of groups"
)


# -- states for rules that do not ask for orders -------------------------------------------------------


def plain(state: State) -> State:
    """What an ordinary rule may know of a value.

    Raises:
        Refuse: nothing: its rows are in another order, or it is about numbers of items.
    """
    if isinstance(state, Keyed):
        return state.rows
    if isinstance(state, Sizes):
        return Partial(0, state.origin)
    if isinstance(state, InOrder | Inverse):
        raise Refuse(_ELSEWHERE, state.order.origin, ordered=True)
    if isinstance(state, Numbers):
        if state.order is not None:
            raise Refuse(_ELSEWHERE, state.order.origin, ordered=True)
        if state.outer * state.inner == 1 and _counts(state):
            return Position(state.axis)
        if _by_row(state):
            return Rows(state.axis, state.outer, state.inner)
        raise Refuse(POSITION)
    return state


def at(state: State) -> Rows | None:
    """Where a value that is in an order, or about one, has its items, as rows of the batch."""
    if isinstance(state, Keyed | Inverse):
        return state.rows
    if isinstance(state, Numbers):
        return Rows(state.axis, state.outer, state.inner)
    if isinstance(state, InOrder):
        order, rows = state.order, state.rows
        return Rows(rows.axis, 1, order.each * rows.outer * rows.inner, rows.power)
    return None


def order_of(states: Sequence[State]) -> Order | None:
    """The order that some operands are in.

    Raises:
        Refuse: there are two.
    """
    found = {s.order for s in states if isinstance(s, InOrder | Numbers | Inverse) and s.order}
    if len(found) > 1:
        first = min(found, key=lambda o: str(o.origin))
        raise Refuse("combines rows in two different orders", first.origin, ordered=True)
    return found.pop() if found else None


def into(state: State, order: Order) -> State:
    """The state of an operand where items are the rows.

    Raises:
        Refuse: it is not in this order.
    """
    if isinstance(state, InOrder) and state.order is order:
        return state.rows
    if isinstance(state, Keyed):
        state = state.rows
    if isinstance(state, Same):
        return state
    if isinstance(state, Rows) and state.fill is not None:
        if state.outer * state.inner == order.each:
            return replace(state, outer=1, inner=1)
    if isinstance(state, Position) and state.dim is None and order.each == 1:
        return state
    if isinstance(state, Numbers) and state.order is None and _counts(state):
        if state.outer * state.inner == order.each:
            return Position(state.axis)
    if isinstance(state, Numbers) and state.order is order:
        if _by_row(state) and state.outer * state.inner == order.each:
            # Of items that lie in the same place of their rows; of other items it is another number.
            return Rows(state.axis)
        raise Refuse("computes with the number of a row in the batch", order.origin, ordered=True)
    raise Refuse(
        "combines rows in that order with rows that are not in it", order.origin, ordered=True
    )


def out_of(state: State, order: Order) -> State:
    """The state of a result, where items were the rows."""
    if isinstance(state, Rows):
        if state.fill is not None:
            return replace(state, outer=1, inner=order.each * state.outer * state.inner)
        return InOrder(order, state)
    if isinstance(state, Position):
        raise Refuse(POSITION, order.origin, ordered=True)
    return state


# -- numbers of items ----------------------------------------------------------------------------------


def _counts(state: Numbers) -> bool:
    return all(np.array_equal(t, np.arange(t.size)) for t in state.tables)


def counting(axis: int, outer: int, inner: int, sizes: Sequence[int]) -> Numbers:
    """0, 1, 2... along an axis of ``outer * inner`` items for each row."""
    lengths = [n * outer * inner for n in sizes]
    if max(lengths) > MOST_ITEMS:
        raise Refuse(POSITION)
    return numbered(axis, outer, inner, [np.arange(n) for n in lengths])


def numbered(
    axis: int, outer: int, inner: int, tables: Sequence[Any], order: Order | None = None
) -> Numbers:
    """Numbers of items, given for each trace."""
    made = tuple(np.asarray(t) for t in tables)
    digest = hashlib.blake2b(digest_size=16)
    for table in made:
        digest.update(f"{table.shape}{table.dtype.kind}".encode())
        digest.update(np.ascontiguousarray(table).tobytes())
    return Numbers(axis, outer, inner, made, order, digest.digest())


def numbers(state: State, sizes: Sequence[int]) -> Numbers | None:
    """A state as numbers of items, if it is that."""
    if isinstance(state, Position) and state.dim is None:
        return counting(state.axis, 1, 1, sizes)
    return state if isinstance(state, Numbers) else None


def _settled(state: Numbers) -> State:
    """A known value instead, if all numbers are one."""
    first = state.tables[0].reshape(-1)[:1]
    if first.size and all(bool((t == first[0]).all()) for t in state.tables):
        # True of all elements, hence in every order.
        return Rows(state.axis, state.outer, state.inner, 0, first[0].item())
    return state


def _by_row(state: Numbers) -> bool:
    """Whether the numbers are the same for all rows, in all traces: they say nothing of the row then."""
    rows = [t.reshape(state.outer, -1, state.inner) for t in state.tables]
    return all(bool((t == rows[0][:, :1]).all()) for t in rows)


def elementwise(
    function: Callable[..., Any], operands: Sequence[State], sizes: Sequence[int]
) -> State | None:
    """A function of integers, element by element, of numbers of items and known values."""
    given = [numbers(s, sizes) or s for s in operands]
    found = [s for s in given if isinstance(s, Numbers)]
    if not found or any((s.axis, s.order) != (found[0].axis, found[0].order) for s in found):
        return None
    if len({tuple(t.size for t in s.tables) for s in found}) != 1:
        return None
    for state in given:
        if not isinstance(state, Numbers):
            if not isinstance(state, Same | Rows) or state.fill is None or state.power:
                return None
    tables = []
    for trace in range(len(sizes)):
        values = [
            s.tables[trace] if isinstance(s, Numbers) else getattr(s, "fill", None) for s in given
        ]
        try:
            with np.errstate(all="raise"):
                tables.append(np.broadcast_to(function(*values), found[0].tables[trace].shape))
        except (ArithmeticError, TypeError, ValueError):
            return None
    if any(t.dtype.kind not in "iub" for t in tables):
        return None
    like = found[0]
    return _settled(numbered(like.axis, like.outer, like.inner, tables, like.order))


def _to_rows(
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
        if table.dtype.kind not in "iu" or not _within(table, n * rows[0] * rows[1]):
            return False
        outer, rest = np.divmod(table.reshape(items[0], n, items[1]), n * rows[1])
        row, inner = np.divmod(rest, rows[1])
        if not bool((row == np.arange(n)[None, :, None]).all()):
            return False
        places.append(outer * rows[1] + inner)
    return all(bool((p == places[0][:, :1]).all()) for p in places)


def _within(table: np.ndarray, count: int) -> bool:
    return bool(table.size) and int(table.min()) >= 0 and int(table.max()) < count


def _distinct(tables: Sequence[np.ndarray]) -> bool:
    return all(np.unique(t).size == t.size for t in tables)


# -- sorting -------------------------------------------------------------------------------------------


def ordered(
    operands: Sequence[State], axis: int, sizes: Sequence[int], origin: Origin, *, rising: bool = True
) -> list[State] | None:  # fmt: skip
    """Operands that are sorted together by the first of them, along the only axis that is longer than 1.

    Args:
        operands: What is sorted.
        axis: Along which.
        sizes: Rows of the batch in each trace.
        origin: The operator.
        rising: The smallest comes first.
    """
    first = operands[0]
    if isinstance(first, Numbers) and first.order is not None and rising and _counts(first):
        return [_back(s, first.order, axis) for s in operands]
    layouts = {
        (rows.outer, rows.inner)
        for s in operands
        if isinstance(rows := s.rows if isinstance(s, Keyed) else s, Rows) and rows.fill is None
    }
    if len(layouts) != 1:
        return None
    ((outer, inner),) = layouts
    order = Order(outer, inner, origin, first.key if isinstance(first, Keyed) and rising else None)
    made: list[State] = []
    for state in operands:
        # Any permutation would do, so it does not matter by what and how it is found.
        rows = state.rows if isinstance(state, Keyed) else state
        counted = numbers(state, sizes)
        if isinstance(rows, Rows) and rows.axis == axis:
            key = state.key if isinstance(state, Keyed) else None
            made.append(
                rows if rows.fill is not None else InOrder(order, Rows(axis, power=rows.power), key)
            )
        elif counted is not None and counted.order is None and counted.axis == axis:
            if counted.outer * counted.inner != order.each:
                return None
            made.append(numbered(axis, outer, inner, counted.tables, order))
        else:
            return None
    return made


def _back(state: State, order: Order, axis: int) -> State:
    """An operand of a sort by the numbers of the items, which puts them back."""
    rows = Rows(axis, order.outer, order.inner)
    if isinstance(state, InOrder) and state.order is order and state.rows.axis == axis:
        if state.rows.outer * state.rows.inner == 1:
            return replace(rows, power=state.rows.power)
    if isinstance(state, Numbers) and state.order is order:
        return numbered(axis, order.outer, order.inner, state.tables)
    if isinstance(state, Numbers) and state.order is None and _counts(state):
        if state.outer * state.inner == order.each:
            return Inverse(order, rows)
    if isinstance(state, Position) and state.dim is None and order.each == 1:
        return Inverse(order, rows)
    raise Refuse("sorts rows that are not in that order", order.origin, ordered=True)


# -- reading and writing by number ---------------------------------------------------------------------


def taken(
    operand: State, index: State, *, dim: int, places: Mapping[int, int], sizes: Sequence[int]
) -> State | None:
    """Elements of ``operand`` along ``dim`` at the numbers that ``index`` holds; all else is taken whole.

    Args:
        operand: What is read.
        index: The numbers.
        dim: The dimension that they address.
        places: Dimension of the index -> where it is in the result; coordinates have no place.
        sizes: Rows of the batch in each trace.
    """
    if isinstance(index, Inverse):
        return _put_back(operand, index, dim, places)
    by = numbers(index, sizes)
    if by is None or by.axis not in places:
        return None
    axis, items = places[by.axis], (by.outer, by.inner)
    inner = operand.rows if isinstance(operand, Keyed) else operand
    table = numbers(operand, sizes)
    if table is not None and table.axis == dim and table.order is None:
        lengths = [t.size for t in table.tables]
        if not all(_within(t, n) for t, n in zip(by.tables, lengths, strict=True)):
            return None
        found = [s[t] for s, t in zip(table.tables, by.tables, strict=True)]
        return _settled(numbered(axis, *items, found, by.order))
    if not isinstance(inner, Rows) or inner.axis != dim:
        return None
    if not _to_rows(by.tables, items, (inner.outer, inner.inner), sizes):
        return None
    made = Rows(axis, *items, inner.power, inner.fill)
    if by.order is None or inner.fill is not None:
        return made
    every = all(
        t.size == n * inner.outer * inner.inner for t, n in zip(by.tables, sizes, strict=True)
    )
    key = operand.key if isinstance(operand, Keyed) and every and _distinct(by.tables) else None
    return InOrder(by.order, Rows(axis, power=inner.power), key)


def _put_back(operand: State, index: Inverse, dim: int, places: Mapping[int, int]) -> State | None:
    where = index.rows
    if where.axis not in places:
        return None
    if isinstance(operand, InOrder) and operand.order is index.order and operand.rows.axis == dim:
        if operand.rows.outer * operand.rows.inner == 1:
            return replace(where, axis=places[where.axis], power=operand.rows.power)
    return None


def written(
    operand: State,
    index: State,
    updates: State,
    *,
    how: How,
    dim: int,
    places: Mapping[int, int],
    sizes: Sequence[int],
) -> State | None:
    """``operand`` with ``updates`` written along ``dim`` at the numbers that ``index`` holds.

    Args:
        operand: What is written to.
        index: The numbers.
        updates: What is written.
        how: What writing does.
        dim: The dimension that the numbers address; all others are written whole.
        places: Dimension of the index -> dimension of the updates.
        sizes: Rows of the batch in each trace.
    """
    if how not in ("add", "set", "extreme"):
        return None
    combine = homogeneous if how == "extreme" else linear
    if isinstance(index, Inverse):
        # Each item is written once: what was in the order of the items is in that of the places.
        where, order = index.rows, index.order
        new = updates.rows if isinstance(updates, Keyed) else updates
        if where.axis not in places or not isinstance(new, Rows):
            return None
        if new.fill is None and replace(where, axis=places[where.axis], power=new.power) != new:
            return None
        if how == "set":
            return InOrder(order, Rows(dim, power=new.power))
        before = into(operand, order)
        return out_of(combine([before, Rows(dim, power=new.power, fill=new.fill)]), order)
    by = numbers(index, sizes)
    if by is None or by.axis not in places:
        return None
    axis = places[by.axis]
    if by.order is not None and how == "set" and _counts(by):
        given = numbers(updates, sizes)
        if given is not None and given.order is None and _counts(given) and given.axis == axis:
            if given.outer * given.inner == by.order.each:
                return Inverse(by.order, Rows(dim, by.outer, by.inner))
    before = plain(operand)
    if not isinstance(before, Rows) or before.axis != dim:
        return None
    if not _to_rows(by.tables, (by.outer, by.inner), (before.outer, before.inner), sizes):
        return None
    if how == "set" and not _distinct(by.tables):
        return None  # which of several items is written last depends on their order
    power = _power_in(updates, by, axis)
    if power is None:
        return None
    made = combine([before, replace(before, power=power, fill=None)])
    return replace(made, fill=None) if isinstance(made, Rows) else made


def _power_in(updates: State, by: Numbers, axis: int) -> int | None:
    """The power of the batch size that updates carry, if they are in the order of the numbers."""
    if isinstance(updates, Keyed):
        updates = updates.rows
    if isinstance(updates, InOrder):
        if updates.order is not by.order or updates.rows != Rows(axis, power=updates.rows.power):
            return None
        return updates.rows.power
    if isinstance(updates, Same) and not is_zero(updates):
        return updates.power
    if isinstance(updates, Rows) and updates.axis == axis:
        if updates.fill is not None and updates.outer * updates.inner == by.outer * by.inner:
            return updates.power
        if by.order is None and (updates.outer, updates.inner) == (by.outer, by.inner):
            return updates.power
    return None


# -- groups of items -----------------------------------------------------------------------------------


def key_of(state: State) -> Key | None:
    """Which integers a value holds, if that is known."""
    return state.key if isinstance(state, Keyed | InOrder) else None


def keyed(rows: State, low: int | None = None, high: int | None = None) -> State:
    """Rows of integers within bounds, so that what is counted of them can be told apart."""
    if not isinstance(rows, Rows) or rows.fill is not None or rows.power:
        return rows
    return Keyed(rows, Key(low, high))


def clamped(state: State, low: int | None, high: int | None) -> State | None:
    """Integers that are raised to ``low`` and cut off at ``high``."""
    key = key_of(state)
    if key is None or (low is not None and high is not None and low > high):
        return None
    new_low = key.low if low is None or (key.low is not None and key.low >= low) else low
    new_high = key.high if high is None or (key.high is not None and key.high <= high) else high
    if (new_low, new_high) == (key.low, key.high):
        return state
    # A bound that all elements pass leaves one value.
    if new_low is not None and high is not None:
        new_low = min(new_low, high)
    if new_high is not None and low is not None:
        new_high = max(new_high, low)
    assert isinstance(state, Keyed | InOrder)
    return replace(state, key=Key(new_low, new_high, key.base | {key}))


def compared(state: State, bound: int, *, below: bool) -> State | None:
    """Whether integers are below a bound (or at least as large), if the answer is one for all."""
    key, rows = key_of(state), at(state)
    if isinstance(state, Inverse):
        key = Key(low=0)
    if key is None or rows is None:
        return None
    if key.low is not None and key.low >= bound:
        return replace(rows, power=0, fill=not below)
    if key.high is not None and key.high < bound:
        return replace(rows, power=0, fill=below)
    return None


def counted(
    index: State, zeros: State, ones: State, classes: int, origin: Origin, *, drops: bool = False
) -> State | None:  # fmt: skip
    """How often each number is in ``index``: ones, added to zeros at these places.

    Args:
        index: The numbers, all of which are counted.
        zeros: What is added to.
        ones: What is added.
        classes: How many numbers are told apart.
        origin: The operator.
        drops: Numbers that are too large are left out.
    """
    key = key_of(index)
    if key is None or key.low is None or key.low < 0:
        return None
    if not drops and (key.high is None or key.high >= classes):
        return None
    if not is_zero(zeros) or not isinstance(ones, Same | Rows) or ones.fill != 1:
        return None
    return Sizes(key, origin)


def summed_up(state: State) -> State | None:
    """Running totals of the sizes of groups: where each of them ends."""
    return replace(state, upto=True) if isinstance(state, Sizes) and not state.upto else None


def grouped(
    items: State, shared: State, sizes: State, *, axis: int, place: int, upto: bool = False,
    groups: int | None = None,
) -> State:  # fmt: skip
    """Items, each multiplied with what is shared by its group; those of a group lie together.

    The groups of sorted items follow from which integers they are sorted by, and the sizes from how often
    each of these occurs. As both are the same integers in every trace, an item's group is its own integer.

    Args:
        items: The items.
        shared: For each group a factor.
        sizes: Of the groups.
        axis: Of ``items``, along which groups lie.
        place: Where that axis is in the result.
        upto: Sizes are where groups end.
        groups: How many groups there are, where items of none are not defined.

    Raises:
        Refuse: the groups of an item may depend on others.
    """
    order = _grouped_order(items, sizes, axis, upto, groups)
    if not isinstance(shared, Same):
        raise Refuse("multiplies rows of the batch with other rows of it")
    assert isinstance(items, InOrder)
    made = product(Rows(place, power=items.rows.power), shared)
    assert isinstance(made, Rows)
    return InOrder(order, made)


def grouped_sum(
    left: State, right: State, sizes: State, origin: Origin, *, axes: tuple[int, int],
    upto: bool = False, groups: int | None = None,
) -> State:  # fmt: skip
    """For each group the sum over its items of the products of two values; see :func:`grouped`."""
    order = _grouped_order(left, sizes, axes[0], upto, groups)
    if _grouped_order(right, sizes, axes[1], upto, groups) is not order:
        raise Refuse("combines rows in two different orders", order.origin, ordered=True)
    assert isinstance(left, InOrder) and isinstance(right, InOrder)
    return Partial(left.rows.power + right.rows.power, origin)


def _grouped_order(
    items: State, sizes: State, axis: int, upto: bool, groups: int | None
) -> Order:  # fmt: skip
    if not isinstance(items, InOrder) or items.rows != Rows(axis, power=items.rows.power):
        raise Refuse(GROUPS)
    if not isinstance(sizes, Sizes) or sizes.upto != upto:
        raise Refuse(_OTHER_GROUPS)
    if not sizes.key.follows(items.order.key):
        raise Refuse(_OTHER_GROUPS)
    if groups is not None and (sizes.key.high is None or sizes.key.high >= groups):
        raise Refuse(_OTHER_GROUPS)
    return items.order


# -- moving values about -------------------------------------------------------------------------------


def reshaped_numbers(
    state: Numbers, old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], sizes: Sequence[int]
) -> State | None:  # fmt: skip
    """Numbers of items, reshaped row-major; ``old`` and ``new`` are the shapes in each trace."""
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
        return _settled(numbered(axis, 1, each, lines))
    return None


def is_ordered(states: Sequence[State]) -> bool:
    """Whether some of these are states that ordinary rules do not know."""
    return any(isinstance(s, ORDERED) for s in states)
