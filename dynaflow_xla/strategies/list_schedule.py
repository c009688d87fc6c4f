"""List schedules of regions on lanes: what each costs where, and who begins when.

A *phase* of lanes is a list schedule: the region with the longest path behind it goes to the lane on which it
ends first, hand-over included (HEFT without insertion; Topcuoglu et al. 2002). Between phases run *wide*
regions, one after another, each on all cores.

A program in which anything is wide is handed to the framework's own threads, which costs ``program_ns``; one
whose regions are all on lanes is not. For tiny functions that decides. With up to ``caller_ns`` of work, all
on one lane, there is no program around it, and nothing to enter, to leave or to copy. A phase with several
lanes is longer by ``lane_wake_ns``, unless there is nothing else than lanes in a program of its own: such
are mostly called in a row, lanes are awake then, which costs ``machine.TURNS_NS``, and what a late one has
not begun the engine has another thread do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush

from dynaflow_xla import machine
from dynaflow_xla.ir.partitioned import PartitionedGraph

Widths = tuple[int, ...]
"""Cores of each lane."""


@dataclass(frozen=True)
class ListSchedule:
    """A schedule.

    Attributes:
        order: Regions in the order in which they are to be executed, each with its lane; -1: on all cores.
        length_ns: Predicted.
        widths: Cores of the lanes that it may use.
    """

    order: tuple[tuple[int, int], ...]
    length_ns: float
    widths: Widths

    @property
    def on_lanes(self) -> frozenset[int]:
        """Regions on lanes."""
        return frozenset(region for region, lane in self.order if lane >= 0)

    @property
    def lanes_used(self) -> frozenset[int]:
        """Lanes that have regions."""
        return frozenset(lane for _, lane in self.order if lane >= 0)


class Tasks:
    """Regions with what they cost on lanes and on all cores, and what copies cost between these.

    Attributes:
        on_caller_ns: What all of them take on the thread that calls, where they may be there; else inf.

    Args:
        pg: The regions.
        lane_cores: Cores of a lane, as far as nothing else is said.
        cores: Of the machine; 0: nothing but outer regions can have all of them.
        program_ns: See ``Context``.
        python_ns: See ``Context``.
        copies: See ``Context``.
    """

    def __init__(
        self,
        pg: PartitionedGraph,
        lane_cores: int,
        cores: int,
        program_ns: float,
        python_ns: float,
        copies: bool,
    ) -> None:
        self.regions = pg.regions
        self.preds, self.succs = pg.predecessors(), pg.successors()
        self._narrow_at: dict[int, list[float]] = {}
        self.narrow = self.narrow_at(lane_cores)
        self.wide = [r.cost_at(max(1, cores), wide=True) for r in pg.regions]
        self.moldable = cores > 0
        self.program_ns = program_ns
        self.python_ns = python_ns
        self.on_caller_ns = math.inf
        values = pg.graph.values
        made = pg.producer_region()
        # By producer and reader: values and the nanoseconds of a copy, at either end.
        self.crossing: dict[tuple[int, int], dict[int, float]] = {}
        self.copies = copies
        self.hand_over_ns = machine.numbers().hand_over_ns
        speed = machine.numbers().copy_bytes_per_ns if copies else math.inf
        for region in pg.regions:
            for value in region.inputs:
                if value in made:
                    edge = self.crossing.setdefault((made[value], region.id), {})
                    edge[value] = values[value].bytes / speed
        self.bytes = [sum(values[v].bytes for v in r.outputs) for r in pg.regions]
        results = set(pg.graph.outputs) | {p for j in pg.graph.joins for p in j.parts}
        self.result_bytes = [
            sum(values[v].bytes for v in r.outputs if v in results) for r in pg.regions
        ]

    def narrow_at(self, cores: int) -> list[float]:
        """Nanoseconds of each region on a lane of so many cores."""
        if cores not in self._narrow_at:
            self._narrow_at[cores] = [r.cost_at(cores) for r in self.regions]
        return self._narrow_at[cores]

    def placed(self, wide: frozenset[int], widths: Widths) -> ListSchedule:
        """The list schedule of an allotment: all lanes that can run do so before what is wide goes on."""
        return _Schedule(self, wide, widths).run()


class _Schedule:
    """One list schedule: a clock a lane, and what left the lanes in this phase."""

    def __init__(self, tasks: Tasks, wide: frozenset[int], widths: Widths) -> None:
        self.tasks = tasks
        self.is_wide = wide
        self.widths = widths
        self.narrow = [tasks.narrow_at(cores) for cores in widths]
        self.lanes = range(len(widths))
        self.free = [0.0] * len(widths)
        self.finish: dict[int, float] = {}
        self.place: dict[int, int] = {}
        self.last: dict[int, int] = {}  # region by lane
        self.idle: dict[int, float] = {}  # how long a lane waits after a region
        self.given: set[int] = set()  # values that other lanes read
        self.received: set[tuple[int, int]] = set()  # and which of these
        self.phase: dict[int, int] = {}
        self.number = 0  # of the phase
        self.inside = False  # whether lanes run
        self.wakes = 0  # phases with several lanes
        self.order: list[tuple[int, int]] = []
        # Ready regions, as heaps: a look at each of them for each placed one is quadratic in their number.
        self.inner: list[tuple[float, float, int]] = []
        self.outer: list[int] = []
        self.in_phase: list[int] = []  # regions on lanes, since these were entered
        self.priority = [0.0] * len(tasks.regions)
        for region in reversed(tasks.regions):
            after = max((self.priority[s] for s in tasks.succs[region.id]), default=0.0)
            took = (tasks.wide if region.id in wide else tasks.narrow)[region.id]
            self.priority[region.id] = took + after

    def run(self) -> ListSchedule:
        """Places every region."""
        tasks = self.tasks
        missing = [len(p) for p in tasks.preds]
        for first in tasks.regions:
            if not missing[first.id]:
                self._becomes_ready(first.id)
        while self.inner or self.outer:
            # Few phases: stay with lanes, or in the program around them, while there is anything to do.
            if self.inner and (self.inside or not self.outer or not tasks.moldable):
                region = heappop(self.inner)[-1]
                self._on_lane(region)
            else:
                region = heappop(self.outer)
                self._alone(region)
            for succ in tasks.succs[region]:
                missing[succ] -= 1
                if missing[succ] == 0:
                    self._becomes_ready(succ)
        self._leave()
        length = max(self.free, default=0.0)
        wide = any(lane < 0 for _, lane in self.order)
        # Where nothing can be wide lanes are woken in any case; alone in a program they are awake.
        if tasks.moldable:
            sleeping = wide or not tasks.program_ns
            length += self.wakes * (
                machine.numbers().lane_wake_ns if sleeping else machine.TURNS_NS
            )
            if any(lane >= 0 for _, lane in self.order):
                length += tasks.python_ns
        if wide:
            length += tasks.program_ns
        elif math.isfinite(tasks.on_caller_ns) and not any(lane for _, lane in self.order):
            length = tasks.on_caller_ns
        return ListSchedule(tuple(self.order), length, self.widths)

    def _becomes_ready(self, region: int) -> None:
        """All that it waits for has a place: when that ends does not change any more."""
        if region in self.is_wide:
            heappush(self.outer, region)
        else:
            arrival = max((self.finish[p] for p in self.tasks.preds[region]), default=0.0)
            heappush(self.inner, (-self.priority[region], arrival, region))

    def _start(self, region: int, lane: int) -> tuple[float, float]:
        """When a lane could begin with a region, and how long it copies what the region reads of others."""
        begin, copied = self.free[lane], 0.0
        for pred in self.tasks.preds[region]:
            arrival = self.finish[pred]
            if self._crosses(pred, lane):
                values = self.tasks.crossing.get((pred, region), {})
                arrival += self.tasks.hand_over_ns + sum(values.values())
                copied += sum(ns for v, ns in values.items() if (v, lane) not in self.received)
            begin = max(begin, arrival)
        return begin, copied

    def _crosses(self, pred: int, lane: int) -> bool:
        return self.place[pred] not in (lane, -1) and self.phase[pred] == self.number

    def _on_lane(self, region: int) -> None:
        if not self.inside:
            self.inside = True
            self.number += 1
            self.in_phase = []
            self.free = [t + machine.numbers().lanes_ns for t in self.free]
        # Where all lanes have as many cores, it ends first where it starts first.
        starts = [self._start(region, n) for n in self.lanes]
        ends = [sum(starts[n]) + self.narrow[n][region] for n in self.lanes]
        lane = min(self.lanes, key=lambda n: (ends[n], n))
        if lane in self.last:
            self.idle[self.last[lane]] = starts[lane][0] - self.free[lane]
        self.last[lane] = region
        self.finish[region] = self.free[lane] = ends[lane]
        for pred in self.tasks.preds[region]:
            if not self._crosses(pred, lane):
                continue
            for value, ns in self.tasks.crossing.get((pred, region), {}).items():
                self.received.add((value, lane))
                if value not in self.given:
                    # Into memory that lanes share, by the lane that made it, as soon as it is made.
                    self.given.add(value)
                    before = min(ns, self.idle.get(pred, 0.0))
                    self.idle[pred] = self.idle.get(pred, 0.0) - before
                    self.free[self.place[pred]] += ns - before
        self._executed(region, lane)

    def _alone(self, region: int) -> None:
        self._leave()
        end = max(self.free) + self.tasks.wide[region]
        self.free = [end] * len(self.free)
        self.finish[region] = end
        self._executed(region, -1)

    def _leave(self) -> None:
        """The end of a phase: what others read, and results, are copied into memory of the program around."""
        if not self.inside:
            return
        self.inside = False
        tasks = self.tasks
        leaving = [0] * len(self.free)
        for region in self.in_phase:
            left = any(self.phase.get(s) != self.number for s in tasks.succs[region])
            size = tasks.bytes[region] if left else tasks.result_bytes[region]
            leaving[self.place[region]] += size
        for lane, size in enumerate(leaving):
            self.free[lane] += size / machine.numbers().results_speed(size)
        self.wakes += any(self.place[region] > 0 for region in self.in_phase)
        self.free = [max(self.free)] * len(self.free)

    def _executed(self, region: int, lane: int) -> None:
        self.place[region], self.phase[region] = lane, self.number if lane >= 0 else -1
        if lane >= 0:
            self.in_phase.append(region)
        self.order.append((region, lane))
