"""From the engine's time stamps to a measured timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from dynaflow_xla.ir.partitioned import PartitionedGraph, contents
from dynaflow_xla.planning.instructions import Instruction, Launch, Record
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.timelines.simulator import lower_bound
from dynaflow_xla.timelines.spans import Span
from dynaflow_xla.timelines.timeline import Timeline, complete

# Trace ids (csrc/include/dfx/observer.h and ffi/module/custom_calls/gate_handlers.cc): a lane's whole
# program is negative, a region is its number, a wait and a copy are these plus a number.
TRACE_WAIT = 1 << 24
TRACE_COPY = 1 << 25

Trace = tuple[int, int, int, int]
"""id, lane, start, end (nanoseconds of one clock)."""

T = TypeVar("T")

# What other processes take away is no property of the plan: of this many runs, or as many as fit,
# the fastest counts.
_RUNS = 7
_MAX_SECONDS = 1.0


def fastest(run: Callable[[], T], length: Callable[[T], int]) -> T:
    """What the fastest of a few runs gave; one before, which warms up, does not count."""
    run()
    until = time.monotonic() + _MAX_SECONDS
    runs: list[T] = []
    while not runs or (len(runs) < _RUNS and time.monotonic() < until):
        runs.append(run())
    return min(runs, key=length)


class Measured:
    """Spans of the stages and outer regions so far, laid end to end.

    What happens between them here (buffers of the profile itself) is no part of a call: left out.

    Args:
        plan: The plan that ran.
        pg: Its regions.
    """

    def __init__(self, plan: Plan, pg: PartitionedGraph) -> None:
        self._plan = plan
        self._pg = pg
        self._spans: list[Span] = []
        self._now = 0
        self._launch_of: dict[int, int] = {}  # region -> its span
        self._barrier: tuple[int, ...] = ()
        self._preds = pg.predecessors()
        self._contents = contents(pg)
        self._width = {i.region: plan.cores_of(i) for i in plan.launches}

    def add_stage(self, instructions: Iterable[Instruction], records: Iterable[Trace]) -> None:
        """Spans of one stage from the engine's records."""
        records = list(records)
        # The program numbers its events in the order in which they are recorded.
        producers: list[Launch | None] = []
        last: dict[int, Launch] = {}
        for instruction in instructions:
            if isinstance(instruction, Launch):
                last[instruction.lane] = instruction
            elif isinstance(instruction, Record):
                producers.append(last.get(instruction.lane))
        # A lane's first stamp starts where its program did: gates know ends only.
        begin = {lane: t0 for number, lane, t0, _ in records if number < 0}
        stamps = [
            (lane, max(t0, begin.get(lane, t0)), t1, number)
            for number, lane, t0, t1 in records
            if number >= 0
        ]
        start = min([*begin.values(), *(s[1] for s in stamps)], default=0)
        shift = self._now - start
        first = len(self._spans)
        waits: dict[int, Launch] = {}
        lanes_seen: set[int] = set()
        for lane, t0, t1, number in sorted(stamps, key=lambda s: s[:3]):
            at, until = t0 + shift, t1 + shift
            after = () if lane in lanes_seen else self._barrier
            lanes_seen.add(lane)
            if number >= TRACE_COPY:
                span = Span(lane, "copy", "copy", at, until, after=after)
            elif number >= TRACE_WAIT:
                producer = producers[number - TRACE_WAIT]
                name = producer.name if producer is not None else "the start"
                where = producer.lane if producer is not None else lane
                if producer is not None:
                    waits[len(self._spans)] = producer
                span = Span(
                    lane, f"wait for {name!r}", "wait", at, until,
                    reason=f"waits for {name!r} on lane {where}", after=after,
                )  # fmt: skip
            else:
                self._launch_of[number] = len(self._spans)
                span = self._region(number, lane, at, until, after, self._width.get(number, 1))
            self._spans.append(span)
        # What a span follows may stand behind it in the list: known only now.
        for i in range(first, len(self._spans)):
            span = self._spans[i]
            found = set(span.after)
            if i in waits:
                found.add(self._signal(self._launch_of[waits[i].region]))
            if span.kind == "launch":
                found.update(self._producers(span.region))
            self._spans[i] = msgspec.structs.replace(span, after=tuple(sorted(found)))
        self._now = max((s.end_ns for s in self._spans), default=0)

    def _region(
        self, number: int, lane: int, begin: int, end: int, after: tuple[int, ...], cores: int
    ) -> Span:
        region = self._pg.regions[number]
        return Span(
            lane, region.name, "launch", begin, end, number, region.nano, region.resource, region.flops,
            region.bytes_moved, str(region.source or ""), after=after,
            content=self._contents[number], cores=cores,
        )  # fmt: skip

    def _producers(self, region: int) -> set[int]:
        spans = (self._launch_of.get(p) for p in self._preds[region])
        return {i for i in spans if i is not None}

    def _signal(self, launch: int) -> int:
        """A region signals after copying out: that copy's span if there is one."""
        span, following = self._spans[launch], launch + 1
        if following < len(self._spans):
            copy = self._spans[following]
            if copy.kind == "copy" and copy.lane == span.lane:
                return following
        return launch

    def add_outer(self, launch: Launch, took_ns: int) -> None:
        """The span of an outer region: everything before it is over, everything else is later."""
        last: dict[int, int] = {}
        for i in range(self._barrier[0] + 1 if self._barrier else 0, len(self._spans)):
            last[self._spans[i].lane] = i
        found = {*last.values(), *self._barrier}
        found.update(self._producers(launch.region))
        index = len(self._spans)
        end = self._now + took_ns
        cores = self._plan.cores_of(launch)
        self._spans.append(
            self._region(launch.region, -1, self._now, end, tuple(sorted(found)), cores)
        )
        self._launch_of[launch.region] = index
        self._barrier = (index,)
        self._now = end

    def timeline(self, name: str) -> Timeline:
        """All of it, with the bound that the measured times give."""
        lanes = self._plan.lanes
        times = complete("measured", self._spans, lanes, {"name": name})
        bound = lower_bound(self._plan, self._pg, times)
        return complete("measured", self._spans, lanes, {"name": name}, bound)
