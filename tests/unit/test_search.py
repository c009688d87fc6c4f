"""The search against every plan there is, and what it says of itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.ir.graph import Graph, Operator, OuterReason, Region, Value
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.strategies.base import record
from dynaflow_xla.timelines.simulator import simulate


def regions(seed: int, count: int, outer: bool = False) -> dfx.PartitionedGraph:
    """A random graph of regions, one operator each; ``outer``: the one in the middle stays outside."""
    rng = random.Random(seed)
    values = [Value(0, (1024,), "float32", 4096, -1)]
    ops, made = [], []
    for n in range(count):
        reads = tuple(sorted(rng.sample(range(len(values)), min(len(values), rng.randint(1, 2)))))
        size = 4 * int(10 ** rng.uniform(2, 5))
        values.append(Value(n + 1, (size // 4,), "float32", size, n))
        cost = 10 ** rng.uniform(3.5, 5.5)
        outside = outer and n == count // 2
        ops.append(
            Operator(
                n,
                "op",
                reads,
                (n + 1,),
                cost_ns=cost,
                outer=outside,
                outer_reason=OuterReason("acts"),
            )
        )
        made.append(Region(n, f"r{n}", (n,), reads, (n + 1,), cost_ns=cost, outer=outside))
    read = {v for op in ops for v in op.inputs}
    outputs = tuple(v.id for v in values[1:] if v.id not in read)
    graph = Graph(f"random_{seed}", tuple(values), tuple(ops), (0,), outputs, ("x",))
    return dfx.PartitionedGraph(graph, tuple(made))


class _Fixed(dfx.Strategy):
    def __init__(self, order: Any) -> None:
        self.order = order

    def schedule(self, s: Any) -> None:
        for region, lane in self.order:
            s.execute(s.handles[region], lane=lane)


def _length(strategy: dfx.Strategy, pg: dfx.PartitionedGraph, lanes: int = 2) -> tuple[int, str]:
    made = record(strategy, pg, dfx.Context(None, (), "cpu", lanes))
    plan = build_plan(pg, made, lanes=lanes, strategy_text="s")
    validate(plan, pg)
    return simulate(plan, pg).total_ns, " ".join(made.notes)


def _orders(pg: dfx.PartitionedGraph, done: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    finished = {region for region, _ in done}
    if len(finished) == len(pg.regions):
        yield done
    preds = pg.predecessors()
    for region in pg.regions:
        if region.id not in finished and preds[region.id] <= finished:
            for lane in range(1 if region.outer else 2):
                yield from _orders(pg, (*done, (region.id, lane)))


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_shorter(seed: int) -> None:
    pg = regions(seed, 4, outer=seed % 3 == 2)
    best, told = _length(dfx.Search(), pg)
    assert "no plan is shorter" in told
    assert best == min(_length(_Fixed(order), pg)[0] for order in _orders(pg))


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_never_longer_than_branches(lanes: int) -> None:
    shorter = 0
    for seed in range(8):
        pg = regions(seed, 7)
        found, _ = _length(dfx.Search(nodes=400), pg, lanes)
        branches, _ = _length(dfx.Branches(), pg, lanes)
        assert found <= branches
        shorter += found < branches
    assert shorter > 0 or lanes == 1


def test_what_is_too_large_gets_the_plan_of_branches() -> None:
    pg = regions(1, 13)
    found, told = _length(dfx.Search(), pg)
    assert found == _length(dfx.Branches(), pg)[0] and "13 regions are more than" in told
    found, told = _length(dfx.Search(nodes=3), regions(2, 9))
    assert "given up after 3 beginnings" in told
    assert found <= _length(dfx.Branches(), regions(2, 9))[0]


def test_plans_that_are_looked_at_are_not_counted() -> None:
    before = dfx.stats().plans
    record(dfx.Search(), regions(3, 6), dfx.Context(None, (), "cpu", 2))
    assert dfx.stats().plans == before


@pytest.mark.parametrize("given", [{"regions": 0}, {"nodes": "many"}, {"regions": 1.5}])
def test_bad_numbers(given: Any) -> None:
    with pytest.raises(dfx.PlanError, match=r"Search\(\w+=...\) must be an integer >= 1"):
        dfx.Search(**given)


def test_on_a_function() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((64, 64))
    fast = dfx.schedule(lambda x: jax.numpy.sort(x) @ jax.numpy.cumsum(x, 0), dfx.Search(), lanes=1)
    dfx.verify(fast, x)
    assert "Search: " in dfx.explain(fast, x)
    assert repr(dfx.Search(8)) == "Search(regions=8)"


@pytest.mark.parametrize("seed", [7, 127, 221])
def test_says_what_the_plan_of_branches_takes(seed: int) -> None:
    """Also where the same without wide regions is shorter."""
    pg = regions(seed, 6)
    context = dfx.Context(None, (), "cpu", 2, cores=4)

    def length(strategy: dfx.Strategy) -> tuple[int, str]:
        made = record(strategy, pg, context)
        plan = build_plan(pg, made, lanes=2, strategy_text="s", cores=4, width=context.lane_cores)
        return simulate(plan, pg).total_ns, " ".join(made.notes)

    branches, _ = length(dfx.Branches())
    assert length(dfx.Branches(wide=False))[0] < branches
    assert f"Branches {branches / 1e3:.1f} us" in length(dfx.Search(nodes=50))[1]


def test_auto_has_it_for_small_graphs() -> None:
    from dynaflow_xla.strategies.auto import too_large

    made = dfx.Auto().candidates(2)
    (search,) = (c for c in made if isinstance(c, dfx.Search))
    assert not any(isinstance(c, dfx.Search) for c in dfx.Auto().candidates(1))
    assert not too_large(search, 12)
    assert too_large(search, 13) == "13 regions are more than Search looks at (12)"
    assert not any(too_large(c, 1000) for c in made if c is not search)


def test_auto_hopes_for_lanes_where_regions_may_have_all_cores() -> None:
    from dynaflow_xla.strategies import identity
    from dynaflow_xla.strategies.auto import on_lanes_only

    made = dfx.Auto().candidates(2)
    names = [*map(repr, made)]
    assert names[0] == "Branches(lanes=2)" and names[-1] == "Branches(lanes=2, margin=-0.15)"
    assert [*identity.candidates(on_lanes_only(made))] == [
        "Branches(lanes=2)", "Sequential()", "Search(nodes=100)"
    ]  # fmt: skip
    assert names[-1] not in map(repr, dfx.Auto().candidates(1))
    assert dfx.Auto().margin == 0.02
