"""States of what is read and written by number: gathers and scatters of all kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from dynaflow_xla.batch.algebra import homogeneous, linear, nonlinear
from dynaflow_xla.batch.axes import BY_NUMBER
from dynaflow_xla.batch.states import (
    POSITION,
    Partial,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    SummedBy,
    batch_axis,
    moved,
    scaled,
    unfilled,
)

_CROSSED = "combines every row of the batch with every other row"
_WRITES = "writes rows of the batch by their number"

How = Literal["add", "set", "extreme", "multiply", "any"]
"""What a scatter does where it writes: adds; takes the new value; takes the larger, the smaller or a mean
(what scales with both); multiplies; something else."""


def check_index(state: State) -> None:
    """Refuses indices that address other elements in a nano-batch: scaled ones, totals."""
    if not isinstance(state, Position):
        nonlinear([state])


def _layout(state: Rows) -> Rows:
    """Only where the rows are, to be held against another layout."""
    return Rows(0, state.outer, state.inner, 0, None if state.fill is None else 0)


def _is_single(state: Rows) -> bool:
    return state.outer * state.inner == 1


def gathered(
    operand: State,
    index: State,
    *,
    kept: Mapping[int, int],
    paired: Mapping[int, int],
    own: int | None,
    places: Mapping[int, int],
    fills: bool = False,
) -> State:
    """Elements of ``operand`` at places that ``index`` holds.

    Args:
        operand: What is read.
        index: The numbers.
        kept: Dimension of the operand that is taken whole -> where it is in the result.
        paired: Dimension of the operand -> dimension of the index it runs along with.
        own: If the index is a position: the dimension of the operand that this position addresses.
        places: Dimension of the index -> where it is in the result; coordinates have no place.
        fills: Elements out of bounds are filled with another value (which scales as the operand does).
    """
    check_index(index)
    a, c = batch_axis(operand), batch_axis(index)
    if c is None:
        if a is None:
            return unfilled(operand) if fills else operand
        if a not in kept:
            raise Refuse(BY_NUMBER)
        if isinstance(operand, Position) and fills:
            raise Refuse(POSITION)
        return moved(unfilled(operand) if fills else operand, kept[a])
    if isinstance(operand, Position):
        raise Refuse(POSITION)
    if c not in places:
        raise Refuse("takes the rows of the batch as the coordinates of one element")
    if isinstance(operand, Partial):
        raise Refuse(
            "takes elements of a total over the batch, before it is complete", operand.origin
        )
    along = {d for d, k in paired.items() if k == c}
    if not isinstance(operand, Rows):
        if isinstance(index, Position):
            raise Refuse("looks up values by the position of a row in the batch")
        if along:
            raise Refuse(BY_NUMBER)
        assert isinstance(index, Rows) and isinstance(operand, Same)
        return Rows(places[c], index.outer, index.inner, operand.power)
    if a in along:
        if isinstance(index, Position):
            raise Refuse("looks up values by the position of a row in the batch")
        assert isinstance(index, Rows)
        together = linear([_layout(operand), _layout(index)])
        return moved(scaled(together, operand.power), places[c])
    if a in kept or a in paired:
        raise Refuse(_CROSSED)
    if not isinstance(index, Position) or own != a or not _is_single(operand):
        raise Refuse(BY_NUMBER)
    return Rows(places[c], power=operand.power)


def scattered(
    operand: State,
    index: State,
    updates: State,
    *,
    how: How,
    kept: Mapping[int, int],
    paired: Mapping[int, int],
    own: int | None,
    places: Mapping[int, int],
    origin: SummedBy,
) -> State:
    """``operand`` with ``updates`` written at places that ``index`` holds.

    Args:
        operand: What is written to.
        index: The numbers.
        updates: What is written; of one value for all places see :func:`spread`.
        how: What writing does.
        kept: Dimension of the operand that is written whole -> dimension of the updates.
        paired: Dimension of the operand -> dimension of the index it runs along with.
        own: If the index is a position: the dimension of the operand that this position addresses.
        places: Dimension of the index -> dimension of the updates; coordinates have no place.
        origin: The operator.
    """
    check_index(index)
    if isinstance(operand, Position) or isinstance(updates, Position):
        raise Refuse(POSITION)
    a, c, u = batch_axis(operand), batch_axis(index), batch_axis(updates)
    if a is None and c is None and u is None:
        return unfilled(_written(how, operand, updates))
    if c is not None and c not in places:
        raise Refuse("takes the rows of the batch as the coordinates of one element")
    along = {d for d, k in paired.items() if k == c} if c is not None else set()
    if a is None:
        # Rows go to places of something shared: a sum over the batch if they are added to zeros.
        if c is None or u != places[c] or along or not isinstance(index, Rows):
            raise Refuse(_WRITES)
        if how != "add":
            raise Refuse("writes all rows of the batch into one array")
        assert isinstance(updates, Rows)
        linear([_layout(index), _layout(updates)])
        return linear([operand, Partial(updates.power, origin)])
    if u is None or isinstance(operand, Partial) or isinstance(updates, Partial):
        raise Refuse("writes to all rows of the batch something that is no row")
    assert isinstance(operand, Rows) and isinstance(updates, Rows)
    layouts = [_layout(operand), _layout(updates)]
    if c is None:
        if kept.get(a) != u:
            raise Refuse(_WRITES)
    else:
        if places[c] != u:
            raise Refuse(_CROSSED)
        if a in along:
            if not isinstance(index, Rows):
                raise Refuse("looks up values by the position of a row in the batch")
            layouts.append(_layout(index))
        elif a in kept or a in paired:
            raise Refuse(_CROSSED)
        elif not isinstance(index, Position) or own != a or not _is_single(operand):
            raise Refuse(_WRITES)
        else:
            layouts.append(Rows(0))
    together = linear(layouts)
    made = _written(how, operand, moved(updates, a))
    assert isinstance(together, Rows) and isinstance(made, Rows)
    return replace(together, axis=a, power=made.power, fill=None)


def _written(how: How, operand: State, updates: State) -> State:
    if how in ("add", "set"):
        return linear([operand, updates])
    return homogeneous([operand, updates]) if how == "extreme" else nonlinear([operand, updates])


def spread(value: State, operand: State, index: State, places: Mapping[int, int],
           kept: Mapping[int, int]) -> State:  # fmt: skip
    """The state of one value, written to every place of a scatter, as if it were one for each."""
    if not isinstance(value, Same):
        return value
    if isinstance(index, Rows | Position) and index.axis in places:
        axis = places[index.axis]
    elif isinstance(operand, Rows) and operand.axis in kept:
        axis = kept[operand.axis]
    else:
        return value
    like = index if isinstance(index, Rows) else operand
    if not isinstance(like, Rows):
        return Rows(axis, power=value.power, fill=value.fill)
    return Rows(axis, like.outer, like.inner, value.power, value.fill)
