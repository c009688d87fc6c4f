"""How a value of the whole batch follows from the same value of the nano-batches.

A *trace* is the program at one batch size. For a value that is ``V`` in the trace of the whole batch
(size ``B``) and ``v_i`` in the trace of nano-batch ``i`` (size ``b_i``, the ``b_i`` sum to ``B``), a
state is a proved statement about ``V`` and the ``v_i``. The functions below give the state of a result
from the states of its operands; they raise :class:`Refuse` where no statement would be true. They
know no framework: what an operator means is its frontend's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from dynaflow_xla.ir import Source

Verdict = Literal["mixed", "unproven"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Why something is not proved separable.

    Attributes:
        verdict: "mixed": the operator combines rows of different nano-batches, or depends on the batch
            size; "unproven": no rule says what the operator does to the batch.
        op: Kind of the operator.
        reason: A plain sentence.
        source: Its line in the user's program.
        scope: Its name scope, outermost first.
    """

    verdict: Verdict
    op: str
    reason: str
    source: Source | None = None
    scope: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        scope = f" in {'/'.join(self.scope)}" if self.scope else ""
        return f"{self.op}{where}{scope}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Origin:
    """The operator that summed over the batch, for messages."""

    op: str
    source: Source | None
    scope: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op} at {self.source}" if self.source else self.op


class Refuse(Exception):
    """No statement holds: the operator mixes rows, or depends on the batch size.

    Attributes:
        origin: The earlier operator that is to blame, if it is not this one.
    """

    def __init__(self, reason: str, origin: Origin | None = None) -> None:
        super().__init__(reason)
        self.origin = origin


class NoRule(Exception):
    """The rules do not cover this operator, or this use of it."""


@dataclass(frozen=True, slots=True)
class Same:
    """``V == (B / b_i)**power * v_i`` for each i. Power 0: equal in every trace.

    ``fill`` is the value of every element, if known (not for NaN).
    """

    power: int = 0
    fill: Any = None

    def __str__(self) -> str:
        return "same" if not self.power else f"same * batch**{self.power}"


@dataclass(frozen=True, slots=True)
class Rows:
    """One group of ``inner`` elements along ``axis`` for each row of the batch.

    The axis has ``outer * B * inner`` elements, seen as ``[outer, B, inner]``; part i of that B axis,
    ``b_i`` long, equals ``(B / b_i)**power * v_i``. With ``outer == 1``, ``V`` is the ``v_i``
    concatenated along ``axis``. With a ``fill``, any outer and inner of the same product hold.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    power: int = 0
    fill: Any = None

    def __str__(self) -> str:
        parts = [f"axis={self.axis}"]
        parts += [f"{k}={v}" for k in ("outer", "inner") if (v := getattr(self, k)) != 1]
        return f"rows({', '.join(parts)})" + (f" * batch**{self.power}" if self.power else "")


@dataclass(frozen=True, slots=True)
class Partial:
    """``V`` is the sum over i of ``(b_i / B)**(-power) * v_i``: 0 is a sum, -1 a mean by rows."""

    power: int = 0
    origin: Origin | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return {0: "additive", -1: "average"}.get(self.power, f"additive * batch**{self.power}")


@dataclass(frozen=True, slots=True)
class Position:
    """The row's own number in its trace, along ``axis`` (an iota over the batch).

    With ``dim``, only the elements whose index along ``dim`` is in ``coordinates`` are row numbers; the
    others are rows. Good for one thing: addressing the row itself.
    """

    axis: int
    dim: int | None = None
    coordinates: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return f"position(axis={self.axis})"


@dataclass(frozen=True, slots=True)
class Mixed:
    """Depends on the whole batch, or on its size; ``finding`` is the first operator to blame."""

    finding: Finding

    def __str__(self) -> str:
        return f"mixed by {self.finding.op}"


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing is proved."""

    finding: Finding

    def __str__(self) -> str:
        return f"unproven since {self.finding.op}"


State: TypeAlias = Same | Rows | Partial | Position | Mixed | Unknown
SAME = Same()


def is_zero(state: State) -> bool:
    """Whether every element is known to be 0 (such a value fits any power)."""
    return isinstance(state, Same | Rows) and state.fill is not None and bool(state.fill == 0)


def is_plain_same(state: State) -> bool:
    """Equal in every trace."""
    return isinstance(state, Same) and (state.power == 0 or is_zero(state))


def first_failure(states: Iterable[State]) -> Mixed | Unknown | None:
    """The state that all results take over: of the first mixed operand, else the first unknown one."""
    unknown = None
    for state in states:
        if isinstance(state, Mixed):
            return state
        if isinstance(state, Unknown) and unknown is None:
            unknown = state
    return unknown


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
            raise Refuse("computes with the position of a row in the batch")


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
    return rows_of((left, right), _power(left) + _power(right))


def quotient(left: State, right: State) -> State:
    """Elementwise left / right, without rounding to integers."""
    if isinstance(left, Partial) and isinstance(right, Same):
        return Partial(left.power - right.power, left.origin)
    _no_partial((left, right), "divides")
    return rows_of((left, right), _power(left) - _power(right))


def _power(state: State) -> int:
    return state.power if isinstance(state, Same | Rows | Partial) else 0


def reduced_over_batch(state: Rows, origin: Origin) -> State:
    """The sum of all rows."""
    if state.fill is not None and not is_zero(state):
        return Same(state.power + 1)
    return Partial(state.power, origin)


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


def reshaped(state: Rows, old: Sequence[int], new: Sequence[int], batch: int) -> Rows:
    """Where the batch is after a row-major reshape from ``old`` to ``new`` in the trace of ``batch``."""
    before = state.outer
    for size in old[: state.axis]:
        before *= size
    after = state.inner
    for size in old[state.axis + 1 :]:
        after *= size
    lead = 1
    for axis, size in enumerate(new):
        if lead and before % lead == 0:
            outer = before // lead
            inner = size // (outer * batch) if outer and size % (outer * batch) == 0 else 0
            tail = 1
            for n in new[axis + 1 :]:
                tail *= n
            if inner and inner * tail == after:
                return Rows(axis, outer, inner, state.power, state.fill)
        lead *= size
    raise Refuse("reshapes so that rows of the batch are cut or interleaved")
