"""The simulator against an event-by-event oracle, its bound, and its errors."""

from __future__ import annotations

import heapq
import importlib.util
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dynaflow_xla import machine
from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.graph import Graph, Operator, Value
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.work import Spread
from dynaflow_xla.planning.instructions import Launch, Record, Wait
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.strategies.branches import Branches
from dynaflow_xla.strategies.moldable import Moldable
from dynaflow_xla.strategies.sequential import Sequential
from dynaflow_xla.timelines.simulator import simulate
from dynaflow_xla.timelines.timeline import Timeline

_PATH = Path(__file__).parents[1] / "property" / "test_plans_random.py"
_SPEC = importlib.util.spec_from_file_location("plans_random", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
plans = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(plans)

graphs = st.builds(
    plans.random_graph, st.integers(0, 10**6), st.integers(1, 20), st.sampled_from([0.0, 0.2])
)
overheads = st.fixed_dictionaries(
    {
        "handoff_ns": st.sampled_from([0.0, 5_000.0]),
        "launch_ns": st.sampled_from([0.0, 3_000.0]),
        "bytes_per_ns": st.sampled_from([math.inf, 8.0, 0.01]),
    }
)


def plans_of(pg: PartitionedGraph, seed: int, lanes: int) -> list[Plan]:
    strategies = (Sequential(), Branches(), plans.Scattered(seed))
    return [plans.plan_of(pg, strategy, lanes) for strategy in strategies]


def oracle(
    plan: Plan, costs: list[int], handoff_ns: float, launch_ns: float, bytes_per_ns: float
) -> dict[int, tuple[int, int]]:
    """Region -> (start, end), -1 -> (0, end of all): events popped from a clock, lane by lane."""

    def copy(size: int) -> int:
        return round(size / bytes_per_ns)

    queues: list[list[list[Any]]] = [[[] for _ in range(plan.lanes)]]
    outers: list[Launch] = []
    for instruction in plan.instructions:
        if isinstance(instruction, Launch) and instruction.lane < 0:
            outers.append(instruction)
            queues.append([[] for _ in range(plan.lanes)])
        else:
            queues[-1][instruction.lane].append(instruction)
    found: dict[int, tuple[int, int]] = {}
    now = 0
    for number, stage in enumerate(queues):
        signalled: dict[int, int] = {}
        blocked: dict[int, int] = {}  # event -> lanes come back to the clock when it is signalled
        clock: list[tuple[int, int]] = [
            (now + int(launch_ns), lane) for lane in range(plan.lanes) if stage[lane]
        ]
        waiting: dict[int, list[int]] = {}
        at = [0] * plan.lanes
        have: list[set[int]] = [set() for _ in range(plan.lanes)]
        leaving: list[dict[int, int]] = [{} for _ in range(plan.lanes)]
        heapq.heapify(clock)
        end = now
        while clock:
            time, lane = heapq.heappop(clock)
            if at[lane] == len(stage[lane]):
                end = max(end, time + copy(sum(leaving[lane].values())))
                continue
            instruction = stage[lane][at[lane]]
            if isinstance(instruction, Wait) and instruction.event not in signalled:
                waiting.setdefault(instruction.event, []).append(lane)
                blocked[lane] = time
                continue
            at[lane] += 1
            if isinstance(instruction, Wait):
                time = max(time, signalled[instruction.event] + int(handoff_ns))
            elif isinstance(instruction, Record):
                signalled[instruction.event] = time
                for other in waiting.pop(instruction.event, []):
                    heapq.heappush(clock, (blocked.pop(other), other))
            else:
                ins = {b for b in instruction.ins if plan.buffers[b].kind == "scratch"}
                start = time + copy(sum(plan.buffers[b].bytes for b in ins - have[lane]))
                have[lane] |= ins
                time = start + costs[instruction.region]
                found[instruction.region] = (start, time)
                outs = [plan.buffers[b] for b in instruction.outs]
                time += copy(sum(b.bytes for b in outs if b.kind == "scratch"))
                leaving[lane] |= {b.value: b.bytes for b in outs if b.kind in ("result", "stage")}
            heapq.heappush(clock, (time, lane))
        assert not waiting, "the plan deadlocks"
        now = end
        if number < len(outers):
            region = outers[number].region
            found[region] = (now, now + costs[region])
            now += costs[region]
    found[-1] = (0, now)
    return found


@settings(max_examples=120, deadline=None)
@given(graphs, st.integers(0, 10**6), st.integers(1, 4), overheads)
def test_equal_to_an_event_by_event_simulation(
    graph: Graph, seed: int, lanes: int, overhead: dict[str, float]
) -> None:
    rng = random.Random(seed)
    for pg in (plans.partition(graph), plans.fine_cut(graph)):
        costs = {r.id: rng.choice([0, 7, 1000, 123_456]) for r in pg.regions}
        for plan in plans_of(pg, seed, lanes):
            timeline = simulate(plan, pg, costs, **overhead)
            want = oracle(plan, [costs[r.id] for r in pg.regions], **overhead)
            got = {s.region: (s.start_ns, s.end_ns) for s in timeline.spans if s.kind == "launch"}
            assert got | {-1: (0, timeline.total_ns)} == want


@settings(max_examples=120, deadline=None)
@given(graphs, st.integers(0, 10**6), st.integers(1, 4), overheads)
def test_bound_holds_for_every_plan(
    graph: Graph, seed: int, lanes: int, overhead: dict[str, float]
) -> None:
    """One plan's bound is below every plan's time: it does not depend on the plan."""
    pg = plans.fine_cut(graph)
    rng = random.Random(seed)
    costs = {r.id: rng.choice([0, 7, 1000, 123_456]) for r in pg.regions}
    timelines = [simulate(plan, pg, costs, **overhead) for plan in plans_of(pg, seed, lanes)]
    bounds = {t.bound.ns for t in timelines if t.bound is not None}
    assert len(bounds) == 1
    assert bounds.pop() <= min(t.total_ns for t in timelines)


@settings(max_examples=80, deadline=None)
@given(graphs, st.integers(0, 10**6), st.integers(1, 4), overheads)
def test_spans_fill_lanes_and_explain_themselves(
    graph: Graph, seed: int, lanes: int, overhead: dict[str, float]
) -> None:
    pg = plans.fine_cut(graph)
    for plan in plans_of(pg, seed, lanes):
        timeline = simulate(plan, pg, **overhead)
        for lane in range(lanes):
            own = sorted(
                (s for s in timeline.spans if s.lane == lane), key=lambda s: (s.start_ns, s.end_ns)
            )
            assert all(a.end_ns <= b.start_ns for a, b in zip(own, own[1:], strict=False))
            assert sum(s.duration_ns for s in own) == timeline.total_ns
            assert all(bool(s.reason) == (s.kind in ("wait", "idle")) for s in own)
        for span in timeline.spans:
            assert all(timeline.spans[i].end_ns <= span.end_ns for i in span.after)
        path = timeline.critical_path()
        assert all(a.end_ns <= b.start_ns for a, b in zip(path, path[1:], strict=False))
        if path:
            assert path[-1].end_ns == timeline.total_ns
        assert Timeline.from_json(timeline.to_json()) == timeline


@settings(max_examples=60, deadline=None)
@given(graphs, st.integers(0, 10**6), st.integers(1, 4))
def test_critical_path_has_no_gap_without_overheads(graph: Graph, seed: int, lanes: int) -> None:
    pg = plans.fine_cut(graph)
    for plan in plans_of(pg, seed, lanes):
        timeline = simulate(plan, pg, handoff_ns=0, launch_ns=0, bytes_per_ns=math.inf)
        assert sum(s.duration_ns for s in timeline.critical_path()) == timeline.total_ns


@settings(max_examples=60, deadline=None)
@given(graphs, st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 10**6))
def test_monotone_in_costs(graph: Graph, seed: int, lanes: int, more: int) -> None:
    pg = plans.fine_cut(graph)
    for plan in plans_of(pg, seed, lanes):
        before = simulate(plan, pg)
        for region in pg.regions[:4]:
            after = simulate(plan, pg, {region.id: region.cost_ns + more})
            assert after.total_ns >= before.total_ns
            assert after.bound is not None and before.bound is not None
            assert after.bound.ns >= before.bound.ns
        assert simulate(plan, pg, handoff_ns=5_000 + more).total_ns >= before.total_ns
        assert simulate(plan, pg, launch_ns=3_000 + more).total_ns >= before.total_ns


def branches() -> tuple[PartitionedGraph, Plan]:
    """Two sorts, then an add."""
    values = tuple(Value(i, (8,), "float32", 3200, i - 1) for i in range(4))
    ops = (
        Operator(0, "sort", (0,), (1,), cost_ns=1e6),
        Operator(1, "sort", (0,), (2,), cost_ns=1e6),
        Operator(2, "add", (1, 2), (3,), cost_ns=1e3),
    )
    pg = plans.fine_cut(Graph("g", values, ops, (0,), (3,)))
    return pg, plans.plan_of(pg, Branches(), 2)


def test_by_hand() -> None:
    pg, plan = branches()
    timeline = simulate(plan, pg, {"sort": 1000, "sort_1": 5000, "add": 100})
    launches = {s.name: s for s in timeline.spans if s.kind == "launch"}
    assert (launches["sort"].start_ns, launches["sort"].end_ns) == (3000, 4000)
    slow = launches["sort_1"]
    assert (slow.start_ns, slow.end_ns) == (3000, 8000)
    # Lane 0 sorts and adds: copy out 400, hand-over 5000, copy in 400.
    assert (slow.lane, launches["add"].lane) == (1, 0)
    assert launches["add"].start_ns == 8000 + 400 + 5000 + 400
    assert timeline.total_ns == launches["add"].end_ns + 400
    assert [s.name for s in timeline.critical_path()] == [
        "sort_1", "copy out", "copy in", "add", "copy results",
    ]  # fmt: skip
    assert timeline.idle(0)[0].reason == "waits for 'sort_1' on lane 1"
    bound = timeline.bound
    assert bound is not None
    assert bound.serial_ns == 3000 + 6100 + 400
    assert bound.critical_path_ns == 3000 + 5100 + 400 == bound.ns
    assert bound.shared_ns == 3000 + 6500 // 2


def test_one_lane_reaches_its_bound() -> None:
    pg, _ = branches()
    timeline = simulate(plans.plan_of(pg, Sequential(), 1), pg)
    assert timeline.bound is not None
    assert timeline.bound.ns == timeline.bound.serial_ns == timeline.total_ns
    assert "at best 1.00x, this plan 1.00x" in timeline.summary()


def test_costs_from_a_timeline() -> None:
    pg, plan = branches()
    measured = simulate(plan, pg, {0: 10, 1: 20, 2: 30})
    assert simulate(plan, pg, measured).region_ns() == {0: 10, 1: 20, 2: 30}


def test_a_plan_of_nothing() -> None:
    pg = plans.partition(Graph("same", (Value(0, (1,), "float32", 4, -1),), (), (0,), (0,)))
    timeline = simulate(plans.plan_of(pg, Sequential(), 2), pg)
    assert (timeline.total_ns, timeline.spans, timeline.critical_path()) == (0, (), ())
    assert "no work" in timeline.summary()


@pytest.mark.parametrize(
    "costs, what",
    [
        ({"sorts": 1.0}, "'sorts'"),
        ({3: 1.0}, "3"),
        ({-1: 1.0}, "-1"),
        ({0: -1.0}, "'sort'"),
        ({0: math.nan}, "nan"),
        ({0: math.inf}, "inf"),
        ({0: "1"}, "'1'"),
        ({0.5: 1.0}, "got 0.5"),
        ({None: 1.0}, "got None"),
        ([1.0, 2.0], "costs must be a timeline, or nanoseconds by id or name"),
        (5, "costs must be a timeline, or nanoseconds by id or name"),
    ],
)
def test_bad_costs_are_refused(costs: Any, what: str) -> None:
    pg, plan = branches()
    with pytest.raises(PlanError, match=what):
        simulate(plan, pg, costs)


@pytest.mark.parametrize(
    "option", [{"handoff_ns": -1}, {"launch_ns": math.nan}, {"bytes_per_ns": 0}]
)
def test_bad_overheads_are_refused(option: dict[str, Any]) -> None:
    pg, plan = branches()
    with pytest.raises(PlanError, match=next(iter(option))):
        simulate(plan, pg, **option)


def test_a_wait_without_a_record_is_refused() -> None:
    pg, plan = branches()
    left = tuple(i for i in plan.instructions if not isinstance(i, Record))
    with pytest.raises(PlanError, match="before it is recorded"):
        simulate(msgspec.structs.replace(plan, instructions=left), pg)


class _Placed(plans.Strategy):  # type: ignore[misc]
    def __init__(self, order: Any, widths: Any = None) -> None:
        self.order, self.widths = order, widths

    def schedule(self, s: Any) -> None:
        for region, lane in self.order:
            if lane < 0:
                s.execute(s.handles[region], width="all")
            else:
                width = None if self.widths is None else self.widths[lane]
                s.execute(s.handles[region], lane=lane, width=width)


@pytest.mark.parametrize("widths", [(1,), (1, 1), (1, 1, 1), (4, 1, 2)])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_it_reckons_with_what_planners_reckon_with(
    seed: int, widths: tuple[int, ...], joined: bool
) -> None:
    """Phases of lanes and wide regions, no value from lane to lane: lengths are the planner's own."""
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    values = [Value(0, (1024,), "float32", 4096, -1)]
    ops = []
    for n in range(count):
        size = 4 * rng.randint(1, 50_000)
        values.append(Value(n + 1, (size // 4,), "float32", size, n))
        cost = float(rng.randint(1, 200_000))
        spread = Spread(products=cost * rng.random(), elements=cost * rng.random() / 2)
        ops.append(Operator(n, "sort", (0,), (n + 1,), cost_ns=cost, spread=spread))
    if joined:
        values.append(Value(count + 1, (1,), "float32", 4, count))
        made = tuple(range(1, count + 1))
        ops.append(Operator(count, "join", made, (count + 1,), cost_ns=10_000.0))
    results = (count + 1,) if joined else tuple(range(1, count + 1))
    pg = plans.fine_cut(Graph("g", tuple(values), tuple(ops), (0,), results))
    lanes = len(widths)
    tasks = Moldable(pg, lanes, 1, 8, 65_000.0)
    wide = {r.id for r in pg.regions if rng.random() < 0.3}
    if joined:
        wide.add(max(r.id for r in pg.regions))
    for allotment in (wide, {r.id for r in pg.regions}, wide - {0}, set() if not joined else wide):
        placed = tasks.placed(frozenset(allotment), widths)
        plan = plans.plan_of(pg, _Placed(placed.order, widths), lanes, cores=8)
        assert any(i.lane < 0 for i in plan.instructions if isinstance(i, Launch)) == bool(
            allotment
        )
        found = simulate(plan, pg, program_ns=65_000.0).total_ns
        assert found == pytest.approx(placed.length_ns, abs=len(pg.regions) + 2)


def test_waking_and_handing_over_are_told() -> None:
    """By hand: a program with a wide region is handed over, and lanes beside the first are woken."""
    values = [Value(n, (1,), "float32", 4, n - 1) for n in range(3)]
    ops = tuple(Operator(n, "sort", (0,), (n + 1,), cost_ns=1e5) for n in range(2))
    pg = plans.fine_cut(Graph("g", tuple(values), ops, (0,), (1, 2)))
    known = machine.numbers()

    def total(order: Any, **overheads: float) -> int:
        plan = plans.plan_of(pg, _Placed(order), 2, cores=2)
        return simulate(plan, pg, bytes_per_ns=math.inf, **overheads).total_ns

    apart, one, none = ((0, 0), (1, 1)), ((0, 0), (1, 0)), ((0, -1), (1, -1))
    assert total(apart) == 1e5 + known.lanes_ns + known.lane_wake_ns
    assert total(one) == 2e5 + known.lanes_ns == total(one, program_ns=7e4)
    assert total(none) == 2e5 and total(none, program_ns=7e4) == 2.7e5
    assert total(apart, launch_ns=3e3) == 1.03e5
    for longest in (1.9e5, 2e5):  # of two regions on the thread that calls
        assert total(one, caller_ns=longest) == (2e5 if longest == 2e5 else 2e5 + known.lanes_ns)
        assert total(apart, caller_ns=longest) == total(apart)
    with pytest.raises(PlanError, match="program_ns must be a number of nanoseconds"):
        total(none, program_ns=-1.0)
