"""States of results that follow along axes: sums, scans, reshapes, slices, joins, contractions."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace

from dynaflow_xla.batch.algebra import linear, product
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
    is_zero,
    moved,
    unfilled,
)

BY_NUMBER = "takes rows of the batch by their number"


def without(state: State, axes: Collection[int]) -> State:
    """The state after dimensions other than the batch's are gone."""
    axis = batch_axis(state)
    return state if axis is None else moved(state, axis - sum(a < axis for a in axes))


def off_batch(state: State, axes: Collection[int], reason: str) -> State:
    """The state itself, if the batch is along none of some axes.

    Raises:
        Refuse: it is, for this reason.
    """
    if batch_axis(state) in axes:
        raise Refuse(reason)
    return state


def summed_rows(state: Rows, origin: SummedBy) -> State:
    """The sum of all rows."""
    if state.fill is not None and not is_zero(state):
        return Same(state.power + 1)
    return Partial(state.power, origin)


def parameter_gradient(state: State, origin: SummedBy) -> State:
    """What the gradient of something shared is, where each row contributes ``state``: their sum."""
    return Partial(state.power, origin) if isinstance(state, Rows) else unfilled(linear([state]))


def summed(state: State, axes: Collection[int], origin: SummedBy, *, mean: bool = False) -> State:
    """The sum or mean over axes, which stay as dimensions of size 1."""
    if not isinstance(state, Rows) or state.axis not in axes:
        return linear([state])
    total = summed_rows(state, origin)
    if mean and isinstance(total, Same | Partial):
        return replace(total, power=total.power - 1)
    return total


def reshaped(state: Rows, old: Sequence[int], new: Sequence[int], batch: int) -> Rows:
    """Where the batch is after a row-major reshape from ``old`` to ``new`` in the trace of ``batch``."""
    before = state.outer * math.prod(old[: state.axis])
    after = state.inner * math.prod(old[state.axis + 1 :])
    lead = 1
    for axis, size in enumerate(new):
        if lead and before % lead == 0:
            outer = before // lead
            inner = size // (outer * batch) if outer and size % (outer * batch) == 0 else 0
            if inner and inner * math.prod(new[axis + 1 :]) == after:
                return Rows(axis, outer, inner, state.power, state.fill)
        lead *= size
    raise Refuse("reshapes so that rows of the batch are cut or interleaved")


def leads_to(made: Rows, state: Rows, old: Sequence[int], new: Sequence[int], batch: int) -> bool:
    """Whether a row-major reshape brings the rows of ``state`` to where ``made`` has them.

    In the trace of one row several axes may be read as its own; ``reshaped`` finds one of them.
    """
    return (
        made.axis < len(new)
        and new[made.axis] == made.outer * batch * made.inner
        and made.outer * math.prod(new[: made.axis]) == state.outer * math.prod(old[: state.axis])
        and made.inner * math.prod(new[made.axis + 1 :])
        == state.inner * math.prod(old[state.axis + 1 :])
    )


def runs(state: Rows, bounds: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Rows:
    """A slice along the batch axis that takes whole runs of the batch (``x[:B]`` of ``[2 * B]``).

    Args:
        state: What is sliced.
        bounds: In each trace the first element and the end.
        sizes: Rows of the batch in each trace.
    """
    found = set()
    for (start, stop), size in zip(bounds, sizes, strict=True):
        run = size * state.inner
        if start % run or stop % run or stop <= start:
            raise Refuse("takes some rows of the batch by their number")
        found.add((start // run, stop // run))
    if len(found) != 1:
        raise Refuse("takes some rows of the batch by their number")
    first, last = found.pop()
    return replace(state, outer=last - first)


def concatenated(states: Sequence[State], dim: int) -> State:
    """Values one after the other along ``dim``."""
    axes = {batch_axis(s) for s in states}
    if dim not in axes:
        return linear(states)
    rows = [s for s in states if isinstance(s, Rows)]
    if axes != {dim} or len(rows) < len(states):
        raise Refuse("puts rows of the batch beside something else along the batch")
    if len({(s.inner, s.power) for s in rows}) != 1:
        raise Refuse("joins groups of rows of different size along the batch")
    return Rows(dim, sum(s.outer for s in rows), rows[0].inner, rows[0].power)


Place = int | Hashable
"""Where a dimension of a factor is: an axis of the result, or a letter of the sum it is in."""


def contraction(
    left: State, right: State, places: tuple[Sequence[Place], Sequence[Place]], origin: SummedBy
) -> State:
    """A product of two factors, summed over dimensions that they share.

    Args:
        left: A factor.
        right: A factor.
        places: For each dimension of each factor its place; None where it is neither (a window slides
            along it).
        origin: The operator.
    """
    kept: list[State] = []
    letters: list[tuple[Place, Rows]] = []
    for state, where in zip((left, right), places, strict=True):
        if isinstance(state, Position):
            raise Refuse(POSITION)
        if not isinstance(state, Rows):
            kept.append(state)
            continue
        place = where[state.axis]
        if place is None:
            raise Refuse("slides a window along the batch")
        if isinstance(place, int):
            kept.append(moved(state, place))
        else:
            letters.append((place, state))
    if not letters:
        return product(*kept)
    if len(letters) == 1:
        raise Refuse(
            "multiplies rows of the batch with other rows of it"
            if any(isinstance(s, Rows) for s in kept)
            else "pairs rows of the batch with elements that are no rows"
        )
    (first, a), (second, b) = letters
    if first != second:
        raise Refuse("multiplies rows of the batch with other rows of it")
    paired = product(replace(a, axis=0), replace(b, axis=0))
    return Partial(paired.power if isinstance(paired, Rows) else 0, origin)
