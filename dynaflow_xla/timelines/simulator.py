"""Discrete-event simulation of a plan, and what no plan of the same regions can beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from dynaflow_xla import machine
from dynaflow_xla.errors import PlanError, PlanTypeError, bad_argument, checks
from dynaflow_xla.ir.partitioned import PartitionedGraph, contents
from dynaflow_xla.planning.instructions import Instruction, Launch, Merge, Record, Slice, Wait
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.timelines.spans import Bound, Span, SpanKind, one_core_ns
from dynaflow_xla.timelines.timeline import Timeline, complete

_ON_STREAMS = {"handoff_ns": machine.STREAMS_NS, "launch_ns": 0.0, "bytes_per_ns": math.inf}


def where_it_runs(entry: Any) -> dict[str, Any]:
    """Arguments of :func:`simulate` for a planned entry: on a GPU's streams values stay where they are."""
    return on_platform("cuda" if getattr(entry, "on_streams", False) else "cpu")


def on_platform(platform: str) -> dict[str, Any]:
    """The same for plans of a platform, "cuda" or another one."""
    return dict(_ON_STREAMS) if platform == "cuda" else {}


Costs = Mapping[int, float] | Mapping[str, float] | Timeline


def simulate(
    plan: Plan,
    pg: PartitionedGraph,
    costs: Costs | None = None,
    *,
    handoff_ns: float | None = None,
    launch_ns: float | None = None,
    bytes_per_ns: float | None = None,
    program_ns: float = 0.0,
    caller_ns: float = 0.0,
) -> Timeline:
    """Predicts when each region runs.

    Each lane does its instructions in order. A stage begins when the outer region before it ends; a
    lane with work in it begins ``launch_ns`` later. A wait ends ``handoff_ns`` after its event's
    record, or at once if that is over. A region copies in what other lanes made (once a lane),
    runs, and copies out what other lanes read; results are copied at the end of the lane's stage.
    Times are whole nanoseconds. Where a program runs around the lanes, entering and leaving it costs what
    strategies reckon with: they place regions by the same numbers.

    Args:
        plan: A validated plan.
        pg: Its graph.
        costs: Nanoseconds of regions on one core, by id or by name, or a timeline of the same function to
            take them from, which may be of another plan, other widths and another cut: regions are known by
            what they compute. Regions left out cost what the graph estimates. What more cores gain is
            always estimated.
        handoff_ns: From the record of an event to the end of a wait for it; None: what is known of this
            machine (``machine.numbers``).
        launch_ns: From the begin of a stage to that of a lane with work in it; None likewise: for a plan
            that knows wide regions ``lanes_ns``, and ``lane_wake_ns`` more for a stage that wakes lanes,
            ``TURNS_NS`` if the plan has nothing but lanes and is a program of its own (``program_ns``).
        bytes_per_ns: Speed of a copy; ``math.inf`` for none; None likewise: in such a plan results are
            copied into memory that is new.
        program_ns: What the framework takes if any region is wide, see ``strategies.base.Context``.
        caller_ns: A program of one lane, lane 0, of up to so much work starts at once and copies nothing.

    Returns:
        The timeline, with its ``bound``.

    Raises:
        PlanError: a cost, overhead or speed that is negative or no number, a cost of a region that
            does not exist, a timeline without any of the regions, a wait for an event that was not
            recorded.
    """
    run = _run(plan, pg, costs, handoff_ns, launch_ns, bytes_per_ns, program_ns, caller_ns)
    bound = lower_bound(plan, pg, costs, launch_ns=run.launch, bytes_per_ns=run.bytes_per_ns)
    meta: dict[str, Any] = {"name": plan.graph}
    if isinstance(costs, Timeline) and (note := _of_same_regions(pg, costs)[1]):
        meta["notes"] = [note]
    return complete("predicted", run.spans, plan.lanes, meta, bound)


def total_ns(
    plan: Plan,
    pg: PartitionedGraph,
    costs: Costs | None = None,
    *,
    handoff_ns: float | None = None,
    launch_ns: float | None = None,
    bytes_per_ns: float | None = None,
    program_ns: float = 0.0,
    caller_ns: float = 0.0,
) -> int:
    """The ``total_ns`` of :func:`simulate`, without what else a timeline tells."""
    run = _run(plan, pg, costs, handoff_ns, launch_ns, bytes_per_ns, program_ns, caller_ns)
    return max((span.end_ns for span in run.spans), default=0)


def _run(
    plan: Plan,
    pg: PartitionedGraph,
    costs: Costs | None,
    handoff_ns: float | None,
    launch_ns: float | None,
    bytes_per_ns: float | None,
    program_ns: float,
    caller_ns: float,
) -> _Run:
    known, cost = machine.numbers(), region_costs(pg, costs)
    start, wake = known.lane_start_ns, 0.0
    on_caller = all(i.lane == 0 for i in plan.launches) and pg.on_caller_ns() <= caller_ns
    if on_caller:
        start = 0.0
    elif plan.cores:
        start = known.lanes_ns
        # A program of its own with nothing but lanes is mostly called in a row: they are awake.
        awake = program_ns > 0 and all(i.lane >= 0 for i in plan.launches)
        wake = machine.TURNS_NS if awake else known.lane_wake_ns

    def into_results(size: int) -> float:
        """Bytes a nanosecond."""
        if bytes_per_ns is not None:
            return bytes_per_ns
        if on_caller:
            return math.inf
        return known.results_speed(size) if plan.cores else known.copy_bytes_per_ns

    run = _Run(
        plan, pg, cost,
        handoff_ns=known.hand_over_ns if handoff_ns is None else handoff_ns,
        launch_ns=start if launch_ns is None else launch_ns,
        wake_ns=wake if launch_ns is None else 0.0,
        bytes_per_ns=known.copy_bytes_per_ns if bytes_per_ns is None else bytes_per_ns,
        into_results=into_results,
        program_ns=program_ns,
    )  # fmt: skip
    for instruction in plan.instructions:
        run.step(instruction)
    run.end_stage()
    return run


def lower_bound(
    plan: Plan,
    pg: PartitionedGraph,
    costs: Costs | None = None,
    *,
    launch_ns: float = 0.0,
    bytes_per_ns: float = math.inf,
) -> Bound:
    """What no plan over the same regions and lanes can beat, and what one lane would take.

    Hand-overs and copies between lanes are left out: some plan may do without. Each result is
    copied once and some lane program starts, in any plan, where regions run on lanes only. Where they may
    have all cores, each counts with the better of its two widths, and nothing else is certain.

    Args:
        plan: The plan, for its launches, its results and its number of lanes.
        pg: Its graph.
        costs: As for :func:`simulate`.
        launch_ns: As for :func:`simulate`.
        bytes_per_ns: As for :func:`simulate`.
    """
    cost, dispatch = region_costs(pg, costs), _time("launch_ns", launch_ns)
    finish: dict[int, int] = {}
    copied: set[int] = set()
    longest = outer_end = outer = inner = area = stages = core_ns = 0
    lane_width = plan.lane_width
    lane_ran = False

    def on_lane(region: int) -> tuple[int, int]:
        """The least time on a lane of a plan, this one or another, and the least time of cores."""
        took = {n: ns_at(pg, cost, region, n) for n in (1, lane_width, plan.cores)}
        return min(took.values()), min(n * ns for n, ns in took.items())

    for launch in plan.launches:
        reads = [plan.buffers[b].value for b in launch.ins]
        begin = max((finish.get(v, 0) for v in reads), default=0)
        if not pg.regions[launch.region].outer and plan.cores:
            # Another plan may give it another width: what it takes in the best case.
            on_its_lane, of_cores = on_lane(launch.region)
            took = [on_its_lane, ns_at(pg, cost, launch.region, plan.cores, wide=True)]
            core_ns += min(of_cores, took[1] * plan.cores)
            end = begin + min(took)
            inner += ns_at(pg, cost, launch.region, lane_width)
            area += min(took[0], took[1] * max(plan.lanes, 1))
            finish.update({plan.buffers[b].value: end for b in launch.outs})
            longest = max(longest, end)
            continue
        results = {
            plan.buffers[b].value: plan.buffers[b].bytes
            for b in launch.outs
            if plan.buffers[b].kind == "result" and launch.lane >= 0
        }
        copy = sum(int(size / bytes_per_ns) for v, size in results.items() if v not in copied)
        copied.update(results)
        if launch.lane < 0:
            begin = max(begin, outer_end)
            outer += ns_at(pg, cost, launch.region, max(1, plan.cores), wide=True)
            lane_ran = False
        else:
            begin = max(begin, dispatch)
            took_there = ns_at(pg, cost, launch.region, lane_width)
            inner += took_there + copy
            area += took_there + copy
            stages += not lane_ran
            lane_ran = True
        wide = launch.lane < 0
        end = begin + ns_at(pg, cost, launch.region, plan.cores_of(launch), wide=wide)
        outer_end = end if launch.lane < 0 else outer_end
        finish.update({plan.buffers[b].value: end for b in launch.outs})
        longest = max(longest, end + copy)
    shared = -(-area // max(plan.lanes, 1))
    if 0 < plan.lane_cores <= plan.cores:  # else lanes have threads that are no cores
        shared = max(shared, -(-core_ns // plan.cores))
    shared += outer + (dispatch if stages else 0)
    if plan.cores and inner:
        stages = 1
    return Bound(outer + inner + dispatch * stages, longest, shared, plan.lanes)


def ns_at(
    pg: PartitionedGraph, cost: Sequence[int], region: int, cores: int, *, wide: bool = False
) -> int:
    """Nanoseconds of a region on so many cores, a lane's or (``wide``) all, from those on a lane of one."""
    of = pg.regions[region]
    if of.cost_ns <= 0 or (there := of.cost_at(cores, wide=wide)) == of.cost_ns:
        return cost[region]
    return round(cost[region] * there / of.cost_ns)


def region_costs(pg: PartitionedGraph, costs: Costs | None) -> list[int]:
    """Whole nanoseconds on one core by region."""
    made: list[float] = [r.cost_ns for r in pg.regions]
    names = {r.name: r.id for r in pg.regions}
    given: Any = {} if costs is None else costs
    if isinstance(costs, Timeline):
        given = _of_same_regions(pg, costs)[0]
    elif not isinstance(given, Mapping):
        raise PlanTypeError(
            "costs must be a timeline, or nanoseconds by id or name of a region, "
            f"{{{pg.regions[0].name if pg.regions else 0!r}: 1e6}}; got {costs!r}"
        )
    for key, value in given.items():
        number = names.get(key) if isinstance(key, str) else checks.integer(key)
        if number is None or not 0 <= number < len(made):
            raise PlanError(
                f"costs must name regions of {pg.graph.name!r} by id (0 to {len(made) - 1}) or name; "
                f"got {key!r}"
            )
        made[number] = _time(f"the cost of region {pg.regions[number].name!r}", value)
    return [round(value) for value in made]


def _of_same_regions(pg: PartitionedGraph, timeline: Timeline) -> tuple[dict[int, float], str]:
    """Times of the regions that a timeline knows, and a sentence about those that it does not.

    A region is known by what it computes; of several that compute the same, by its name, or it takes their
    mean.

    Raises:
        PlanError: the timeline knows none of the regions.
    """
    by_content: dict[str, list[Span]] = {}
    by_name: dict[tuple[str, str], list[Span]] = {}
    for span in timeline.spans:
        if span.kind == "launch" and span.content:
            by_content.setdefault(span.content, []).append(span)
            by_name.setdefault((span.content, span.name), []).append(span)
    found: dict[int, float] = {}
    missing = []
    for region, content in zip(pg.regions, contents(pg), strict=True):
        same = by_name.get((content, region.name)) or by_content.get(content)
        if same:
            times = [
                one_core_ns(region, span.duration_ns, span.cores, wide=span.lane < 0)
                for span in same
            ]
            found[region.id] = sum(times) / len(times)
        else:
            missing.append(region.name)
    if not missing:
        return found, ""
    if not found:
        raise PlanError(
            f"costs must be a timeline of the same regions of {pg.graph.name!r}; that of "
            f"{timeline.name!r} has none of its {len(missing)} regions: it is of another function, other "
            "shapes or another cut. Profile this one, or give costs by region name"
        )
    some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    return found, (
        f"{len(missing)} of {len(pg.regions)} regions are not in the timeline given as costs, which is of "
        f"another cut; they cost what is estimated: {some}"
    )


def _time(what: str, value: float) -> int:
    number = checks.real(value)
    if number is None or not 0 <= number < math.inf:
        raise bad_argument(
            value, Real, f"{what} must be a number of nanoseconds >= 0; got {value!r}"
        )
    return round(number)


class _Run:
    """State of a simulation: a clock a lane, events, spans so far."""

    def __init__(
        self,
        plan: Plan,
        pg: PartitionedGraph,
        cost: list[int],
        *,
        handoff_ns: float,
        launch_ns: float,
        wake_ns: float,
        bytes_per_ns: float,
        into_results: Callable[[int], float],
        program_ns: float,
    ):
        self.plan, self.pg, self.cost = plan, pg, cost
        self.contents = contents(pg)
        self.handoff = _time("handoff_ns", handoff_ns)
        self.launch = _time("launch_ns", launch_ns)
        if not bytes_per_ns > 0:
            raise PlanError(f"bytes_per_ns must be a number > 0; got {bytes_per_ns!r}")
        self.bytes_per_ns, self._into_results = bytes_per_ns, into_results
        self.spans: list[Span] = []
        stages = plan.stages()
        self._wakes = [  # by stage
            round(wake_ns) if any(i.lane > 0 for i in instructions) else 0
            for instructions, _ in stages
        ]
        self._stage = 0
        around = any(outer is not None for _, outer in stages)
        self._stage_start = _time("program_ns", program_ns) if around else 0
        self._barrier: tuple[int, ...] = ()  # span of the outer region before this stage
        self._clock: dict[int, int] = {}  # by lane, of lanes that started in this stage
        self._last: dict[int, int] = {}  # by lane, its last span in this stage
        self._received: set[tuple[int, int]] = set()
        self._results: dict[int, dict[int, int]] = {}  # by lane: value -> bytes
        self._recorded: dict[int, tuple[int, int, str, int]] = {}
        self._producer: dict[int, int] = {}

    def step(self, instruction: Instruction) -> None:
        if isinstance(instruction, Launch) and instruction.lane < 0:
            self._outer(instruction)
            return
        if isinstance(instruction, Slice | Merge):
            return  # they say where bytes lie and take no time
        lane = instruction.lane
        if lane not in self._clock:
            wake = self._wakes[self._stage]
            self._clock[lane] = self._stage_start + self.launch + wake
        if isinstance(instruction, Launch):
            self._launch(instruction)
        elif isinstance(instruction, Record):
            name = next(
                (s.name for s in reversed(self.spans) if s.lane == lane and s.kind == "launch"), ""
            )
            last = self._last.get(lane, -1)
            self._recorded[instruction.event] = (self._clock[lane], last, name, lane)
        else:
            self._wait(instruction)

    def _add(self, lane: int, name: str, kind: SpanKind, length: int, **more: Any) -> None:
        begin = self._clock[lane]
        after = tuple(more.pop("after", ()))
        if lane not in self._last:
            after = (*after, *self._barrier)
        self._last[lane] = len(self.spans)
        self._clock[lane] = begin + length
        self.spans.append(Span(lane, name, kind, begin, begin + length, after=after, **more))

    def _copy(self, lane: int, name: str, size: int, speed: float) -> None:
        if took := round(size / speed):
            self._add(lane, name, "copy", took, bytes_moved=size)

    def _region(self, launch: Launch) -> dict[str, Any]:
        region = self.pg.regions[launch.region]
        reads = [self.plan.buffers[b].value for b in launch.ins]
        return {
            "region": region.id,
            "nano": launch.nano,
            "resource": region.resource,
            "flops": region.flops,
            "bytes_moved": region.bytes_moved,
            "source": str(region.source or ""),
            "content": self.contents[region.id],
            "cores": self.plan.cores_of(launch),
            "after": sorted({self._producer[v] for v in reads if v in self._producer}),
        }

    def _made(self, launch: Launch, index: int) -> None:
        for b in launch.outs:
            self._producer[self.plan.buffers[b].value] = index

    def _launch(self, launch: Launch) -> None:
        lane, buffers = launch.lane, self.plan.buffers
        new = {b for b in launch.ins if buffers[b].kind == "scratch"}
        new = {b for b in new if (lane, b) not in self._received}
        self._received.update((lane, b) for b in new)
        self._copy(lane, "copy in", sum(buffers[b].bytes for b in new), self.bytes_per_ns)
        took = ns_at(self.pg, self.cost, launch.region, launch.width)
        self._add(lane, launch.name, "launch", took, **self._region(launch))
        self._made(launch, len(self.spans) - 1)
        shared = sum(buffers[b].bytes for b in launch.outs if buffers[b].kind == "scratch")
        self._copy(lane, "copy out", shared, self.bytes_per_ns)
        results = self._results.setdefault(lane, {})
        leaving = [buffers[b] for b in launch.outs if buffers[b].kind in ("result", "stage")]
        results.update({b.value: b.bytes for b in leaving})

    def _wait(self, wait: Wait) -> None:
        if wait.event not in self._recorded:
            raise PlanError(f"lane {wait.lane} waits for event {wait.event} before it is recorded")
        time, span, name, lane = self._recorded[wait.event]
        length = max(0, time + self.handoff - self._clock[wait.lane])
        self._add(
            wait.lane, f"wait for {name!r}", "wait", length,
            reason=f"waits for {name!r} on lane {lane}", after=(span,) if span >= 0 else (),
        )  # fmt: skip

    def _outer(self, launch: Launch) -> None:
        self.end_stage()
        more = self._region(launch)
        more["after"] = tuple(sorted({*more["after"], *self._last.values(), *self._barrier}))
        cores = self.plan.cores_of(launch)
        took = ns_at(self.pg, self.cost, launch.region, cores, wide=True)
        end = self._stage_start + took
        self.spans.append(Span(-1, launch.name, "launch", self._stage_start, end, **more))
        self._barrier = (len(self.spans) - 1,)
        self._made(launch, len(self.spans) - 1)
        self._stage_start = end
        self._stage += 1
        self._last = {}

    def end_stage(self) -> None:
        """Copies results out; the next stage starts when all lanes are done."""
        for lane, results in self._results.items():
            size = sum(results.values())
            self._copy(lane, "copy results", size, self._into_results(size))
        self._stage_start = max([self._stage_start, *self._clock.values()])
        self._clock, self._results, self._received = {}, {}, set()
