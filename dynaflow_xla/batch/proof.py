"""The proof that a function can run nano-batch by nano-batch, and what it says when it cannot.

A frontend gives each value a state (``batch.states``); here the states of the outputs are held
against how the outputs are to be merged, and the outcome becomes a :class:`Proof`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from dynaflow_xla.batch.states import (
    Late,
    Mixed,
    Obstacle,
    Partial,
    Rows,
    Same,
    State,
    Unknown,
    is_plain_same,
    is_zero,
)
from dynaflow_xla.errors import PlanError, SeparabilityError

Status = Literal["separable", "mixed", "unproven"]


@dataclass(frozen=True, slots=True)
class Sum:
    """For ``out_axes``: the output is the sum of the nano-batches' outputs."""

    def __repr__(self) -> str:
        return "dfx.Sum()"


@dataclass(frozen=True, slots=True)
class Mean:
    """For ``out_axes``: the output is the mean of the nano-batches' outputs, weighted by their sizes."""

    def __repr__(self) -> str:
        return "dfx.Mean()"


OutAxis: TypeAlias = int | Sum | Mean | None


@dataclass(frozen=True, slots=True)
class OutputProof:
    """What is proved of one output.

    Attributes:
        index: Its number among the flat outputs.
        state: Its state.
        wanted: How it is to be merged: an axis, ``Sum()``, ``Mean()``, or None (take any nano-batch's).
        status: "separable" if merging so gives the original's value.
        finding: Why not.
        suggestion: A merge that its state allows, if ``wanted`` is not it.
        name: What it is to the user, where that is not the result with this number.
    """

    index: int
    state: State
    wanted: OutAxis
    status: Status
    finding: Obstacle | None = None
    suggestion: str = ""
    name: str = ""

    @property
    def told(self) -> str:
        """What a message calls it."""
        return self.name or f"output {self.index}"


@dataclass(frozen=True)
class Proof:
    """The outcome for one function, one batch size and the nano-batch sizes it was traced at.

    Attributes:
        name: Name of the function.
        batch: Rows of the whole batch.
        sizes: Sizes of nano-batches that were traced; the proof holds for splits into these.
        states: State of each value of the captured graph, by value id.
        outputs: One entry for each flat output.
        findings: The operators to blame for outputs that are not separable, each once.
        effects: Operators with effects: split, they would run once for each nano-batch.
    """

    name: str
    batch: int
    sizes: tuple[int, ...]
    states: tuple[State, ...]
    outputs: tuple[OutputProof, ...]
    findings: tuple[Obstacle, ...] = ()
    effects: tuple[Obstacle, ...] = ()

    @property
    def status(self) -> Status:
        """The worst status of an output; effects make it at best "unproven"."""
        found = {output.status for output in self.outputs}
        if "mixed" in found:
            return "mixed"
        return "unproven" if "unproven" in found or self.effects else "separable"

    def as_unproven(self) -> Proof:
        """The same with what is refused as not proved."""
        outputs = tuple(
            replace(o, status="unproven") if o.status == "mixed" else o for o in self.outputs
        )
        return replace(self, outputs=outputs)

    def not_joined(self, because: Obstacle | None) -> Proof:
        """The same, where what mixes rows could run once but for another operator."""
        if because is None:
            return self
        why = f"; it is not joined, because of {because}"
        outputs = tuple(
            replace(o, finding=replace(o.finding, reason=o.finding.reason + why))
            if o.status == "mixed" and o.finding is not None
            else o
            for o in self.outputs
        )
        return replace(self, outputs=outputs)

    def raise_if_refused(self, *, allow_unproven: bool = False) -> None:
        """Raises unless every output is proved.

        Args:
            allow_unproven: Let pass what no rule covers (for callers who then compare numerically).

        Raises:
            SeparabilityError: names the operators, their lines and the ways out.
        """
        bad = [o for o in self.outputs if o.status != "separable"]
        if allow_unproven:
            bad = [o for o in bad if o.status == "mixed"]
        effects = () if allow_unproven else self.effects
        if bad or effects:
            raise SeparabilityError(self._message(bad, effects))

    def _message(self, bad: Sequence[OutputProof], effects: Sequence[Obstacle]) -> str:
        # One line for each cause; a cause often spoils many outputs.
        causes: dict[Obstacle, list[str]] = {}
        for output in bad:
            if output.finding is not None:
                causes.setdefault(output.finding, []).append(output.told)
        hints = dict.fromkeys(f"for {o.told}: {o.suggestion}" for o in bad if o.suggestion)
        proven_bad = any(o.status == "mixed" for o in bad)
        return refusal(
            self.name, self.batch, self.sizes, causes, proven=proven_bad, effects=effects,
            hints=tuple(hints),
        )  # fmt: skip

    def __str__(self) -> str:
        head = f"{self.name}: batch {self.batch} into {self.sizes}: {self.status}"
        rows = [f"  output {o.index}: {o.state} -> {o.wanted}: {o.status}" for o in self.outputs]
        return "\n".join([head, *rows, *(f"  {f}" for f in (*self.findings, *self.effects))])


def refusal(
    name: str,
    batch: int,
    sizes: Sequence[int],
    causes: Mapping[Obstacle, Sequence[str]],
    *,
    proven: bool = True,
    effects: Sequence[Obstacle] = (),
    hints: Sequence[str] = (),
) -> str:
    """The message of a refused split: what is to blame, and the ways out that help there.

    Args:
        name: Of the function.
        batch: Rows of the whole batch.
        sizes: Of the nano-batches.
        causes: What is to blame, each with the outputs that it spoils.
        proven: Whether some of it is known to be wrong, or all is only not proved.
        effects: What would happen once for each nano-batch.
        hints: Merges that would do, in words.
    """
    verb = "cannot be split" if proven else "is not proved to be splittable"
    lines = [f"{name!r} {verb} into nano-batches (batch of {batch} into {_list(sizes)}):"]
    for finding, outputs in causes.items():
        named = dict.fromkeys(outputs)
        numbers = [x.removeprefix("output ") for x in named if x.startswith("output ")]
        more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
        plural = "s" if len(numbers) > 1 else ""
        parts = [f"output{plural} {', '.join(numbers[:8])}{more}"] if numbers else []
        parts += [x for x in named if not x.startswith("output ")]
        spoiled = f" ({'; '.join(parts)})" if parts else ""
        lines.append(f"  {finding}{spoiled}")
    lines += [f"  {finding}" for finding in effects]
    lines.append("Ways out:")
    lines += [f"  - {way}" for way in (*hints[:8], *_ways_out(causes, effects, bool(hints)))]
    return "\n".join(lines)


def _ways_out(
    causes: Iterable[Obstacle], effects: Sequence[Obstacle], hinted: bool
) -> Iterable[str]:
    """What helps against these causes, beside the merges that were found."""
    if not hinted and any(finding.total for finding in causes):
        yield (
            "if the sum or the mean over the batch is what you want, return it: "
            "out_axes=dfx.Sum() or out_axes=dfx.Mean() for that output"
        )
    if any(kind in str(finding) for finding in causes for kind in _COLLECTIVES):
        yield (
            "let the collective work along another axis than the batch's, or split another axis: "
            "in_axes"
        )
    yield "exclude the region from the split: apply it outside the scheduled function"
    if effects or not all(finding.final for finding in causes):
        yield (
            "if you know that rows are independent all the same, tell the strategy: "
            "dfx.NanoBatch(2, assume_separable=True)"
        )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


_COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "psum_scatter", "ppermute")


def _allowed(state: State) -> dict[str, OutAxis]:
    """Merges that give the original's value, each with how to ask for it; best first."""
    allowed: dict[str, OutAxis] = {}
    if isinstance(state, Rows) and (state.power == 0 or is_zero(state)):
        if state.outer == 1 or state.fill is not None:
            allowed[f"out_axes={state.axis}"] = state.axis
    elif isinstance(state, Same):
        if is_plain_same(state):
            allowed["out_axes=None"] = None
            allowed["out_axes=dfx.Mean()"] = Mean()
        if state.power == 1 or is_zero(state):
            allowed["out_axes=dfx.Sum()"] = Sum()
    elif isinstance(state, Partial) and state.power in (0, -1):
        spec: OutAxis = Mean() if state.power else Sum()
        allowed[f"out_axes={spec!r}"] = spec
    elif isinstance(state, Late):
        # Its value is the original's, whatever total of the batch it is called.
        allowed["out_axes=dfx.Mean()"] = Mean()
        allowed["out_axes=dfx.Sum()"] = Sum()
        allowed["out_axes=None"] = None
    return allowed


def mergers(state: State) -> tuple[OutAxis, ...]:
    """The ``out_axes`` entries under which an output of this state gets the original's value."""
    return tuple(_allowed(state).values())


def _mismatch(state: State) -> str:
    if isinstance(state, Rows):
        if state.power:
            return f"its rows scale with the batch size (batch**{state.power})"
        if state.outer != 1:
            return (
                f"axis {state.axis} holds {state.outer} runs of the batch one after another: "
                "concatenating nano-batches would give another order"
            )
        return f"it has one entry for each row of the batch, along axis {state.axis}"
    if isinstance(state, Partial):
        if state.power in (0, -1):
            return f"it is a {'mean' if state.power else 'sum'} over the batch"
        return f"it is a sum over the batch times batch**{state.power}"
    if isinstance(state, Same):
        if state.power:
            return f"it scales with the batch size (batch**{state.power})"
        return "it does not depend on the batch"
    if isinstance(state, Late):
        return f"it is computed from a total over the batch ({state.origin})"
    return "it holds positions in the batch"


def prove_output(
    index: int, state: State, wanted: OutAxis, *, rank: int, inexact: bool, made_by: Obstacle
) -> OutputProof:
    """Holds an output's state against how it is to be merged.

    Args:
        index: Number of the output.
        state: Its state.
        wanted: The merge asked for.
        rank: Number of its dimensions (negative axes count from the end).
        inexact: Whether it has a floating point or complex type, as a mean must.
        made_by: The operator that makes it, for the message.
    """
    if isinstance(state, Mixed):
        return OutputProof(index, state, wanted, "mixed", state.finding, "")
    if isinstance(state, Unknown):
        return OutputProof(index, state, wanted, "unproven", state.finding, "")
    axis = wanted + rank if isinstance(wanted, int) and wanted < 0 else wanted
    allowed = _allowed(state)
    if not inexact and not isinstance(state, Late):
        allowed = {k: v for k, v in allowed.items() if not isinstance(v, Mean)}
    if axis in allowed.values():
        return OutputProof(index, state, wanted, "separable")
    reason = f"{_mismatch(state)}, so it cannot be merged by out_axes={wanted!r}"
    total = isinstance(state, Partial)
    finding = Obstacle("mixed", made_by.op, reason, made_by.source, made_by.scope, total)
    return OutputProof(index, state, wanted, "mixed", finding, next(iter(allowed), ""))


def batch_of(
    name: str, found: Iterable[tuple[str, Sequence[int], int]]
) -> tuple[list[int], int, str]:
    """The batch that arguments have in common.

    Args:
        name: Of the function.
        found: What an argument is called, its shape and its batch axis, for each that has one.

    Returns:
        The axes, counted from the front; the number of rows; an argument with that many, in words.

    Raises:
        PlanError: an axis is out of range, no argument has one, or the numbers of rows differ.
    """
    axes: list[int] = []
    rows: dict[int, str] = {}
    for where, shape, axis in found:
        if not -len(shape) <= axis < len(shape):
            raise PlanError(
                f"{name!r}: the batch axis of {where} must be an axis of its shape {list(shape)}; got "
                f"{axis}. Use None in in_axes for what has no batch."
            )
        axes.append(axis % len(shape))
        rows.setdefault(shape[axis], f"{where} {list(shape)} along axis {axis}")
    if not rows:
        raise PlanError(
            f"{name!r}: in_axes names no argument with a batch. Name those that have one, by parameter "
            "name (in_axes={'x': 0}) or by place, or give in_axes=0 where all have"
        )
    if len(rows) > 1:
        each = "; ".join(f"{n} in {where}" for n, where in rows.items())
        raise PlanError(
            f"{name!r}: all batched arguments must have the same number of rows; got {each}"
        )
    ((batch, where),) = rows.items()
    return axes, batch, where
