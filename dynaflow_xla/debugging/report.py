"""What ``debug`` and ``check_determinism`` return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dynaflow_xla.errors import VerificationError
from dynaflow_xla.ir.partitioned import PartitionedGraph

Kind = Literal["changed", "unwritten", "late write", "failed", "deadlock"]

_TEXTS: dict[Kind, str] = {
    "changed": "made another result than in the serial run",
    "unwritten": "read memory that did not hold its input",
    "late write": "wrote to its result after it had ended",
    "failed": "raised, and did not in the serial run",
    "deadlock": "cannot go on",
}


@dataclass(frozen=True)
class RegionName:
    """A region as messages name it.

    Attributes:
        region: Its name.
        lane: Where it ran; -1 in the outer program.
        operators: Their kinds, in order.
        source: The user's file and line, "" if unknown.
    """

    region: str
    lane: int
    operators: tuple[str, ...] = ()
    source: str = ""

    def __str__(self) -> str:
        where = "the outer program" if self.lane < 0 else f"lane {self.lane}"
        shown = ", ".join(self.operators[:6]) + (", ..." if len(self.operators) > 6 else "")
        text = f"region {self.region!r} on {where}"
        text += f" ({shown})" if shown else ""
        return text + (f" from {self.source}" if self.source else "")


def place(pg: PartitionedGraph, region: int, lane: int) -> RegionName:
    """A region of a partitioned graph, on a lane."""
    found = pg.regions[region]
    operators = tuple(pg.graph.ops[i].kind for i in found.ops)
    return RegionName(
        found.name, lane, operators, "" if found.source is None else str(found.source)
    )


@dataclass(frozen=True)
class Finding:
    """The first thing that was wrong.

    Attributes:
        kind: ``changed`` (another result than in the serial run), ``unwritten`` (it read memory before its
            input was written there, or after something else was), ``late write``, ``failed``,
            ``deadlock``.
        place: The region.
        trial: What kind of round it was.
        round: Its number, from 1.
        seed: Of that round.
        detail: A sentence.
    """

    kind: Kind
    place: RegionName
    trial: str
    round: int
    seed: int
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.place} {_TEXTS[self.kind]}"
        text += f": {self.detail}" if self.detail else ""
        return f"{text} (round {self.round}, {self.trial}, seed {self.seed})"


@dataclass(frozen=True)
class DebugReport:
    """Result of ``debug``.

    Attributes:
        name: Of the function.
        regions: How many regions were compared in each round.
        rounds: Kind of round -> how many there were.
        values: How many values of regions were compared in all.
        seed: What the rounds' seeds came of.
        finding: What was wrong first; None if nothing was.
        notes: Sentences.
    """

    name: str
    regions: int
    rounds: dict[str, int] = field(default_factory=dict)
    values: int = 0
    seed: int = 0
    finding: Finding | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.finding is None

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.rounds.items()) or "none"
        lines = [
            f"{self.name}: {self.regions} regions, rounds: {kinds}; {self.values} values compared bit for "
            f"bit with a serial run (seed {self.seed})"
        ]
        lines.append("nothing found" if self.finding is None else f"found: {self.finding}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


class _Found(VerificationError):
    def __init__(self, report: Any) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> Any:
        return type(self), (self.report,)


class DebugError(_Found):
    """What ``debug`` raises.

    Attributes:
        report: With the finding.
    """

    report: DebugReport


@dataclass(frozen=True)
class DeterminismReport:
    """Result of ``check_determinism``.

    Attributes:
        name: Of the function.
        runs: How many calls were compared.
        outputs: How many tensors of each were.
        output: The first that differed, "" if none did.
        place: The first region that differed, run by itself; None if none did.
        detail: A sentence.
    """

    name: str
    runs: int
    outputs: int
    output: str = ""
    place: RegionName | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether all calls gave the same bits."""
        return not self.output

    def __str__(self) -> str:
        text = f"{self.name}: {self.runs} calls, {self.outputs} outputs"
        if self.ok:
            return f"{text}: bit-equal"
        text += f": {self.output} differs between calls with equal arguments"
        if self.place is not None:
            text += f"; first differs {self.place}"
        return text + (f". {self.detail}" if self.detail else "")


class DeterminismError(_Found):
    """What ``check_determinism`` raises.

    Attributes:
        report: What was found.
    """

    report: DeterminismReport
