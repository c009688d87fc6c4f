"""Schedules of moldable regions: each has the cores of its lane, or all cores.

How one allotment is scheduled, and what that costs: ``list_schedule``.

Which regions are wide is the *allotment*. As in two-phase algorithms for moldable tasks (Turek, Wolf and Yu
1992; CPA, Radulescu and van Gemund 2001; with precedence Lepere, Trystram and Woeginger 2002) it is chosen
first, by what cores gain, and then scheduled: candidates are "all wide", "none", and for each threshold of
efficiency those regions wide that gain at least so much; each with all lanes and with one, which needs
nobody to be woken. The best one is improved as CPA does it, a region at a time, as long as the length of the
whole schedule shrinks. Where lanes share the cores out as the schedule likes, each allotment is tried with
every number of lanes that share all cores evenly, and in the best one lanes give cores to others while that
shortens it: two long regions on 16 cores have eight each, a long one and three short ones perhaps ten and
two. What runs on one lane with nothing beside it then joins the program around the lanes, if there is one:
all that it gains by the model is that it is handed to no threads, and the model knows nothing of operators
that are fused, in there, with what comes before and after. A schedule with lanes is kept only if it is
predicted to be shorter than all regions wide, by a margin, and by a third of what these might share out
after all (``ir.work.Spread.tiles``). Whoever measures what comes of it may ask for lanes that lose a little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from dynaflow_xla import machine
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.strategies.base import Recorder
from dynaflow_xla.strategies.list_schedule import ListSchedule, Tasks, Widths

_MARGIN, _OWN_MARGIN = 0.05, 0.03
"""Of the original's time: what lanes have to gain by the model, beside what they cost; and where they copy
nothing: PyTorch's operators have a cost each, XLA's are fused with each other, which is known less well."""

_CALLER_MARGIN = 0.03
"""The same of the thread that calls: small programs are known better."""

_QUICK_FORK, _QUICK_PROGRAM = 0.15, 0.5
"""Shares of what it costs to hand work and programs to other threads. Some machines do it so quickly; a
program is kept on the thread that calls, with one core, only if it is the shorter one there, too."""

_AS_GOOD = 0.05
"""Of the time with all cores, forks being quick: what the model does not tell apart from it."""

_UNSURE = 1 / 3
"""What of ``Spread.tiles`` on lanes counts as shared out in the original."""

_MOST_RESULT_BYTES = 1 << 26
"""A lane's results are there twice until they are copied: no more than this in vain."""

_THRESHOLDS = 6
_ROUNDS = 3
_IMPROVED = 64
"""Regions whose width is tried both ways, the longest ones: each try makes a whole schedule."""

_SHARED_OUT = 3
"""Schedules of several lanes, the shortest ones, in which lanes give cores to others."""

_STEPS = 16
"""Lanes give cores to others in steps of such a share of all."""


class Moldable(Tasks):
    """The regions of a graph as moldable tasks.

    Args:
        pg: The regions.
        lanes: Number of lanes.
        lane_cores: Cores of a lane, where the schedule does not choose.
        cores: Of the machine; 0: nothing but outer regions can have all of them.
        program_ns: See ``Context``.
        caller_ns: See ``Context``.
        python_ns: See ``Context``.
        shared: Cores that lanes share out as the schedule likes; 0: each has ``lane_cores``.
        copies: See ``Context``.
    """

    def __init__(
        self,
        pg: PartitionedGraph,
        lanes: int,
        lane_cores: int,
        cores: int,
        program_ns: float = 0.0,
        caller_ns: float = 0.0,
        python_ns: float = 0.0,
        shared: int = 0,
        copies: bool = True,
    ) -> None:
        if shared:
            # Fewer cores than lanes are PyTorch's threads: each lane has one all the same.
            lane_cores = max(1, shared // lanes) if lanes > 1 else min(lane_cores, shared)
        super().__init__(pg, lane_cores, cores, program_ns, python_ns, copies)
        self.lane_cores = lane_cores
        self.cores = cores
        self.shared = shared
        self.even: Widths = (lane_cores,) * lanes
        # A pool of one thread hands nothing out.
        self.one: Widths = (1,) if shared else (lane_cores,)
        forks = sum(r.spread.forks for r in pg.regions) * machine.numbers().fork_ns
        self.quick_forks_ns = sum(self.wide) - (1 - _QUICK_FORK) * forks
        unsure = sum(self.unsure_ns(r.id, self.one[0]) for r in pg.regions)
        self.at_best_ns = self.quick_forks_ns - unsure
        quick = self.quick_forks_ns + _QUICK_PROGRAM * program_ns
        # There it has one core, whatever a lane has, and nobody to hand anything to.
        alone = pg.on_caller_ns()
        self.on_caller_ns = alone if alone <= min(caller_ns, quick) else math.inf
        # Products are handed out each by itself, whatever is fused around them.
        self.fused_forks = [
            0.0
            if r.spread.products or r.spread.convolutions
            else r.spread.forks * machine.numbers().fork_ns
            for r in pg.regions
        ]
        self.everything = frozenset(r.id for r in pg.regions)
        self.fixed = frozenset(r.id for r in pg.regions if r.outer)

    @classmethod
    def of(cls, s: Recorder, lanes: int, *, wide: bool = True) -> Moldable:
        """The tasks of a recording.

        Args:
            s: The recording.
            lanes: Number of lanes.
            wide: False: regions have one lane each, but for outer ones.
        """
        context = s.context
        made = cls(
            s.graph, lanes, context.lane_cores, context.cores if wide else 0, context.program_ns,
            context.caller_ns, context.python_ns, context.cores if context.free_widths else 0,
            context.copies,
        )  # fmt: skip
        made.hand_over_ns = machine.hand_over_ns(context.platform)
        return made

    def unsure_ns(self, region: int, cores: int) -> float:
        """What the original may share out after all, and a lane of so many cores may not."""
        spread = self.regions[region].spread
        return spread.unsure_ns(self.cores) - spread.unsure_ns(cores)

    def lane_sets(self) -> list[Widths]:
        """Lanes that every allotment is tried with."""
        made = [self.even, self.one]
        for lanes in range(2, len(self.even)):
            if (cores := self.shared // lanes) > self.lane_cores:
                made.append((cores,) * lanes)
        return list(dict.fromkeys(made))

    def best(self, margin: float | None = None) -> ListSchedule:
        """The shortest schedule found; all wide where lanes gain too little.

        Args:
            margin: What they have to gain, of the time with all wide; None: what the model errs by. Below 0
                the shortest schedule with several lanes counts, and it may take longer by so much. (Where
                nothing can be wide there is nothing to gain against.)
        """
        if not self.moldable:
            sets = [widths for widths in self.lane_sets() if widths != self.one]
            tried = [self.placed(self.fixed, widths) for widths in sets or [self.even]]
            return self._trimmed(self._shared_out(min(tried, key=lambda p: p.length_ns)))
        original = self.all_wide()
        sets = self.lane_sets()
        tried = [
            self.placed(allotment, widths)
            for allotment in dict.fromkeys(self._allotments())
            for widths in sets
        ]
        tried.sort(key=lambda p: p.length_ns)
        several = [p for p in tried if _overlaps(p)]
        if margin is None or (margin < 0 and not several):
            margin = _MARGIN if self.copies else _OWN_MARGIN
        hoped = several if margin < 0 else []
        found = [self._improved(p) for p in (hoped or tried)[:1]] + hoped[:1]
        unequal = [p for p in several if max(p.widths) > 1][:_SHARED_OUT]
        alike = [p for p in tried if p.widths == self.even] if unequal else []
        # What is shortest may be too unsure to be taken, and something else is not.
        found += [self._shared_out(p) for p in (*found, *unequal)] + alike
        found = [self._joined(p) for p in dict.fromkeys(found)]
        gaining = [p for p in found if self._gains(p, original, margin)]
        if margin < 0:
            gaining = [p for p in gaining if _overlaps(p)]
            if not gaining:
                return self.best()
        return self._trimmed(min(gaining, key=lambda p: p.length_ns, default=original))

    def all_wide(self) -> ListSchedule:
        """Every region with all cores: the original program."""
        return self.placed(self.everything, self.even)

    def one_lane(self) -> ListSchedule:
        """Every region on lane 0, but for those that can be on none."""
        return self.placed(self.fixed, self.one)

    def is_for_the_caller(self) -> bool:
        """Whether the program is shorter on the thread that calls it than with all cores."""
        if self.fixed or math.isinf(self.on_caller_ns):
            return False
        return self._gains(self.one_lane(), self.all_wide(), _CALLER_MARGIN)

    def is_for_one_lane(self, least_ns: float) -> bool:
        """Whether more cores gain nothing, even if they are handed work quickly and share out all ``tiles``.

        A pool of one thread then runs the program as fast or faster: nothing is handed out in vain, and
        neither XLA's threads nor OpenBLAS's run beside it.

        Args:
            least_ns: What is shorter is not, unless it gains more than lanes cost; 0: nothing is.
        """
        if self.fixed or self.one != (1,) or not least_ns:
            return False
        if sum(self.result_bytes) > _MOST_RESULT_BYTES:
            return False
        one = self.one_lane().length_ns
        if one + machine.numbers().lanes_ns <= self.at_best_ns:
            return True
        return least_ns <= one <= (1 + _AS_GOOD) * self.at_best_ns

    def _gains(self, best: ListSchedule, original: ListSchedule, margin: float) -> bool:
        unsure = sum(self.unsure_ns(i, best.widths[lane]) for i, lane in best.order if lane >= 0)
        length = original.length_ns - _UNSURE * unsure
        return best.length_ns + margin * length < length

    def _allotments(self) -> Iterable[frozenset[int]]:
        """Sets of wide regions: by efficiency, the ratio of its time on a lane to that on all cores."""
        free = [r.id for r in self.regions if r.id not in self.fixed]
        ratio = {i: self.narrow[i] / self.wide[i] if self.wide[i] > 0 else 1.0 for i in free}
        levels = sorted(set(ratio.values()))
        step = max(1, -(-len(levels) // _THRESHOLDS))
        for level in (*levels[::step], float("inf")):
            yield frozenset(self.fixed | {i for i in free if ratio[i] >= level})
        # What runs beside nothing needs no lane.
        alone = {i for i in free if not self._concurrent(i)}
        for level in (*levels[::step], float("inf")):
            yield frozenset(self.fixed | alone | {i for i in free if ratio[i] >= level})

    def _concurrent(self, region: int) -> bool:
        """Whether another region of some length may run at the same time."""
        related = self._reach(region, self.preds) | self._reach(region, self.succs) | {region}
        return any(
            r.id not in related and self.narrow[r.id] > self.hand_over_ns for r in self.regions
        )

    @staticmethod
    def _reach(start: int, edges: Sequence[set[int]]) -> set[int]:
        found: set[int] = set()
        left = [start]
        while left:
            for other in edges[left.pop()]:
                if other not in found:
                    found.add(other)
                    left.append(other)
        return found

    def _improved(self, best: ListSchedule) -> ListSchedule:
        """Changes the width of one region after another while that shortens the schedule."""
        free = sorted(
            (r.id for r in self.regions if r.id not in self.fixed), key=lambda i: -self.narrow[i]
        )[:_IMPROVED]
        for _ in range(_ROUNDS):
            before = best.length_ns
            for region in free:
                wide = (self.everything - best.on_lanes) ^ {region}
                # The best may stay on one lane, or need the others once this region is narrow.
                for widths in dict.fromkeys((best.widths, self.even)):
                    changed = self.placed(wide, widths)
                    if changed.length_ns < best.length_ns:
                        best = changed
            if best.length_ns >= before:
                break
        return best

    def _shared_out(self, best: ListSchedule) -> ListSchedule:
        """Lanes give cores to those that have more to do, while that shortens the schedule."""
        if not self.shared or len(best.lanes_used) < 2:
            return best
        while True:
            load = [0.0] * len(best.widths)
            for region, lane in best.order:
                if lane >= 0:
                    load[lane] += self.narrow_at(best.widths[lane])[region]
            busiest = max(range(len(load)), key=lambda lane: load[lane])
            changed = [
                self._with(best, widths) for widths in self._given_to(busiest, best.widths, load)
            ]
            shorter = min(changed, key=lambda p: p.length_ns, default=best)
            if shorter.length_ns >= best.length_ns:
                return best
            best = shorter

    def _with(self, best: ListSchedule, widths: Widths) -> ListSchedule:
        """The same allotment on other lanes."""
        return self.placed(self.everything - best.on_lanes, widths)

    def _trimmed(self, best: ListSchedule) -> ListSchedule:
        """Lanes whose regions gain nothing by more cores have one: a pool of one thread hands nothing out."""
        if not self.shared:
            return best
        one, widths = self.narrow_at(1), [*best.widths]
        for lane in best.lanes_used:
            on_lane = [region for region, there in best.order if there == lane]
            has = self.narrow_at(widths[lane])
            if all(one[region] <= has[region] for region in on_lane):
                widths[lane] = 1
        if tuple(widths) == best.widths:
            return best
        return self._with(best, tuple(widths))

    def _given_to(self, lane: int, widths: Widths, load: Sequence[float]) -> Iterable[Widths]:
        """More cores for one lane: those that no lane has, or from a lane that has less to do."""
        spare = self.shared - sum(widths)
        # Each width of a lane is a pool of threads that is kept: few of them.
        step = max(1, self.shared // _STEPS)
        for other, (has, work) in enumerate(zip(widths, load, strict=True)):
            most = (spare if other == lane else has - 1) // step * step
            if other != lane and work >= load[lane]:
                continue
            for moved in dict.fromkeys((most, most // 2 // step * step, step)):
                if 0 < moved <= most:
                    given = [*widths]
                    given[other] -= 0 if other == lane else moved
                    given[lane] += moved
                    yield tuple(given)

    def _joined(self, best: ListSchedule) -> ListSchedule:
        """Makes wide what is alone on a lane between wide regions, unless the lane has better kernels.

        A phase joins as a whole: each one that is left would have to be entered and left again.
        """
        if best.on_lanes == self.everything:
            return best
        joining: set[int] = set()
        for on_lanes, phase in groupby(best.order, lambda placed: placed[1] >= 0):
            regions, lanes = zip(*phase, strict=True)
            if on_lanes and len(set(lanes)) == 1:
                cores = best.widths[lanes[0]]
                if all(self._is_as_good_wide(region, cores) for region in regions):
                    joining.update(regions)
        joined = self.placed(self.everything - best.on_lanes | joining, best.widths)
        forgiven = sum(self.fused_forks[i] for i in joining)
        return joined if joining and joined.length_ns - forgiven <= best.length_ns else best

    def _is_as_good_wide(self, region: int, cores: int) -> bool:
        """Whether only forks, which fusion may spare, make a region longer on all cores than on a lane."""
        forks = self.fused_forks[region]
        on_lane = self.narrow_at(cores)[region] - (forks if cores > 1 else 0.0)
        return on_lane >= self.wide[region] - forks


def _overlaps(placed: ListSchedule) -> bool:
    return len(placed.lanes_used) > 1
