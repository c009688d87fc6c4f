"""Joins: what mixes rows runs once, on the rows put together again, and what follows is split again.

While a proof goes through a program, a :class:`Joiner` gives it a way on where an operator has no state.
If it needs totals over the batch before they are complete, these are completed: added up over the
nano-batches, and the same in all from there on. Else the operator itself runs once, on whole operands. A
result with the batch along an axis is cut there: its nano-batches *are* these rows, by definition; one
without a batch is shared; any other exists for the whole batch only, and what reads it runs once, too.
So each statement of the proof stays a statement about the original's own values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynaflow_xla.batch.states import (
    Mixed,
    Obstacle,
    Partial,
    Position,
    Rows,
    Same,
    State,
    Unknown,
    Whole,
    as_rows,
    is_plain_same,
    is_zero,
)
from dynaflow_xla.ir.graph import Graph, Operator
from dynaflow_xla.ir.phases import Phases
from dynaflow_xla.ir.rules import Rule, check_matches

INEXACT = ("float", "bfloat", "complex")

Shapes = Callable[[int], Sequence[tuple[int, ...]]]
"""For a value its shape in the trace of the whole batch, then in those of the nano-batches."""


@dataclass(frozen=True)
class Wanted:
    """What a strategy wants of joins.

    Attributes:
        allowed: Whether an operator that mixes rows may run once; else it refuses the split.
        only: Rules of what is split, all else running once; None: all that can be.
        join: Rules of what runs once although it could be split.
    """

    allowed: bool = True
    only: tuple[Rule, ...] | None = None
    join: tuple[Rule, ...] = ()

    @property
    def chosen(self) -> bool:
        """Whether some operators are to run once whatever is proved."""
        return self.only is not None or bool(self.join)

    def forced(self, graph: Graph) -> dict[int, str]:
        """The operators that are to run once, with the rule that says so.

        Raises:
            RuleError: a rule matches nothing.
        """
        made: dict[int, str] = {}
        if self.only is not None:
            split = {i for rule in self.only for i in _matched(rule, graph)}
            texts = ", ".join(rule.text() for rule in self.only)
            made.update((op.index, f"all but {texts}: only that is split") for op in graph.ops)
            made = {index: text for index, text in made.items() if index not in split}
        for rule in self.join:
            made.update((i, f"{rule.text()}: the strategy joins it") for i in _matched(rule, graph))
        return made


def _matched(rule: Rule, graph: Graph) -> list[int]:
    return [index for _, ops in check_matches(rule, graph) for index in ops]


AUTOMATIC = Wanted()


@dataclass(frozen=True)
class Joining:
    """What runs once for all nano-batches.

    Attributes:
        once: Value that an operator makes which runs once -> why.
        copies: Such a value -> values that its operator needs of the whole batch although they cannot be
            put together: it makes them for itself.
        completed: Totals that are complete before they are read: value -> its state until then.
        states: For each value what is known of it, as its readers see it.
        reasons: Sentences for ``explain``, one a cause.
    """

    once: Mapping[int, str]
    copies: Mapping[int, frozenset[int]]
    completed: Mapping[int, State] = field(default_factory=dict)
    states: Sequence[State] = ()
    reasons: tuple[str, ...] = ()

    def state(self, value: int) -> State:
        """How a value of nano-batches makes up the whole batch's."""
        return self.completed.get(value, self.states[value])

    def phases(self, graph: Graph) -> Phases:
        """In which order the operators of a graph with these values follow each other."""
        once: dict[int, str] = {}
        copies: dict[int, frozenset[int]] = {}
        phase: dict[int, int] = {}
        for op in graph.ops:
            mine = [v for v in op.outputs if v in self.once or isinstance(self.states[v], Whole)]
            reads = {*op.inputs}
            if mine:
                once[op.index] = self.once.get(mine[0], "")
                more = {v for m in mine for v in self.copies.get(m, ())}
                copies[op.index] = frozenset(graph.values[v].producer for v in more) - {-1}
                reads |= {v for index in copies[op.index] for v in graph.ops[index].inputs}
            most = 0
            for value in reads:
                producer = graph.values[value].producer
                if producer >= 0:
                    crosses = (producer in once) != bool(mine) or value in self.completed
                    most = max(most, phase[producer] + crosses)
            phase[op.index] = most
        # Operators that run once and others never share a phase.
        of = {index: 2 * n + (index in once) for index, n in phase.items()}
        return Phases(of, once, copies)


class Joiner:
    """Decides, operator by operator in program order, what runs once.

    Args:
        graph: The function at full size.
        shapes: See ``Shapes``.
        sizes: Rows of the batch in each trace, the whole batch first.
        forced: Operators that a strategy wants to run once, with its reason.
        completed: Totals to complete where they are made.
        numbers: Values that are no arrays: each size of the graph has its own.
    """

    def __init__(
        self,
        graph: Graph,
        shapes: Shapes,
        sizes: Sequence[int],
        forced: Mapping[int, str] | None = None,
        completed: frozenset[int] = frozenset(),
        numbers: Collection[int] = (),
    ) -> None:
        self.graph, self.shapes, self.sizes = graph, shapes, tuple(sizes)
        self.numbers = numbers
        self.forced = forced or {}
        self.early = completed
        self.states: dict[int, State] = dict.fromkeys(graph.inputs, Same())
        self.once: dict[int, str] = {}
        self.causes: dict[str, None] = {}
        self.copies: dict[int, frozenset[int]] = {}
        self.completed: dict[int, State] = {}
        self.read_in_parts: set[int] = set()
        self.again: set[int] = set()
        """Totals that were read in parts before it was clear that they must be complete."""

    def start(self, states: Mapping[int, State]) -> None:
        """What is known of the graph's inputs."""
        self.states.update(states)

    def step(self, op: Operator, attempt: Callable[[], tuple[list[State], bool]]) -> list[State]:
        """The states of an operator's results.

        Args:
            op: The operator.
            attempt: Applies its rule to ``states``: a state for each of ``op.outputs``, and whether the
                operator can run once where it fails (not if something inside of it is to blame).
        """
        made = self._step(op, attempt)
        for value, state in zip(op.outputs, made, strict=True):
            if value in self.early and isinstance(state, Partial):
                self.completed[value] = state
                state = Same()
            self.states[value] = state
        return [self.states[v] for v in op.outputs]

    def _step(self, op: Operator, attempt: Callable[[], tuple[list[State], bool]]) -> list[State]:
        reads = {v: self.states[v] for v in op.inputs if v not in self.numbers}
        if any(isinstance(s, Whole) for s in reads.values()):
            mixed = Obstacle("mixed", op.kind, "reads what only the whole batch has", op.source)
            made = self._join(op, "")
            return [Mixed(mixed)] * len(op.outputs) if made is None else made
        made, movable = attempt()
        failure = next((s.finding for s in made if isinstance(s, Mixed | Unknown)), None)
        if any(isinstance(s, Mixed | Unknown) for s in reads.values()):
            return made  # to blame is an operator that could not be joined
        if failure is None:
            if (why := self.forced.get(op.index)) and not all(map(is_plain_same, made)):
                return self._join(op, why) or made
            self.read_in_parts |= reads.keys()
            return made
        totals = {v: s for v, s in reads.items() if isinstance(s, Partial)}
        if totals:
            self.states.update(dict.fromkeys(totals, Same()))
            second, _ = attempt()
            if not any(isinstance(s, Mixed | Unknown) for s in second):
                self._complete(totals, op, failure)
                return second
            self.states.update(totals)
        if not movable:
            loop = f"; inside of the loop {op.kind}{op.at} it would run once a round, so it is not joined"
            inside = replace(failure, reason=f"{failure.reason}{loop}")
            return [type(s)(inside) if isinstance(s, Mixed | Unknown) else s for s in made]
        joined = self._join(op, f"{op.kind}{op.at}: {_bare(failure, op)}")
        return made if joined is None else joined

    def _complete(self, totals: Mapping[int, State], op: Operator, failure: Obstacle) -> None:
        for value, state in totals.items():
            self.completed[value] = state
            if value in self.read_in_parts:
                self.again.add(value)
            producer = self.graph.values[value].producer
            made = self.graph.ops[producer] if producer >= 0 else op
            text = f"{made.kind}{made.at}: its total is completed for {op.kind}{op.at}"
            self.causes.setdefault(text)

    def _join(self, op: Operator, why: str) -> list[State] | None:
        """Runs an operator once; None if what it reads cannot be had for the whole batch."""
        if op.outer:
            return None  # effects, callbacks, collectives: what to do instead is the user's to say
        copies: set[int] = set()
        if not all(self._whole(v, copies) for v in op.inputs):
            return None
        self.once[op.index] = why
        self.copies[op.index] = frozenset(v for i in copies for v in self.graph.ops[i].outputs)
        if why:
            self.causes.setdefault(why)
        return [defined(self.shapes(v), self.sizes) for v in op.outputs]

    def _whole(self, value: int, copies: set[int]) -> bool:
        """Whether the whole batch's value can be had; adds the operators to be repeated for it."""
        if value in self.numbers:
            return True
        producer = self.graph.values[value].producer
        state = self.completed.get(value, self.states[value])
        if producer in self.once or producer in copies:
            return True
        if isinstance(state, Whole) or completes(state, self.graph.values[value].dtype):
            return True
        if producer < 0:
            return False
        op = self.graph.ops[producer]
        if isinstance(state, Mixed | Unknown) or op.once or op.outer:
            return False
        copies.add(producer)
        return all(self._whole(v, copies) for v in op.inputs)

    def is_whole(self, value: int) -> bool:
        """Whether the whole batch's value is there: of an operator that runs once, or completed."""
        return value in self.completed or self.graph.values[value].producer in self.once

    def can_be_whole(self, value: int) -> bool:
        """Whether the whole batch's value is there, or can be put together."""
        return self.is_whole(value) or (
            isinstance(self.states[value], Whole)
            or completes(self.states[value], self.graph.values[value].dtype)
        )

    def joining(self) -> Joining:
        """What was decided."""
        ops = [(self.graph.ops[index], why) for index, why in self.once.items()]
        return Joining(
            {v: why for op, why in ops for v in op.outputs},
            {
                v: self.copies[op.index]
                for op, _ in ops
                for v in op.outputs
                if self.copies[op.index]
            },
            self.completed,
            tuple(as_rows(self.states.get(v.id, Same())) for v in self.graph.values),
            tuple(f"joined: {text}" for text in self.causes),
        )


def defined(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> State:
    """How nano-batches' values are taken from a whole one: by shapes in all traces, the whole's first."""
    whole = shapes[0]
    if all(shape == whole for shape in shapes):
        return Same()
    if any(len(shape) != len(whole) for shape in shapes) or not math.prod(whole):
        return Whole()
    (axis, *others) = [a for a in range(len(whole)) if any(s[a] != whole[a] for s in shapes)]
    each = whole[axis] // sizes[0]
    fits = each and all(s[axis] == n * each for s, n in zip(shapes, sizes, strict=True))
    return Whole() if others or not fits else Rows(axis, 1, each)


def completes(state: State, dtype: str) -> bool:
    """Whether nano-batches' values of a state can be put together to the whole batch's."""
    state = as_rows(state)
    if isinstance(state, Position):
        return state.dim is None  # each nano-batch counts its rows from 0
    if not isinstance(state, Rows | Same | Partial):
        return False
    power = 0 if is_zero(state) else state.power
    return not power or dtype.startswith(INEXACT)


def weights(state: State, sizes: Sequence[int]) -> tuple[float, ...]:
    """What nano-batches' values are multiplied with before they are put together; () if not at all."""
    batch = sum(sizes)
    if isinstance(state, Partial):
        return tuple((size / batch) ** -state.power for size in sizes)
    if isinstance(state, Rows | Same) and state.power and not is_zero(state):
        return tuple((batch / size) ** state.power for size in sizes)
    return ()


def _bare(failure: Obstacle, op: Operator) -> str:
    """The reason without the place, if that is the operator itself."""
    if failure.op == op.kind and failure.source == op.source:
        return failure.reason
    return str(failure)
