"""How a value of the whole batch follows from the same value of the nano-batches.

A *trace* is the program at one batch size. For a value that is ``V`` in the trace of the whole batch
(size ``B``) and ``v_i`` in the trace of nano-batch ``i`` (size ``b_i``, the ``b_i`` sum to ``B``), a
state is a proved statement about ``V`` and the ``v_i``. ``algebra``, ``axes`` and ``indexing`` give
the state of a result from the states of its operands; they raise :class:`Refuse` where no statement
would be true. They know no framework: what an operator means is its frontend's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from dynaflow_xla.errors import DynaflowError
from dynaflow_xla.ir.graph import Source, placed

Verdict = Literal["mixed", "unproven"]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why something is not proved separable.

    Attributes:
        verdict: "mixed": the operator combines rows of different nano-batches, or depends on the batch
            size; "unproven": no rule says what the operator does to the batch.
        op: Kind of the operator.
        reason: A plain sentence.
        source: Its line in the user's program.
        scope: Its name scope, outermost first.
        total: It needs a total over the batch that only all nano-batches together have.
        final: It cannot run on a nano-batch at all, whatever anybody vouches for.
    """

    verdict: Verdict
    op: str
    reason: str
    source: Source | None = None
    scope: tuple[str, ...] = ()
    total: bool = False
    final: bool = False

    def __str__(self) -> str:
        scope = f" in {'/'.join(self.scope)}" if self.scope else ""
        return f"{self.op}{placed(self.source)}{scope}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SummedBy:
    """The operator that summed over the batch, for messages."""

    op: str
    source: Source | None
    scope: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}{placed(self.source)}"


class Refuse(Exception):
    """No statement holds: the operator mixes rows, or depends on the batch size.

    Attributes:
        origin: The earlier operator that is to blame, if it is not this one.
        what: What that one does.
        total: It made a total over the batch.
    """

    def __init__(
        self, reason: str, origin: SummedBy | None = None, *, ordered: bool = False
    ) -> None:
        super().__init__(reason)
        self.origin = origin
        self.what = "sorts the batch" if ordered else "combines all rows of the batch"
        self.total = origin is not None and not ordered


class NoRule(Exception):
    """The rules do not cover this operator, or this use of it."""


class BrokenRule(DynaflowError, RuntimeError):
    """A rule failed with an error of its own: a fault in dynaflow_xla, never a verdict."""

    def __init__(self, op: str, source: Source | None, error: Exception) -> None:
        super().__init__(
            f"internal error: the rule that says what {op}{placed(source)} does to the rows of a batch "
            f"failed ({type(error).__name__}: {error}). This is a fault in dynaflow_xla, not in your "
            "program: please report it with this message. Until it is mended, assume_separable=True skips "
            "the proof where you know that rows are independent, and a strategy without a split needs none."
        )


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

    @property
    def runs(self) -> int:
        """How many runs of the batch lie one after the other; 1 where their order tells nothing."""
        # None at all (a repetition of none): then there is nothing to put in order.
        return max(1, self.outer) if self.fill is None else 1

    def __str__(self) -> str:
        parts = [f"axis={self.axis}"]
        parts += [f"{k}={v}" for k in ("outer", "inner") if (v := getattr(self, k)) != 1]
        return f"rows({', '.join(parts)})" + (f" * batch**{self.power}" if self.power else "")


@dataclass(frozen=True, slots=True)
class Partial:
    """``V`` is the sum over i of ``(b_i / B)**(-power) * v_i``: 0 is a sum, -1 a mean by rows."""

    power: int = 0
    origin: SummedBy | None = field(default=None, compare=False)

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
class Counted:
    """Numbers that each trace counts for itself: ``step`` times the row's own, each ``inner`` times.

    Good for one thing: being handed to the operators that a row's elements are counted for.
    """

    axis: int
    step: int = 1
    inner: int = 1

    def __str__(self) -> str:
        return f"counted(axis={self.axis})"


@dataclass(frozen=True, slots=True)
class Late:
    """Computed from totals over the batch (and what is the same in every trace), once these are complete."""

    origin: SummedBy | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return "computed from totals"


@dataclass(frozen=True, slots=True)
class Mixed:
    """Depends on the whole batch, or on its size; ``finding`` is the first operator to blame."""

    finding: Obstacle

    def __str__(self) -> str:
        return f"mixed by {self.finding.op}"


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing is proved."""

    finding: Obstacle

    def __str__(self) -> str:
        return f"unproven since {self.finding.op}"


@dataclass(frozen=True, slots=True)
class Whole:
    """Made for the whole batch only: nano-batches have no part of it. What reads it runs once, too."""

    def __str__(self) -> str:
        return "whole"


# -- rows in an order that data gives ------------------------------------------------------------------
#
# The items of an order are the elements of ``[outer, B, inner]``, ``outer * inner`` for each row, counted in
# that order. An order is one permutation of these numbers for each trace, and nothing else is known of it: a
# nano-batch sorts its own items only, and that need not agree with how the whole batch is sorted. So whether
# a sort is stable tells nothing about the proof; it tells which of equal items comes first, which the sums
# of a scatter feel by their rounding.


@dataclass(frozen=True, eq=False, slots=True)
class Permutation:
    """A permutation of the items of each trace: place ``j`` holds item ``p(j)``; equal to itself only.

    Attributes:
        outer: Runs of the batch among the items.
        inner: Items of a row in each run.
        origin: The operator that sorted.
        key: What the items are sorted by, if it is known.
        placed: Each item is sorted by the element of ``key`` that is at its own place.
    """

    outer: int
    inner: int
    origin: SummedBy
    key: Key | None = None
    placed: bool = False

    @property
    def each(self) -> int:
        """Items of one row."""
        return self.outer * self.inner


@dataclass(frozen=True, eq=False, slots=True)
class Key:
    """Which integers a value holds, not where; equal to itself only.

    Attributes:
        low: None of them is below.
        high: None of them is above.
        base: The keys that these follow from by a function that never decreases.
    """

    low: int | None = None
    high: int | None = None
    base: frozenset[Key] = frozenset()

    def follows(self, other: Key | None) -> bool:
        """Whether what is sorted by ``other`` is sorted by this, too."""
        return other is not None and (other is self or other in self.base)


@dataclass(frozen=True, slots=True)
class Keyed:
    """Rows whose elements are the integers of ``key``; ``placed``: in the order that the key was made for."""

    rows: Rows
    key: Key
    placed: bool = False

    def __str__(self) -> str:
        return str(self.rows)


@dataclass(frozen=True, slots=True)
class InOrder:
    """Place ``j`` along ``rows.axis`` belongs to item ``p(j)`` of ``order``.

    Put back into the order of the items, it is ``rows``, where each item is a row of its own. ``rising``:
    along the places, the only axis that is longer than 1, the integers of ``key`` never decrease.
    """

    order: Permutation
    rows: Rows
    key: Key | None = None
    rising: bool = False

    def __str__(self) -> str:
        return f"{self.rows} in the order of {self.order.origin}"


@dataclass(frozen=True)
class ItemNumbers:
    """Integers that follow from the number of the item alone: ``tables[t][p(j)]`` at place ``j`` in trace t.

    Without an order, place ``j`` is item ``j``. The value is the same along all other axes.
    """

    axis: int
    outer: int
    inner: int
    tables: tuple[np.ndarray, ...] = field(compare=False, repr=False)
    order: Permutation | None = None
    content: bytes = b""

    def __str__(self) -> str:
        return f"numbers of items(axis={self.axis})"


@dataclass(frozen=True, slots=True)
class Inverse:
    """For each item the place that an order gives it; ``rows`` says where the items are.

    Item ``i`` is the ``i``-th element of the value in row-major order.
    """

    order: Permutation
    rows: Rows

    def __str__(self) -> str:
        return f"places in the order of {self.order.origin}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many elements of ``key`` are 0, 1, 2...; with ``upto``, how many are at most that.

    As a number it is a sum over the batch. Each trace has its own, which fit its own items. None of them is
    above ``most``, if that is given.
    """

    key: Key
    origin: SummedBy
    upto: bool = False
    most: int = 0

    def __str__(self) -> str:
        return "sizes of groups of items"


@dataclass(frozen=True, slots=True)
class Below:
    """How many elements of ``key`` are below known bounds, added up and subtracted.

    Element ``j`` is the sum over ``(bound, times)`` in ``terms[j]`` of ``times`` as often as an element is
    below ``bound``. As a number it is a sum over the batch. Without terms it is a place among sorted
    integers, of which nothing is said.
    """

    key: Key
    origin: SummedBy
    terms: tuple[tuple[tuple[int, int], ...], ...] | None

    def __str__(self) -> str:
        return "numbers of items below bounds"


@dataclass(frozen=True, slots=True)
class Listed:
    """Integers that are known one by one in each trace, of at most one dimension; ``plain`` says the rest."""

    values: tuple[tuple[int, ...], ...]
    plain: Same

    def __str__(self) -> str:
        return str(self.plain)


State: TypeAlias = (
    Same | Rows | Partial | Position | Counted | Late | Mixed | Unknown
    | InOrder | ItemNumbers | Inverse | Keyed | Sizes | Below | Listed | Whole
)  # fmt: skip
SAME = Same()


def is_zero(state: State) -> bool:
    """Whether every element is known to be 0 (such a value fits any power)."""
    return isinstance(state, Same | Rows) and state.fill is not None and bool(state.fill == 0)


def is_plain_same(state: State) -> bool:
    """Equal in every trace."""
    if isinstance(state, Listed):
        state = state.plain
    return isinstance(state, Same) and (state.power == 0 or is_zero(state))


def plainly_same(states: Sequence[State]) -> frozenset[int]:
    """Numbers of the states of values that are equal in every trace."""
    return frozenset(n for n, state in enumerate(states) if is_plain_same(state))


def first_failure(states: Iterable[State]) -> Mixed | Unknown | None:
    """The state that all results take over: of the first mixed operand, else the first unknown one."""
    unknown = None
    for state in states:
        if isinstance(state, Mixed):
            return state
        if isinstance(state, Unknown) and unknown is None:
            unknown = state
    return unknown


def power_of(state: State) -> int:
    """The power of the batch size that a state carries; 0 for those that carry none."""
    return state.power if isinstance(state, Same | Rows | Partial) else 0


def as_rows(state: State) -> State:
    """The state without what is known of integers: what says how nano-batches make up the whole."""
    if isinstance(state, Keyed):
        return state.rows
    return state.plain if isinstance(state, Listed) else state


def cotangent(state: State) -> State:
    """How a cotangent follows from those of the nano-batches: it is cut where the value was merged.

    Each nano-batch has its share of what all of them read, and all have the whole of a sum's.
    """
    if isinstance(state, Same):
        return Partial()
    return Same() if isinstance(state, Partial) else unfilled(state)


def batch_axis(state: State) -> int | None:
    """The axis along which a state has rows."""
    return state.axis if isinstance(state, Rows | Position) else None


ORDERED = InOrder | ItemNumbers | Inverse | Keyed | Sizes | Below | Listed
"""States that only rules which ask for them understand; others get :func:`orders.plain` of them."""


def moved(state: State, axis: int) -> State:
    """The state with its rows along another axis.

    Raises:
        Refuse: they are coordinates of elements, which belong where they are.
    """
    if isinstance(state, Position) and state.dim is not None:
        raise Refuse(POSITION)
    return replace(state, axis=axis) if isinstance(state, Rows | Position) else state


def unfilled(state: State) -> State:
    """The state without a known value of all elements."""
    return replace(state, fill=None) if isinstance(state, Same | Rows) else state


def scaled(state: State, power: int) -> State:
    """The state with another power of the batch size, and without a known value."""
    return replace(state, power=power, fill=None) if isinstance(state, Same | Rows) else state


POSITION = "computes with the position of a row in the batch"
