"""States of results that follow element by element: sums, products, functions, choices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynaflow_xla.batch.states import (
    POSITION,
    Partial,
    Position,
    Refuse,
    Rows,
    Same,
    State,
    first_failure,
    is_zero,
    power_of,
    scaled,
)


def common_power(states: Sequence[State]) -> int:
    """The power that all values share; zeros fit any."""
    powers = {s.power for s in states if isinstance(s, Same | Rows) and not is_zero(s)}
    if len(powers) > 1:
        raise Refuse("combines values that scale differently with the batch size")
    return powers.pop() if powers else 0


def _no_partial(states: Iterable[State], what: str) -> None:
    for state in states:
        if isinstance(state, Partial):
            raise Refuse(f"{what} a total over the batch, before it is complete", state.origin)


def _no_position(states: Iterable[State]) -> None:
    for state in states:
        if isinstance(state, Position):
            raise Refuse(POSITION)


def rows_of(states: Sequence[State], power: int) -> State:
    """Elementwise on operands of one shape (or broadcast to it): all rows stay where they are."""
    _no_partial(states, "needs")
    _no_position(states)
    rows = [s for s in states if isinstance(s, Rows)]
    if not rows:
        return Same(power)
    if len({s.axis for s in rows}) > 1:
        raise Refuse("combines every row of the batch with every other row")
    layouts = {(s.outer, s.inner) for s in rows if s.fill is None}
    if len(layouts) > 1:
        raise Refuse("combines rows of the batch that are laid out in different orders")
    outer, inner = layouts.pop() if layouts else (rows[0].outer, rows[0].inner)
    return Rows(rows[0].axis, outer, inner, power)


def nonlinear(states: Sequence[State]) -> State:
    """Any elementwise function."""
    _no_partial(states, "applies a nonlinear function to")
    for state in states:
        if isinstance(state, Same | Rows) and state.power and not is_zero(state):
            raise Refuse("applies a nonlinear function to a value that scales with the batch size")
    return rows_of(states, 0)


def homogeneous(states: Sequence[State], degree: int = 1) -> State:
    """Elementwise f with f(c x) = c**degree f(x) for c > 0 (max, abs; comparisons have degree 0)."""
    _no_partial(states, "applies a nonlinear function to")
    return rows_of(states, degree * common_power(states))


def linear(states: Sequence[State]) -> State:
    """Sums, differences and joins of operands."""
    totals = [s for s in states if isinstance(s, Partial)]
    if not totals:
        return rows_of(states, common_power(states))
    _no_position(states)
    power = totals[0].power
    for state in states:
        if isinstance(state, Rows) and not is_zero(state):
            raise Refuse("combines rows with a total over the batch", totals[0].origin)
        if isinstance(state, Partial) and state.power != power:
            raise Refuse("adds a sum over the batch to a mean over the batch", totals[0].origin)
        # The parts of a constant c would add up to more than c, those of (b_i / B) * c do not.
        if isinstance(state, Same) and not is_zero(state) and state.power != power + 1:
            raise Refuse(
                "adds a constant to a sum over the batch: each nano-batch would add it once",
                totals[0].origin,
            )
    return totals[0]


def product(left: State, right: State) -> State:
    """Bilinear functions: products, contractions over other axes than the batch's."""
    for total, other in ((left, right), (right, left)):
        if isinstance(total, Partial):
            if not isinstance(other, Same):
                raise Refuse(
                    "multiplies a total over the batch, before it is complete", total.origin
                )
            return Partial(total.power + other.power, total.origin)
    return rows_of((left, right), power_of(left) + power_of(right))


def quotient(left: State, right: State) -> State:
    """Elementwise left / right, without rounding to integers."""
    if isinstance(left, Partial) and isinstance(right, Same):
        return Partial(left.power - right.power, left.origin)
    _no_partial((left, right), "divides")
    return rows_of((left, right), power_of(left) - power_of(right))


def join(left: State, right: State) -> State:
    """A statement true of both (alternatives of a branch, a loop's carry before and after)."""
    if left == right:
        return left
    failure = first_failure((left, right))
    if failure is not None:
        return failure
    if isinstance(left, Same) and isinstance(right, Same) and left.power == right.power:
        return Same(left.power)
    return linear((left, right))


def chosen(which: State, cases: Sequence[State]) -> State:
    """A choice among cases, made for each element or for all."""
    if isinstance(which, Same) and (which.power == 0 or is_zero(which)):
        return linear(cases)
    if any(isinstance(case, Partial) for case in cases):
        return nonlinear([which, *cases])
    chooser, picked = nonlinear([which]), homogeneous(cases)
    return scaled(nonlinear([chooser, scaled(picked, 0)]), power_of(picked))


def gradient(incoming: State, others: Iterable[State]) -> State:
    """What is linear in an incoming gradient, and any function of the other operands."""
    return product(incoming, nonlinear(list(others)))
