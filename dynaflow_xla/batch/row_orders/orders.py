"""Rows in an order that data gives: what a sort makes, what undoes it, and what may happen in between.

A mixture of experts sorts its tokens by expert, gathers, multiplies group by group, scatters back. Which
place an item gets depends on all items, what becomes of it on that item alone. Three things carry
the proof: values in that order (``InOrder``), numbers of items (``ItemNumbers``) and places of items
(``Inverse``). In between, items are the rows of a batch of their own: whatever treats rows independently may
be applied to them, by the same rules (``into``, ``out_of``). Only what brings an item back to its own row
leads out.

Functions give None where they have nothing to say: the ordinary rule decides then, about ``plain`` states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynaflow_xla.batch.row_orders.item_numbers import by_row, counts_up
from dynaflow_xla.batch.states import (
    ORDERED,
    POSITION,
    Below,
    InOrder,
    Inverse,
    ItemNumbers,
    Keyed,
    Listed,
    Partial,
    Permutation,
    Position,
    Refuse,
    Rows,
    Same,
    Sizes,
    State,
    as_rows,
)

_ELSEWHERE = "needs rows in the order of the batch"


def plain(state: State) -> State:
    """What an ordinary rule may know of a value.

    Raises:
        Refuse: nothing: its rows are in another order, or it is about numbers of items.
    """
    if isinstance(state, Keyed):
        return state.rows
    if isinstance(state, Listed):
        return state.plain
    if isinstance(state, Below) and state.terms is None:
        raise Refuse("is a place among sorted rows of the batch", state.origin, ordered=True)
    if isinstance(state, Sizes | Below):
        return Partial(0, state.origin)
    if isinstance(state, InOrder | Inverse):
        raise Refuse(_ELSEWHERE, state.order.origin, ordered=True)
    if isinstance(state, ItemNumbers):
        if state.order is not None:
            raise Refuse(_ELSEWHERE, state.order.origin, ordered=True)
        if state.outer * state.inner == 1 and counts_up(state):
            return Position(state.axis)
        if by_row(state):
            return Rows(state.axis, state.outer, state.inner)
        raise Refuse(POSITION)
    return state


def at(state: State) -> Rows | None:
    """Where a value that is in an order, or about one, has its items, as rows of the batch."""
    if isinstance(state, Keyed | Inverse):
        return state.rows
    if isinstance(state, ItemNumbers):
        return Rows(state.axis, state.outer, state.inner)
    if isinstance(state, InOrder):
        order, rows = state.order, state.rows
        return Rows(rows.axis, 1, order.each * rows.outer * rows.inner, rows.power)
    return None


def order_of(states: Sequence[State]) -> Permutation | None:
    """The order that some operands are in.

    Raises:
        Refuse: there are two.
    """
    found = {s.order for s in states if isinstance(s, InOrder | ItemNumbers | Inverse) and s.order}
    if len(found) > 1:
        first = min(found, key=lambda o: str(o.origin))
        raise Refuse("combines rows in two different orders", first.origin, ordered=True)
    return found.pop() if found else None


def into(state: State, order: Permutation) -> State:
    """The state of an operand where items are the rows.

    Raises:
        Refuse: it is not in this order.
    """
    if isinstance(state, InOrder) and state.order is order:
        return state.rows
    state = as_rows(state)
    if isinstance(state, Same):
        return state
    if isinstance(state, Rows) and state.fill is not None:
        if state.outer * state.inner == order.each:
            return replace(state, outer=1, inner=1)
    if isinstance(state, Position) and state.dim is None and order.each == 1:
        return state
    if isinstance(state, ItemNumbers) and state.order is None and counts_up(state):
        if state.outer * state.inner == order.each:
            return Position(state.axis)
    if isinstance(state, ItemNumbers) and state.order is order:
        if by_row(state) and state.outer * state.inner == order.each:
            # Of items that lie in the same place of their rows; of other items it is another number.
            return Rows(state.axis)
        raise Refuse("computes with the number of a row in the batch", order.origin, ordered=True)
    raise Refuse(
        "combines rows in that order with rows that are not in it", order.origin, ordered=True
    )


def out_of(state: State, order: Permutation) -> State:
    """The state of a result, where items were the rows."""
    if isinstance(state, Rows):
        if state.fill is not None:
            return replace(state, outer=1, inner=order.each * state.outer * state.inner)
        return InOrder(order, state)
    if isinstance(state, Position):
        raise Refuse(POSITION, order.origin, ordered=True)
    return state


def is_ordered(states: Sequence[State]) -> bool:
    """Whether some of these are states that ordinary rules do not know."""
    return any(isinstance(s, ORDERED) for s in states)
