"""What puts rows into an order that data gives, and what brings them back: sorts, gathers and scatters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynaflow_xla.batch.algebra import homogeneous, linear
from dynaflow_xla.batch.indexing import How
from dynaflow_xla.batch.row_orders.item_numbers import (
    counts_up,
    distinct,
    numbered,
    numbers,
    settled,
    to_rows,
    within,
)
from dynaflow_xla.batch.row_orders.orders import into, out_of, plain
from dynaflow_xla.batch.states import (
    InOrder,
    Inverse,
    ItemNumbers,
    Keyed,
    Permutation,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    SummedBy,
    as_rows,
    is_zero,
)


def ordered(
    operands: Sequence[State], axis: int, sizes: Sequence[int], origin: SummedBy, *, rising: bool = True
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
    if isinstance(first, ItemNumbers) and first.order is not None and rising and counts_up(first):
        return [_back(s, first.order, axis) for s in operands]
    layouts = {
        (rows.outer, rows.inner)
        for s in operands
        if isinstance(rows := s.rows if isinstance(s, Keyed) else s, Rows) and rows.fill is None
    }
    if len(layouts) != 1:
        return None
    ((outer, inner),) = layouts
    keyed = first if isinstance(first, Keyed) and rising else None
    order = Permutation(outer, inner, origin)
    if keyed is not None:
        order = replace(order, key=keyed.key, placed=keyed.placed)
    made: list[State] = []
    for number, state in enumerate(operands):
        # Any permutation would do, so it does not matter by what and how it is found.
        rows = state.rows if isinstance(state, Keyed) else state
        counted = numbers(state, sizes)
        if isinstance(rows, Rows) and rows.axis == axis:
            key = state.key if isinstance(state, Keyed) else None
            sorted_ = keyed is not None and not number
            made.append(
                rows
                if rows.fill is not None
                else InOrder(order, Rows(axis, power=rows.power), key, sorted_)
            )
        elif counted is not None and counted.order is None and counted.axis == axis:
            if counted.outer * counted.inner != order.each:
                return None
            made.append(numbered(axis, outer, inner, counted.tables, order))
        else:
            return None
    return made


def _back(state: State, order: Permutation, axis: int) -> State:
    """An operand of a sort by the numbers of the items, which puts them back."""
    rows = Rows(axis, order.outer, order.inner)
    if isinstance(state, InOrder) and state.order is order and state.rows.axis == axis:
        if state.rows.outer * state.rows.inner == 1:
            return replace(rows, power=state.rows.power)
    if isinstance(state, ItemNumbers) and state.order is order:
        return numbered(axis, order.outer, order.inner, state.tables)
    if isinstance(state, ItemNumbers) and state.order is None and counts_up(state):
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
        if not all(within(t, n) for t, n in zip(by.tables, lengths, strict=True)):
            return None
        found = [s[t] for s, t in zip(table.tables, by.tables, strict=True)]
        return settled(numbered(axis, *items, found, by.order))
    if not isinstance(inner, Rows) or inner.axis != dim:
        return None
    if not to_rows(by.tables, items, (inner.outer, inner.inner), sizes):
        return None
    made = Rows(axis, *items, inner.power, inner.fill)
    if by.order is None or inner.fill is not None:
        return made
    every = all(
        t.size == n * inner.outer * inner.inner for t, n in zip(by.tables, sizes, strict=True)
    )
    key = operand.key if isinstance(operand, Keyed) and every and distinct(by.tables) else None
    # The very elements that were sorted by, in that order.
    rising = isinstance(operand, Keyed) and operand.placed and by.order.placed and counts_up(by)
    rising &= key is not None and key is by.order.key
    return InOrder(by.order, Rows(axis, power=inner.power), key, rising)


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
    if by.order is not None and how == "set" and counts_up(by):
        given = numbers(updates, sizes)
        if given is not None and given.order is None and counts_up(given) and given.axis == axis:
            if given.outer * given.inner == by.order.each:
                return Inverse(by.order, Rows(dim, by.outer, by.inner))
    before = plain(operand)
    if not isinstance(before, Rows) or before.axis != dim:
        return None
    if not to_rows(by.tables, (by.outer, by.inner), (before.outer, before.inner), sizes):
        return None
    if how == "set" and not distinct(by.tables):
        return None  # which of several items is written last depends on their order
    power = _power_in(updates, by, axis)
    if power is None:
        return None
    made = combine([before, replace(before, power=power, fill=None)])
    return replace(made, fill=None) if isinstance(made, Rows) else made


def _power_in(updates: State, by: ItemNumbers, axis: int) -> int | None:
    """The power of the batch size that updates carry, if they are in the order of the numbers."""
    updates = as_rows(updates)
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
