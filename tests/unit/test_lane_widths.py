"""How many cores a lane has is a decision of the plan: asked for, shared out, and told."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.advice import report
from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.graph import Graph
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.rules import Op
from dynaflow_xla.ir.work import Spread
from dynaflow_xla.planning import table
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.strategies.base import Context, Recorder, Strategy, record
from dynaflow_xla.strategies.moldable import Moldable
from dynaflow_xla.timelines.simulator import simulate

MS = 1e6
Make = Callable[..., Graph]


def context(lanes: int = 4, cores: int = 16, lane_cores: int = 4, free: bool = True) -> Context:
    return Context(None, (), "cpu", lanes, cores=cores, lane_cores=lane_cores, free_widths=free)


class Calls(Strategy):
    """Executes regions in order, with the arguments given for each."""

    def __init__(self, *given: dict[str, Any]) -> None:
        self.given = given

    def schedule(self, s: Recorder) -> None:
        for given in self.given:
            s.execute(s.ready()[0], **given)


def plan_of(pg: PartitionedGraph, strategy: Strategy, ctx: Context) -> Plan:
    recording = record(strategy, pg, ctx)
    plan = build_plan(
        pg, recording, lanes=ctx.lanes, strategy_text=repr(strategy), cores=ctx.cores,
        width=ctx.lane_cores,
    )  # fmt: skip
    validate(plan, pg)
    assert Plan.from_text(plan.to_text()) == plan == Plan.from_json(plan.to_json())
    return plan


@pytest.fixture
def three(make: Make) -> PartitionedGraph:
    return partition(make("a = sort x; b = dot x; c = add a", "b c"), [dfx.Op("*")])


def test_a_lane_has_the_cores_that_are_asked_for(three: PartitionedGraph) -> None:
    calls = Calls({"lane": 1, "width": 7}, {"lane": 0}, {"lane": 1})
    assert plan_of(three, calls, context()).widths == {1: 7, 0: 4}
    late = Calls({"lane": 1}, {"lane": 0, "width": 1}, {"lane": 1, "width": 9})
    assert plan_of(three, late, context()).widths == {1: 9, 0: 1}, "in the whole plan"
    wide = Calls({"lane": 1, "width": 16}, {"lane": 0, "width": "all"}, {"lane": 2, "width": 15})
    made = plan_of(three, wide, context())
    assert made.widths == {2: 15} and [i.lane for i in made.launches] == [-1, -1, 2]


def test_a_lane_has_one_number_of_cores(three: PartitionedGraph) -> None:
    calls = Calls({"lane": 1, "width": 7}, {"lane": 1, "width": 3})
    message = (
        r"region 'dot': lane 1 has 7 cores since region 'sort' \(at .*test_lane_widths.py:\d+.*\), and a "
        r"lane has the same in the whole plan; got width=3. .*'all'"
    )
    with pytest.raises(PlanError, match=message):
        record(calls, three, context())


@pytest.mark.parametrize("width", [0, -1, 17, 2.5, True, "four"])
def test_numbers_that_no_lane_has(three: PartitionedGraph, width: Any) -> None:
    with pytest.raises(PlanError, match="width must be 'all', or a number of cores from 1 to 16"):
        record(Calls({"width": width}), three, context())


def test_where_lanes_have_no_cores_there_is_one_width(three: PartitionedGraph) -> None:
    none = context(cores=0, lane_cores=1)
    with pytest.raises(PlanError, match=r"width must be 'all', or the cores of a lane \(1\)"):
        record(Calls({"width": 2}), three, none)
    assert none.share(2) == 1


def test_a_lane_may_have_more_than_there_are_if_the_user_says_so(three: PartitionedGraph) -> None:
    calls = Calls({"lane": 0, "width": 32}, {"lane": 1, "width": 2}, {"lane": 0})
    made = plan_of(three, calls, context(cores=16, lane_cores=32, free=False))
    assert made.widths == {0: 32, 1: 2} and made.lane_cores == 34
    assert "34 threads for 16 cores" in "\n".join(table.widths(made, three, 16))


def test_outer_regions_have_no_lane_whose_cores_could_change(make: Make) -> None:
    graph = make("a = io x; b = sort x", "a b", a={"outer": True})
    pg = partition(graph, [dfx.Op("*")])
    recording = record(Calls({"lane": 0, "width": 2}, {"lane": 0, "width": 3}), pg, context())
    assert recording.widths == {0: 3}


def test_an_even_share() -> None:
    free, fixed = context(), context(free=False)
    assert [free.share(n) for n in (1, 2, 3, 4, 5, 16, 99)] == [16, 8, 5, 4, 4, 4, 4]
    assert [fixed.share(n) for n in (1, 2, 16)] == [4, 4, 4]
    with pytest.raises(PlanError, match="lanes must be an integer >= 1; got 0"):
        free.share(0)


def beside(make: Make, *costs_ms: float, parallel: float = 1.0) -> PartitionedGraph:
    """Products that need nothing of each other."""
    names = [f"p{n}" for n in range(len(costs_ms))]
    given = {
        name: {"cost_ns": ms * MS, "spread": Spread(products=ms * MS * parallel, forks=1.0)}
        for name, ms in zip(names, costs_ms, strict=True)
    }
    text = "; ".join(f"{name} = dot x" for name in names)
    return partition(make(text, " ".join(names), **given), [dfx.Op("*")])


def test_lanes_share_out_what_others_do_not_use(make: Make) -> None:
    two = plan_of(beside(make, 8, 8), dfx.Branches(), context(8, 16, 2))
    assert sorted(two.widths.values()) == [8, 8]
    asked = plan_of(beside(make, 8, 8), dfx.Branches(), context(8, 16, 2, free=False))
    assert not asked.widths or set(asked.widths.values()) == {2}, "the user says so"
    only = plan_of(beside(make, 8, 8), dfx.Branches(wide=False), context(8, 16, 2))
    assert sorted(only.widths.values()) == [8, 8]


def test_long_regions_get_cores_of_short_ones(make: Make) -> None:
    pg = beside(make, 24, 6, 6)
    plan = plan_of(pg, dfx.Branches(wide=False), context(3, 16, 5))
    widths = sorted(plan.widths.values())
    assert sum(widths) <= 16 and widths[-1] >= 9
    alike = plan_of(pg, dfx.Branches(wide=False), context(3, 16, 5, free=False))
    assert simulate(plan, pg).total_ns < 0.8 * simulate(alike, pg).total_ns


def test_what_cores_do_not_help_gets_none(make: Make) -> None:
    pg = beside(make, 8, 8, parallel=0.0)
    for strategy in (dfx.Branches(), dfx.Branches(wide=False)):
        plan = plan_of(pg, strategy, context(2, 16, 8))
        assert sorted(plan.widths.values()) == [1, 1], "more threads would gain nothing"


@pytest.mark.parametrize("seed", range(40))
def test_sharing_out_is_never_predicted_to_lose(make: Make, seed: int) -> None:
    rng = random.Random(seed)
    text, given, names = [], {}, ["x"]
    for n in range(rng.randint(2, 12)):
        reads = rng.sample(names, min(len(names), rng.randint(1, 2)))
        text.append(f"r{n} = dot {' '.join(reads)}")
        ns = rng.uniform(0.05, 5) * MS
        given[f"r{n}"] = {"cost_ns": ns, "spread": Spread(products=ns * rng.random(), forks=1.0)}
        names.append(f"r{n}")
    pg = partition(make("; ".join(text), " ".join(names[1:]), **given), [dfx.Op("*")])
    cores, lanes = rng.choice([(4, 2), (16, 8), (16, 3), (64, 8)])
    even = cores // lanes
    free = Moldable(pg, lanes, even, cores, shared=cores).best()
    alike = Moldable(pg, lanes, even, cores).best()
    assert free.length_ns <= alike.length_ns * 1.02, "improving is greedy"
    assert sum(free.widths[lane] for lane in free.lanes_used) <= cores
    shared = plan_of(pg, dfx.Branches(), context(lanes, cores, even))
    assert all(width == free.widths[lane] for lane, width in shared.widths.items())


def test_nano_batches_share_all_cores(make: Make) -> None:
    pg = beside(make, 1, 1)
    regions = tuple(replace(region, nano=n) for n, region in enumerate(pg.regions))
    split = PartitionedGraph(pg.graph, regions, pg.notes)
    for strategy in (dfx.NanoBatch(2), dfx.DualBatch()):
        assert plan_of(split, strategy, context(8, 16, 2)).widths == {0: 8, 1: 8}
        assert plan_of(split, strategy, context(8, 16, 2, free=False)).widths == {0: 2, 1: 2}
        assert plan_of(split, strategy, context(2, 2, 1)).widths == {0: 1, 1: 1}


def test_one_lane_of_sequential_has_one_core(three: PartitionedGraph) -> None:
    assert plan_of(three, dfx.Sequential(wide=False), context()).widths == {0: 1}
    assert plan_of(three, dfx.Sequential(wide=False), context(free=False)).widths == {0: 4}


def test_explain_and_why_tell_widths(three: PartitionedGraph) -> None:
    plan = plan_of(three, Calls({"lane": 1, "width": 7}, {"lane": 0}, {"lane": 1}), context())
    assert "1 (7)" in "\n".join(table.region_table(plan, three))
    assert report._lanes(plan) == "lanes of 4, 7 cores"


@pytest.mark.parametrize(
    ("lanes", "cores", "lane_cores"),
    [(8, 32, 8), (8, 8, 2), (8, 4, 2), (2, 2, 2), (2, 3, 2), (8, 1, 2), (3, 64, 21), (1, 16, 16)],
)
@pytest.mark.parametrize("seed", range(6))
def test_lanes_and_cores_that_do_not_go_together(
    make: Make, seed: int, lanes: int, cores: int, lane_cores: int
) -> None:
    """Whatever a context says: plans are made, and no lane of Branches or Sequential becomes all cores."""
    rng = random.Random(seed)
    pg = beside(make, *(rng.uniform(0.1, 20) for _ in range(rng.randint(2, 9))))
    ctx = context(lanes, cores, lane_cores)
    for strategy in (
        dfx.Branches(), dfx.Branches(wide=False), dfx.Sequential(), dfx.Sequential(wide=False),
        dfx.Search(nodes=50),
    ):  # fmt: skip
        plan = plan_of(pg, strategy, ctx)
        if not getattr(strategy, "wide", True):
            assert all(launch.lane >= 0 for launch in plan.launches), strategy
        if isinstance(strategy, dfx.Branches):
            assert plan.lane_cores <= max(cores, len(plan.widths))


@pytest.mark.parametrize("size", [1 << 10, 1 << 18, 1 << 20])
@pytest.mark.parametrize("readers", [1, 4, 12])
def test_a_value_is_copied_once_a_lane(make: Make, readers: int, size: int) -> None:
    """However many regions read it there: planner and simulator agree, and lanes are used."""
    names = [f"r{n}" for n in range(readers)]
    text = "a = sort x; b = sort x; " + "; ".join(f"{n} = cos a b" for n in names)
    given = {n: {"cost_ns": MS} for n in names} | dict.fromkeys("ab", {"cost_ns": 2 * MS})
    graph = make(text, " ".join(names), **given)
    large = {value for op in graph.ops if op.kind == "sort" for value in op.outputs}
    values = tuple(
        replace(v, shape=(size,), bytes=4 * size) if v.id in large else v for v in graph.values
    )
    pg = partition(replace(graph, values=values), [dfx.Op("*")])
    ctx = context(2, 2, 1, free=False)
    tasks = Moldable(pg, 2, 1, 2)
    placed = tasks.placed(frozenset(), tasks.even)
    found = simulate(plan_of(pg, Ordered(placed.order), ctx), pg).total_ns
    assert found == pytest.approx(placed.length_ns, rel=0.03)
    passed = Moldable(pg, 2, 1, 2, copies=False).placed(frozenset(), (1, 1))
    assert passed.length_ns <= placed.length_ns


class Ordered(Strategy):
    def __init__(self, order: tuple[tuple[int, int], ...]) -> None:
        self.order = order

    def schedule(self, s: Recorder) -> None:
        for region, lane in self.order:
            s.execute(s.handles[region], lane=lane)


def test_no_plan_is_predicted_to_beat_the_bound(make: Make) -> None:
    pg = beside(make, *[16.0] * 8, parallel=0.9)
    ctx = context(8, 16, 2)
    plans = [
        plan_of(pg, strategy, ctx)
        for strategy in (dfx.Branches(), dfx.Branches(wide=False), dfx.Sequential(wide=False))
    ]
    shortest = min(simulate(plan, pg).total_ns for plan in plans)
    for plan in plans:
        bound = simulate(plan, pg).bound
        least = max(bound.critical_path_ns, bound.shared_ns)
        assert 8 * 16 * MS / 16 <= least <= shortest, "cores have that much to do"
    two = plan_of(beside(make, *[16.0] * 8, parallel=0.95), dfx.Branches(), context(2, 2, 1))
    assert simulate(two, pg).bound.shared_ns >= 64 * MS


@pytest.mark.parametrize("lanes", [2, 3, 5, 8])
def test_branches_of_fewer_lanes_share_all_cores_too(make: Make, lanes: int) -> None:
    for wide in (True, False):
        plan = plan_of(beside(make, 8, 8), dfx.Branches(lanes, wide), context(8, 16, 2))
        assert sorted(plan.widths.values()) == [8, 8]
    one = plan_of(beside(make, 8, 8), dfx.Branches(1, False), context(8, 16, 2))
    assert set(one.widths) == {0} and one.lane_cores < 16


def test_widths_come_in_few_numbers(make: Make) -> None:
    """A lane's width is a pool of threads that is kept: 64 cores are given in steps of four."""
    seen = set()
    for seed in range(20):
        rng = random.Random(seed)
        pg = beside(make, *(rng.uniform(1, 50) for _ in range(8)))
        seen |= set(plan_of(pg, dfx.Branches(), context(8, 64, 8)).widths.values())
    assert len(seen) <= 24


def test_threads_of_a_pool_are_no_cores(make: Make) -> None:
    """PyTorch with one thread on two cores: two lanes have a core each."""
    two = partition(make("a = sort x; b = sort y", "a b", inputs="x y"), [Op("*")])
    made = plan_of(two, Calls({"lane": 0}, {"lane": 1}), context(lanes=2, cores=1, lane_cores=1))
    assert table.widths(made, two, 2, threads=1) == []
    assert "planned for 1 core; this process may use 3 now (threads of PyTorch)" in "".join(
        table.widths(made, two, 2, threads=3)
    )
    assert "2 threads for 1 core" in "\n".join(table.widths(made, two, 1, threads=1))
