"""For two regions that do not run at the same time: why."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from dynaflow_xla import machine
from dynaflow_xla.advice.costs import Given, Times
from dynaflow_xla.ir.graph import Region
from dynaflow_xla.planning.instructions import Launch
from dynaflow_xla.timelines.spans import us
from dynaflow_xla.timelines.timeline import Timeline

Why = Literal[
    "overlap",
    "dependency",
    "contention",
    "too short",
    "hand-over",
    "copies",
    "effects",
    "placement",
]
"""``overlap``: they do run at the same time. ``effects``: one stays in the outer program. ``placement``:
nothing keeps them apart but the schedule."""

MOST = 12
"""Regions that are looked at, the longest: pairs grow with the square."""

_LEAST_SHARE = 0.02
_LEAST_OVERLAP = 0.2
_EFFICIENT = 0.7


@dataclass(frozen=True)
class Pair:
    """Two regions.

    Attributes:
        first, second: Their names.
        regions: Their ids.
        first_ns, second_ns: What they take, each alone on one core.
        overlap_ns: How long both ran at the same time.
        reason: Why that is not longer.
        text: The same in a sentence.
    """

    first: str
    second: str
    regions: tuple[int, int]
    first_ns: int
    second_ns: int
    overlap_ns: int
    reason: Why
    text: str


def pairs(given: Given, times: Times, timeline: Timeline) -> list[Pair]:
    """All pairs of the longest regions, those first that could save most.

    Args:
        given: The plan.
        times: Its times.
        timeline: Where the regions ran, measured or simulated.
    """
    least = _LEAST_SHARE * times.serial
    chosen = sorted(
        (r for r in given.pg.regions if times.alone[r.id] >= least and times.alone[r.id] > 0),
        key=lambda r: -times.alone[r.id],
    )[:MOST]
    look = _Look(given, times, timeline)
    found = [
        look.at(*sorted((a, b), key=lambda r: r.id))
        for number, a in enumerate(chosen)
        for b in chosen[number + 1 :]
    ]
    return sorted(found, key=lambda p: -min(p.first_ns, p.second_ns))


class _Look:
    def __init__(self, given: Given, times: Times, timeline: Timeline) -> None:
        self.given, self.times = given, times
        self.preds = given.pg.predecessors()
        self.launches = {i.region: i for i in given.plan.instructions if isinstance(i, Launch)}
        self.spans: dict[int, list[tuple[int, int]]] = {}
        for span in timeline.spans:
            if span.kind == "launch":
                self.spans.setdefault(span.region, []).append((span.start_ns, span.end_ns))
        values = given.pg.graph.values
        self.bytes = [sum(values[v].bytes for v in r.outputs) for r in given.pg.regions]
        made = given.pg.producer_region()
        self.read = [sum(values[v].bytes for v in r.inputs if v in made) for r in given.pg.regions]

    def at(self, a: Region, b: Region) -> Pair:
        both = self._overlap(a, b)
        reason, text = self._why(a, b, both)
        ns = self.times.alone
        return Pair(a.name, b.name, (a.id, b.id), ns[a.id], ns[b.id], both, reason, text)

    def _overlap(self, a: Region, b: Region) -> int:
        return sum(
            max(0, min(x[1], y[1]) - max(x[0], y[0]))
            for x in self.spans.get(a.id, ())
            for y in self.spans.get(b.id, ())
        )

    def _chain(self, start: int, end: int) -> list[int]:
        """Regions from one to another that needs it, each reading from the one before; [] if it does not."""
        before: dict[int, int] = {end: -1}
        left = deque([end])
        while left:
            at = left.popleft()
            for pred in sorted(self.preds[at]):
                if pred not in before:
                    before[pred] = at
                    left.append(pred)
        if start not in before:
            return []
        path = [start]
        while before[path[-1]] >= 0:
            path.append(before[path[-1]])
        return path

    def _why(self, a: Region, b: Region, both: int) -> tuple[Why, str]:
        regions, ns = self.given.pg.regions, self.times.alone
        if chain := self._chain(a.id, b.id):
            names = " > ".join(regions[i].name for i in chain[:6]) + (
                " > ..." if len(chain) > 6 else ""
            )
            told = "reads what it makes" if len(chain) == 2 else f"needs it: {names}"
            return "dependency", f"{b.name!r} {told}"
        shorter = a if ns[a.id] <= ns[b.id] else b
        if both >= _LEAST_OVERLAP * ns[shorter.id] and both:
            return "overlap", f"side by side for {us(both)}"
        for one in (a, b):
            if one.outer:
                why = self.given.pg.graph.ops[one.ops[0]].outer_reason
                return "effects", f"{one.name!r} stays in the outer program: it {why}"
        crossing = self._crossing(shorter)
        if ns[shorter.id] <= machine.HAND_OVER_NS:
            return "too short", (
                f"{shorter.name!r} takes {us(ns[shorter.id])}; to hand anything to another lane takes "
                f"{us(machine.HAND_OVER_NS)}"
            )
        if told := self._contention(a, b):
            return "contention", told
        copies = 2 * crossing / machine.COPY_BYTES_PER_NS
        if machine.HAND_OVER_NS + copies >= ns[shorter.id]:
            name: Why = "copies" if copies > machine.HAND_OVER_NS else "hand-over"
            return name, (
                f"{shorter.name!r} takes {us(ns[shorter.id])}; on another lane its {crossing} bytes would be "
                f"copied in {us(copies)}, after a hand-over of {us(machine.HAND_OVER_NS)}"
            )
        if self.times.serial - self.times.ideal <= machine.LANES_NS:
            return "too short", (
                f"all regions take {us(self.times.serial)} one after another; to go to lanes and back takes "
                f"{us(machine.LANES_NS)}"
            )
        return "placement", self._placement(a, b)

    def _crossing(self, region: Region) -> int:
        """Bytes that would go from lane to lane if it ran on another one."""
        return self.read[region.id] + self.bytes[region.id]

    def _contention(self, a: Region, b: Region) -> str:
        """Whether each of two fills the cores by itself, so that side by side is no faster."""
        cores = max(self.given.plan.cores, machine.cores())
        if cores < 2:
            return "this process has one core"
        ns = self.times.alone
        wide = [self.times.wide[r.id] for r in (a, b)]
        if sum(wide) <= 0:
            return ""
        # As if the rest of the machine did what is left of the longer one, at best.
        beside = max(max(ns[a.id], ns[b.id]), (ns[a.id] + ns[b.id]) / cores)
        if beside >= _EFFICIENT * sum(wide) and all(
            w * cores <= n / _EFFICIENT for w, n in zip(wide, (ns[a.id], ns[b.id]), strict=True)
        ):
            return (
                f"each has work for all {cores} cores: one after another on all of them about "
                f"{us(sum(wide))}, side by side {us(beside)}"
            )
        return ""

    def _placement(self, a: Region, b: Region) -> str:
        lanes = [self.launches[r.id].lane for r in (a, b)]
        if -1 in lanes:
            wide = a if lanes[0] < 0 else b
            return f"the schedule gives {wide.name!r} all cores, beside which nothing runs"
        if lanes[0] == lanes[1]:
            return f"the schedule has both on lane {lanes[0]}"
        return (
            f"lanes {lanes[0]} and {lanes[1]}: nothing orders them, but what their lanes do before keeps "
            "them apart"
        )
