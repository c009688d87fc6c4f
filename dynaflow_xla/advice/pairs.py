"""For two regions that do not run at the same time: why."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dynaflow_xla import machine
from dynaflow_xla.advice.costs import Given, Times
from dynaflow_xla.ir.graph import Region
from dynaflow_xla.planning.instructions import Launch
from dynaflow_xla.timelines.simulator import ns_at
from dynaflow_xla.timelines.spans import Span, us
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
"""``overlap``: they do run at the same time. ``effects``: one, or what is between them, stays in the outer
program, or both have a place in an order that must stay. ``placement``: nothing keeps them apart but the
schedule."""

MOST = 12
"""Regions that are looked at, the longest: pairs grow with the square."""

_MOST_NAMES = 6
_LEAST_SHARE = 0.02
_LEAST_OVERLAP = 0.2
_NO_FASTER = 0.9
_SCALES = 0.75


@dataclass(frozen=True)
class Pair:
    """Two regions.

    Attributes:
        first, second: Their names.
        regions: Their ids.
        first_ns, second_ns: What they take, each alone on the cores that it has in the plan.
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
        pg = given.pg
        made = pg.producer_region()
        self.reads = [{made[v] for v in r.inputs if v in made} for r in pg.regions]
        self.preds = pg.predecessors()
        self.launches: dict[int, Launch] = {}
        self.stage: dict[int, int] = {}
        self.barriers: list[Launch] = []
        for launch in given.plan.launches:
            self.launches[launch.region] = launch
            self.stage[launch.region] = len(self.barriers)
            if launch.lane < 0:
                self.barriers.append(launch)
        self.spans: dict[int, list[tuple[int, int]]] = {}
        self.on_lane: dict[int, list[Span]] = {}
        for span in timeline.spans:
            if span.kind == "launch":
                self.spans.setdefault(span.region, []).append((span.start_ns, span.end_ns))
            self.on_lane.setdefault(span.lane, []).append(span)

    def at(self, a: Region, b: Region) -> Pair:
        both = self._overlap(self.spans.get(a.id, ()), self.spans.get(b.id, ()))
        reason, text = self._why(a, b, both)
        ns = self.times.there
        return Pair(a.name, b.name, (a.id, b.id), ns[a.id], ns[b.id], both, reason, text)

    def _overlap(self, one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> int:
        return sum(max(0, min(x[1], y[1]) - max(x[0], y[0])) for x in one for y in other)

    def _why(self, a: Region, b: Region, both: int) -> tuple[Why, str]:
        """Bounds that every schedule has come first, then what in this one is between the two."""
        ns = self.times.there
        if needed := self._needed(a, b):
            return needed
        shorter, longer = (a, b) if ns[a.id] <= ns[b.id] else (b, a)
        if both and both >= _LEAST_OVERLAP * ns[shorter.id]:
            return "overlap", f"side by side for {us(both)}"
        for one in (a, b):
            if one.outer:
                return "effects", f"{one.name!r} stays in the outer program: {self._effect(one)}"
        if between := self._between(a, b):
            return between
        if told := self._contention(a, b):
            return "contention", told
        lanes = [self.launches[r.id].lane for r in (a, b)]
        if -1 in lanes:
            wide = a if lanes[0] < 0 else b
            return (
                "placement",
                f"the schedule gives {wide.name!r} all cores, beside which nothing runs",
            )
        if lanes[0] != lanes[1]:
            return "placement", self._meanwhile(a, b)
        return self._on_one_lane(shorter, longer, lanes[0])

    def _needed(self, a: Region, b: Region) -> tuple[Why, str] | None:
        """Whether the second needs the first, or has its place after it in an order that must stay."""
        if chain := _chain(self.reads, a.id, b.id):
            if len(chain) == 2:
                return "dependency", f"{b.name!r} reads what it makes"
            return "dependency", f"{b.name!r} needs it: {self._names(chain)}"
        if not (chain := _chain(self.preds, a.id, b.id)):
            return None
        if len(chain) > 2 and any(
            x in self.reads[y] for x, y in zip(chain, chain[1:], strict=False)
        ):
            return "dependency", f"{b.name!r} follows it: {self._names(chain)}"
        what = (
            "effects keep the program's order"
            if a.outer or b.outer
            else "every process starts these in the program's order"
        )
        return "effects", f"{b.name!r} comes after {a.name!r}: {what}"

    def _names(self, chain: Sequence[int]) -> str:
        names = " > ".join(self.given.pg.regions[i].name for i in chain[:_MOST_NAMES])
        return names + (" > ..." if len(chain) > _MOST_NAMES else "")

    def _effect(self, region: Region) -> str:
        return f"it {self.given.pg.graph.ops[region.ops[0]].outer_reason}"

    def _between(self, a: Region, b: Region) -> tuple[Why, str] | None:
        """What ends one stage of lanes and begins the next, between two that are in different ones."""
        if any(self.launches[r.id].lane < 0 for r in (a, b)):
            return None
        first, last = sorted((self.stage[a.id], self.stage[b.id]))
        if first == last:
            return None
        # An outer region has to be there; one that has all cores is the schedule's choice.
        found = self.barriers[first:last]
        for launch in found:
            region = self.given.pg.regions[launch.region]
            if region.outer:
                return "effects", (
                    f"{launch.name!r} is between them, where all lanes end: it stays in the outer program "
                    f"({self._effect(region)})"
                )
        return "placement", (
            f"{found[0].name!r} is between them, where all lanes end: the schedule gives it all cores"
        )

    def _meanwhile(self, a: Region, b: Region) -> str:
        """What the later one's lane does while the other one runs."""
        begin = {r.id: min((s for s, _ in self.spans.get(r.id, ())), default=0) for r in (a, b)}
        early, late = (a, b) if begin[a.id] <= begin[b.id] else (b, a)
        lane = self.launches[late.id].lane
        there = {
            span: self._overlap(self.spans.get(early.id, ()), [(span.start_ns, span.end_ns)])
            for span in self.on_lane.get(lane, ())
            if span.region != late.id and span.start_ns < begin[late.id]
        }
        most = max(there, key=lambda span: there[span], default=None)
        if most is None or not there[most]:
            return f"nothing orders them; lane {lane} began {late.name!r} late"
        if most.kind == "launch":
            what = f"does {most.name!r}"
        elif most.kind == "wait" and most.reason:
            what = most.reason
        else:
            what = "copies" if most.kind == "copy" else "stands still"
        return f"while {early.name!r} runs, lane {lane} {what}, and {late.name!r} comes after that"

    def _on_one_lane(self, shorter: Region, longer: Region, lane: int) -> tuple[Why, str]:
        """Whether one of them on another lane would save anything."""
        ns = self.times.there[shorter.id]
        if ns <= machine.numbers().hand_over_ns:
            return "too short", (
                f"{shorter.name!r} takes {us(ns)}, and no more can be saved; to hand anything to another "
                f"lane takes {us(machine.numbers().hand_over_ns)}"
            )
        saved = self.times.serial - self.times.ideal
        if saved <= machine.numbers().lanes_ns:
            return "too short", (
                f"of {us(self.times.serial)} at best {us(saved)} can be saved; to go to lanes and back takes "
                f"{us(machine.numbers().lanes_ns)}"
            )
        # Either may go: the one that less crosses for.
        moved, crossing = min(
            ((one, self._crossing(one)) for one in (shorter, longer)), key=lambda way: way[1]
        )
        copies = 0.0 if self.given.streams else 2 * crossing / machine.numbers().copy_bytes_per_ns
        if crossing and machine.numbers().hand_over_ns + copies >= ns:
            name: Why = "copies" if copies > machine.numbers().hand_over_ns else "hand-over"
            return name, (
                f"at best {us(ns)} can be saved; {moved.name!r} on another lane: {crossing} bytes between it "
                f"and lane {lane} would be copied in {us(copies)}, after a hand-over of "
                f"{us(machine.numbers().hand_over_ns)}"
            )
        return "placement", f"the schedule has both on lane {lane}"

    def _crossing(self, region: Region) -> int:
        """Bytes that would go between lanes if it ran on another one, and now do not."""
        regions, values = self.given.pg.regions, self.given.pg.graph.values
        here = self.launches[region.id].lane, self.stage[region.id]
        stay = [
            r
            for r in regions
            if r.id != region.id
            and r.id in self.launches
            and (self.launches[r.id].lane, self.stage[r.id]) == here
        ]
        made = {v for r in stay for v in r.outputs}
        read = {v for r in stay for v in r.inputs}
        crossing = {v for v in region.inputs if v in made} | {
            v for v in region.outputs if v in read
        }
        return sum(values[v].bytes for v in crossing)

    def _contention(self, a: Region, b: Region) -> str:
        """Whether each of two fills the cores by itself, so that side by side is no faster."""
        if self.given.streams:
            return ""
        cores = max(self.given.plan.cores, machine.cores())
        if cores < 2:
            return "this process has one core"
        wide = {r.id: self.times.wide[r.id] for r in (a, b)}
        half = cores // 2
        # On half of the cores nothing takes longer than what twice the cores take, as often.
        beside = {
            r: min(ns_at(self.given.pg, self.times.alone, r, half), ns * cores / half)
            for r, ns in wide.items()
        }
        together, apart = max(beside.values()), sum(wide.values())
        scales = all(ns <= _SCALES * beside[r] for r, ns in wide.items())
        if not apart or not scales or together < _NO_FASTER * apart:
            return ""
        return (
            f"each has work for all {cores} cores: one after another on all of them about {us(apart)}, side "
            f"by side, each on half of them, {us(together)}"
        )


def _chain(before: Sequence[set[int]], start: int, end: int) -> list[int]:
    """Regions from one to another that follows it, each following the one before; [] if it does not."""
    next_of: dict[int, int] = {end: -1}
    left = deque([end])
    while left:
        at = left.popleft()
        for pred in sorted(before[at]):
            if pred not in next_of:
                next_of[pred] = at
                left.append(pred)
    if start not in next_of:
        return []
    path = [start]
    while next_of[path[-1]] >= 0:
        path.append(next_of[path[-1]])
    return path
