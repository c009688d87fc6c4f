"""Rounds of a plan in other orders, on lanes that pause, compared region by region with a serial run."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynaflow_xla.debugging import orders
from dynaflow_xla.debugging.report import (
    DebugError,
    DebugReport,
    DeterminismError,
    DeterminismReport,
    Finding,
    Kind,
    place,
)
from dynaflow_xla.debugging.shadow import Shadow, Unwritten
from dynaflow_xla.errors import bad_argument, checks
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.instructions import Launch
from dynaflow_xla.planning.plan import Plan

INTERLEAVED = "one lane at a time in a random legal order"
REPLANNED = "other lanes and another order"
CONCURRENT = "lanes that pause"
COMPILED = "compiled lane programs with poisoned memory, lanes that pause"

_GRACE_S = 0.05
"""So long a write that comes late may take at the end to be seen."""


def digest(data: bytes | memoryview, *told: object) -> str:
    """What tells results apart: their bytes, types and shapes."""
    found = hashlib.blake2b(repr(told).encode(), digest_size=12)
    found.update(data)
    return found.hexdigest()


def _count(name: str, got: Any, least: int) -> None:
    value = checks.integer(got)
    if value is None or value < least:
        raise bad_argument(got, int, f"{name} must be an integer, at least {least}; got {got!r}")


@dataclass
class Round:
    """One run of a plan, and what was seen.

    A frontend runs ``plan`` and tells ``begin`` and ``end`` of each region.

    Args:
        plan: What runs, its instructions in an order in which one thread can run them.
        bits: From a value to its ``digest``.
        seed: Of the pauses.
        concurrent: Whether it runs on the engine's lanes, which pause; else on one thread, in the plan's
            order.
        mutable: Whether a region's results may be written by somebody else who means to.

    Attributes:
        seen: By region the digests of its results.
        kept: The results themselves, until ``late``.
    """

    plan: Plan
    bits: Callable[[Any], str]
    seed: int
    concurrent: bool
    mutable: Callable[[int], bool] = lambda _: False
    seen: dict[int, tuple[str, ...]] = field(default_factory=dict)
    kept: dict[int, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.launches = {i.region: i for i in self.plan.launches}
        self._shadow = Shadow(self.plan)

    def begin(self, region: int) -> None:
        """A region is about to read its inputs.

        Raises:
            Unwritten: they are not there.
        """
        launch = self.launches[region]
        if self.concurrent and launch.lane >= 0:
            draw = random.Random(self.seed * 1_000_003 + region)
            if draw.random() < 0.6:
                time.sleep(draw.random() * 2e-3)
        self._shadow.read(launch)

    def end(self, region: int, results: Sequence[Any]) -> None:
        """A region has ended with these results."""
        self.seen[region] = tuple(map(self.bits, results))
        self.kept[region] = tuple(results)
        launch = self.launches[region]
        if self.concurrent and launch.lane >= 0:
            draw = random.Random(self.seed * 1_000_003 + region + 500_000)
            if draw.random() < 0.3:
                time.sleep(draw.random() * 2e-3)
        self._shadow.wrote(launch)

    def late(self) -> int | None:
        """The first region whose results were written after its end, by nobody who may."""
        for region, results in self.kept.items():
            if not self.mutable(region) and tuple(map(self.bits, results)) != self.seen[region]:
                return region
        return None


class Subject(Protocol):
    """A planned function that a frontend can run under watch.

    Attributes:
        name: Of the function.
        plan: Its plan.
        pg: Its regions.
    """

    @property
    def name(self) -> str:
        """Of the function."""

    @property
    def plan(self) -> Plan:
        """What a call runs."""

    @property
    def pg(self) -> PartitionedGraph:
        """The plan's regions."""

    def round(self, plan: Plan, seed: int, concurrent: bool) -> Round:
        """What watches a run."""

    def run(self, watch: Round) -> None:
        """Runs a plan and tells the watch; what a region raises passes."""

    def compiled(self, seed: int) -> dict[int, tuple[str, ...]] | None:
        """Runs what a call runs, with poisoned memory and pauses (``seed`` 0: neither).

        Returns:
            Digests by the region that makes what can be seen of it; None if there is no such form.
        """


def debug(subject: Subject, rounds: int, seed: int, notes: Sequence[str] = ()) -> DebugReport:
    """The report of ``dynaflow_xla.debug``.

    Raises:
        DebugError: something was found.
        PlanError: ``rounds`` or ``seed`` are no counts.
    """
    trial = _Trial(subject, rounds, seed)
    finding = trial.findings()
    regions = len(trial.reference.seen)
    report = DebugReport(
        subject.name, regions, trial.rounds, trial.values, seed, finding, tuple(notes)
    )
    if finding is not None:
        raise DebugError(report)
    return report


class _Trial:
    def __init__(self, subject: Subject, rounds: int, seed: int) -> None:
        _count("rounds", rounds, 1)
        _count("seed", seed, 0)
        self._subject, self._wanted = subject, rounds
        self._draw = random.Random(seed)
        self.rounds: dict[str, int] = {}
        self.values = 0
        self._now: tuple[str, int, int] = ("the serial run", 0, seed)

    def findings(self) -> Finding | None:
        """Runs all rounds, or until something is found."""
        subject = self._subject
        plan = subject.plan
        self.reference = subject.round(plan, 0, False)
        try:
            subject.run(self.reference)
        except Unwritten as error:
            return self._finding("unwritten", error.launch, str(error))
        self._positions = {region: n for n, region in enumerate(self.reference.seen)}
        previous = self.reference
        if (found := self._on_paper(plan)) is not None:
            return found
        compiled: dict[int, tuple[str, ...]] | None = None
        for number, (kind, first) in enumerate(self._kinds(plan)):
            seed = self._draw.randrange(1, 1 << 31)
            if kind == COMPILED:
                if compiled is None:
                    compiled = subject.compiled(0)
                if compiled is None:
                    kind = INTERLEAVED
            self._now = kind, number + 1, seed
            if kind == COMPILED:
                if (found := self._compiled(compiled or {}, seed)) is not None:
                    return found
                self._count(kind)
                continue
            draw = random.Random(seed)
            tried = orders.replanned(plan, subject.pg, draw) if kind == REPLANNED else plan
            tried = orders.interleaved(tried, draw, first)
            threads = kind == CONCURRENT or (kind == REPLANNED and seed % 2 == 1)
            now = subject.round(tried, seed, threads)
            if (found := self._ran(now)) is not None:
                return found
            if (found := self._late(previous)) is not None:
                return found
            previous = now
            self._count(kind)
        time.sleep(_GRACE_S)
        return self._late(previous)

    def _kinds(self, plan: Plan) -> list[tuple[str, int | None]]:
        """The rounds: first each region that meets other lanes as early as it may, then all kinds in turn."""
        several = len({i.lane for i in self.reference.launches.values() if i.lane >= 0}) > 1
        early = orders.crossing(plan)
        self._draw.shuffle(early)
        made: list[tuple[str, int | None]] = [
            (INTERLEAVED, r) for r in early[: self._wanted // 2 if several else 0]
        ]
        turn = (CONCURRENT, REPLANNED, COMPILED) if several else (REPLANNED, COMPILED)
        made += [(turn[n % len(turn)], None) for n in range(self._wanted - len(made))]
        return made

    def _on_paper(self, plan: Plan) -> Finding | None:
        """Follows the plan's memory, without running it, in each of the orders that show what is missing."""
        self._now = INTERLEAVED, 0, 0
        for region in (None, *orders.crossing(plan)):
            shadow = Shadow(plan)
            try:
                order = orders.interleaved(plan, random.Random(0), region)
                for launch in order.launches:
                    shadow.read(launch)
                    shadow.wrote(launch)
            except orders.Deadlock as error:
                return self._finding("deadlock", error.launch, str(error))
            except Unwritten as error:
                return self._finding("unwritten", error.launch, str(error))
        return None

    def _count(self, kind: str) -> None:
        self.rounds[kind] = self.rounds.get(kind, 0) + 1

    def _finding(self, kind: Kind, launch: Launch | None, detail: str) -> Finding:
        plan = self._subject.plan
        if launch is None:
            launch = plan.launches[0]
        where = place(self._subject.pg, launch.region, launch.lane)
        return Finding(kind, where, *self._now, detail)

    def _ran(self, now: Round) -> Finding | None:
        error: Exception | None = None
        try:
            self._subject.run(now)
        except Exception as raised:
            error = raised
        # A region that read what was not there may have run before the one that says so.
        if (found := self._changed(now.seen, now)) is not None:
            return found
        if error is None:
            self.values += sum(map(len, now.seen.values()))
            return None
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, Unwritten):
            cause = cause.__cause__
        if isinstance(cause, Unwritten):
            return self._finding("unwritten", cause.launch, str(cause))
        left = [r for r in self._positions if r not in now.seen]
        launch = now.launches.get(left[0]) if left else None
        return self._finding("failed", launch, f"{type(error).__name__}: {error}")

    def _changed(self, seen: dict[int, tuple[str, ...]], now: Round | None) -> Finding | None:
        reference = self.reference
        changed = [r for r in self._positions if r in seen and seen[r] != reference.seen[r]]
        if not changed:
            return None
        region = min(changed, key=self._positions.__getitem__)
        pg = self._subject.pg
        behind = [pg.regions[r].name for r in changed if r != region]
        launches = reference.launches if now is None else now.launches
        outputs = pg.regions[region].outputs
        which = [
            pg.graph.values[v].type_str()
            for v, a, b in zip(outputs, reference.seen[region], seen[region], strict=False)
            if a != b
        ]
        detail = f"{', '.join(which) or 'its results'}; what it read was equal"
        if behind:
            detail += f"; changed with it: {', '.join(behind[:5])}"
        return self._finding("changed", launches[region], detail)

    def _late(self, past: Round) -> Finding | None:
        region = past.late()
        if region is None:
            return None
        detail = "it keeps the memory of a result and writes there again"
        return self._finding("late write", past.launches[region], detail)

    def _compiled(self, reference: dict[int, tuple[str, ...]], seed: int) -> Finding | None:
        found = self._subject.compiled(seed) or {}
        self.values += sum(map(len, found.values()))
        for region in sorted(reference, key=lambda r: self._positions.get(r, -1)):
            if found.get(region) != reference[region]:
                detail = "seen in the results that it makes, between runs of the same programs"
                return self._finding("changed", self.reference.launches[region], detail)
        return None


def check_determinism(
    name: str,
    runs: int,
    call: Callable[[], Sequence[tuple[str, str]]],
    subjects: Callable[[], Sequence[Subject]],
) -> DeterminismReport:
    """The report of ``dynaflow_xla.check_determinism``.

    Args:
        name: Of the function.
        runs: How many calls.
        call: One call on copies; name and digest of each output.
        subjects: The function's regions, asked for if something differs: of each graph that it runs.

    Raises:
        DeterminismError: outputs differ.
        PlanError: ``runs`` is no count.
    """
    _count("runs", runs, 2)
    first = list(call())
    for number in range(1, runs):
        again = list(call())
        wrong = next((a[0] for a, b in zip(first, again, strict=False) if a != b), "")
        if not wrong and len(first) != len(again):
            wrong = "the number of outputs"
        if wrong:
            where, detail = _culprit(subjects(), runs)
            report = DeterminismReport(name, number + 1, len(first), wrong, where, detail)
            raise DeterminismError(report)
    return DeterminismReport(name, runs, len(first))


def _culprit(subjects: Sequence[Subject], runs: int) -> tuple[Any, str]:
    """The first region that differs between serial runs of the plans."""
    if not subjects:
        return None, "Its regions cannot be run one by one here"
    for made in subjects:
        reference: Round | None = None
        for number in range(max(runs, 10)):
            now = made.round(made.plan, number, False)
            made.run(now)
            if reference is None:
                reference = now
            for region, seen in reference.seen.items():
                if now.seen[region] != seen:
                    return place(made.pg, region, now.launches[region].lane), ""
    return None, (
        "No region differs when regions run one after another: dfx.debug looks at the order of lanes"
    )
