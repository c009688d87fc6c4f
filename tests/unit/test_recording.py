"""What a strategy may not do: each mistake is an error with the region and the user's line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.graph import Graph, Region, Value
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.recording import Recording
from dynaflow_xla.strategies.base import Context, Recorder, Strategy, record, sizes_of

Make = Callable[..., Graph]


def run(pg: PartitionedGraph, schedule: Callable[[Recorder], Any], lanes: int = 2) -> Recording:
    class Mine(Strategy):
        def schedule(self, s: Recorder) -> None:
            schedule(s)

    return record(Mine(), pg, Context(None, (), "cpu", lanes))


@pytest.fixture
def two(make: Make) -> PartitionedGraph:
    """Region "sort", then region "add"."""
    graph = make("a = sort x; b = add a", "b")
    return partition(graph, [dfx.Op("sort"), dfx.Op("add")])


def test_decisions_are_kept_in_order_with_their_lines(two: PartitionedGraph) -> None:
    def schedule(s: Recorder) -> None:
        for lane in (1, 0):
            (op,) = s.ready()
            s.execute(op, lane=lane)
        assert s.ready() == []

    made = run(two, schedule)
    assert [(d.region, d.lane) for d in made.decisions] == [(0, 1), (1, 0)]
    for decision in made.decisions:
        assert decision.source is not None and decision.source.file.endswith("test_recording.py")


def test_a_forgotten_region_is_named(two: PartitionedGraph) -> None:
    with pytest.raises(PlanError, match=r"Mine\(\) forgot 1 of 2 regions: add .*while ready"):
        run(two, lambda s: s.execute(s.ready()[0]))
    with pytest.raises(PlanError, match="forgot 2 of 2 regions: sort, add"):
        run(two, lambda s: None)


def test_a_schedule_that_did_not_run_is_told(two: PartitionedGraph) -> None:
    def rows(s: Recorder) -> Any:
        yield s.execute(s.ready()[0])

    async def later(s: Recorder) -> None: ...

    for schedule, kind in ((rows, "generator"), (later, "coroutine")):

        class Mine(Strategy):
            def schedule(self, s: Recorder) -> Any:
                return schedule(s)  # noqa: B023

        with pytest.raises(PlanError, match=f"returned a {kind}, so its body did not run"):
            record(Mine(), two, Context(None, (), "cpu", 2))


def test_the_number_of_lanes_is_no_decision(two: PartitionedGraph) -> None:
    def schedule(s: Recorder) -> None:
        s.lanes = 4  # type: ignore[misc]

    with pytest.raises(AttributeError, match="lanes"):
        run(two, schedule)


def test_many_forgotten_regions_are_not_all_listed(make: Make) -> None:
    text = ";".join(f"o{k} = sort x" for k in range(12))
    pg = partition(make(text, " ".join(f"o{k}" for k in range(12))), [dfx.Op("*")])
    with pytest.raises(PlanError, match=r"forgot 12 of 12 regions: sort, .*sort_7, \.\.\."):
        run(pg, lambda s: None)


def test_executed_twice(two: PartitionedGraph) -> None:
    def twice(s: Recorder) -> None:
        op = s.ready()[0]
        s.execute(op)
        s.execute(op)

    with pytest.raises(PlanError, match=r"region 'sort' is executed twice \(first at .*py:\d+\)"):
        run(two, twice)


def test_executed_before_its_inputs(two: PartitionedGraph) -> None:
    with pytest.raises(PlanError, match="'add' is executed before its inputs are done: sort"):
        run(two, lambda s: s.execute(s.handles[1]))


def test_a_strategy_that_never_ends(two: PartitionedGraph) -> None:
    def stuck(s: Recorder) -> None:
        while s.ready():
            pass

    with pytest.raises(PlanError, match=r"without executing one; ready are: sort.*leave the loop"):
        run(two, stuck)


def test_looking_often_is_allowed(two: PartitionedGraph) -> None:
    def patient(s: Recorder) -> None:
        while s.remaining:
            for _ in range(9_000):
                ready = s.ready()
            s.execute(ready[0])

    assert len(run(two, patient).decisions) == 2


@pytest.mark.parametrize("lane", [-1, 2, 100, 0.0, "0", None, True])
def test_a_lane_out_of_range(two: PartitionedGraph, lane: Any) -> None:
    with pytest.raises(PlanError, match=re.escape(f"from 0 to 1; got {lane!r}")):
        run(two, lambda s: s.execute(s.ready()[0], lane=lane))


def test_the_lane_of_an_outer_region_does_not_matter(make: Make) -> None:
    pg = partition(make("a = print x; b = sort x", "b", a={"outer": True}))

    def schedule(s: Recorder) -> None:
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=99 if op.outer else 1)

    assert sorted(d.lane for d in run(pg, schedule).decisions) == [-1, 1]


@pytest.mark.parametrize("what", ["sort", 0, None, object()])
def test_what_is_no_handle(two: PartitionedGraph, what: Any) -> None:
    with pytest.raises(PlanError, match="execute takes a handle from s.ready"):
        run(two, lambda s: s.execute(what))


def test_a_handle_of_another_recording(two: PartitionedGraph) -> None:
    kept: list[Any] = []

    def keep(s: Recorder) -> None:
        kept.extend(s.ready())
        while ready := s.ready():
            s.execute(ready[0])

    run(two, keep)
    with pytest.raises(PlanError, match="'sort' is a handle of another recording"):
        run(two, lambda s: s.execute(kept[0]))


def test_a_replacement_of_an_outer_region(make: Make) -> None:
    pg = partition(make("a = print x", "a", a={"outer": True}))
    with pytest.raises(
        PlanError, match=r"'print' stays in the outer program.*test_recording\.py:\d"
    ):
        run(pg, lambda s: s.execute(s.ready()[0], replace=lambda x: x))


def test_a_replacement_that_is_no_function(two: PartitionedGraph) -> None:
    with pytest.raises(PlanError, match="replace must be a function; got 'fast'"):
        run(two, lambda s: s.execute(s.ready()[0], replace="fast"))  # type: ignore[arg-type]


def test_groups_are_one_region_of_several_nano_batches(make: Make) -> None:
    values = tuple(Value(i, (8,), "float32", 32, -1) for i in range(4))
    graph = Graph("f", values, make("a = k x; b = k x; c = m x", "a").ops, (0,), (1, 2, 3))
    regions = tuple(
        Region(i, name, (i,), (0,), (i + 1,), nano=nano)
        for i, (name, nano) in enumerate([("k@0", 0), ("k@1", 1), ("m@0", 0)])
    )
    pg = PartitionedGraph(graph, regions)

    def together(*which: int) -> Callable[[Recorder], None]:
        def schedule(s: Recorder) -> None:
            handles = s.ready()
            s.execute(tuple(handles[i] for i in which), lane=1)
            while ready := s.ready():
                s.execute(ready[0])

        return schedule

    made = run(pg, together(0, 1))
    assert [(d.region, d.group, d.lane) for d in made.decisions] == [(0, (0, 1), 1), (2, (), 0)]
    assert [d.group for d in run(pg, together(1)).decisions] == [(), (), ()]
    for which in ((0, 2), (0, 0), ()):
        with pytest.raises(PlanError, match="must be one region of several nano-batches"):
            run(pg, together(*which))


def test_what_is_no_strategy(two: PartitionedGraph) -> None:
    with pytest.raises(PlanError, match="a strategy must be a dynaflow_xla.Strategy"):
        record(lambda s: None, two, Context(None, (), "cpu", 2))  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="Strategy must define schedule"):
        record(Strategy(), two, Context(None, (), "cpu", 2))


def test_an_error_of_the_strategy_is_the_users(two: PartitionedGraph) -> None:
    with pytest.raises(ZeroDivisionError):
        run(two, lambda s: 1 // 0)


def test_handles_tell_what_is_behind_them(make: Make) -> None:
    text = "a = sort x; b = top x; c = add a b"
    pg = partition(make(text, "c", b={"cost_ns": 3e6}), [dfx.Op("*", tags={"t"})])
    seen: dict[str, Any] = {}

    def schedule(s: Recorder) -> None:
        assert s.remaining == len(s.handles) == 3
        seen.update({h.name: h for h in s.handles})
        while ready := s.ready():
            s.execute(max(ready, key=lambda op: op.priority))

    made = run(pg, schedule)
    assert [pg.regions[d.region].name for d in made.decisions] == ["top", "sort", "add"]
    assert {n: h.priority for n, h in seen.items()} == {"sort": 2e6, "top": 4e6, "add": 1e6}
    assert seen["add"].tags == {"t", "memory"} and seen["add"].preds == {0, 1}


@pytest.mark.parametrize(
    ("split", "batch", "what"),
    [
        (dfx.Split.even(2), None, "must know the batch: pass in_axes"),
        (dfx.Split.even(5), 4, "asks for 5 nano-batches; the batch has 4 rows"),
        (
            dfx.Split.even(2),
            1,
            "the batch has 1 row. Where .* dfx.Split.even\\(min\\(2, ctx.batch_size or 1",
        ),
        (dfx.Split.of_sizes([3, 2]), 4, "must make up the batch of 4; they have 5"),
        (2, 4, "split must return a dfx.Split; got 2"),
    ],
)
def test_splits_that_cannot_be(split: Any, batch: int | None, what: str) -> None:
    class Splits(Strategy):
        def split(self, ctx: Context) -> Any:
            return split

    with pytest.raises(PlanError, match=what):
        sizes_of(Splits(), Context(batch, (), "cpu", 2))


@pytest.mark.parametrize(
    "bad",
    [
        lambda: dfx.Split.even(0),
        lambda: dfx.Split.even(True),
        lambda: dfx.Split.even(2.0),  # type: ignore[arg-type]
        lambda: dfx.Split.of_sizes([]),
        lambda: dfx.Split.of_sizes([2, 0]),
        lambda: dfx.Split.of_sizes(3),  # type: ignore[arg-type]
        lambda: dfx.Split.balanced([1.0, 2.0], 3),
        lambda: dfx.Split.balanced([1.0, -1.0], 2),
        lambda: dfx.Split.balanced([1.0, float("nan")], 2),
    ],
)
def test_bad_splits(bad: Callable[[], Any]) -> None:
    with pytest.raises(PlanError):
        bad()


def test_good_splits() -> None:
    def sizes(split: dfx.Split, batch: int) -> tuple[int, ...]:
        class Splits(Strategy):
            def split(self, ctx: Context) -> dfx.Split:
                return split

        return sizes_of(Splits(), Context(batch, (), "cpu", 2))[0]

    assert sizes(dfx.Split.none(), 7) == sizes(dfx.Split.even(1), 7) == ()
    assert sizes(dfx.Split.of_sizes([7]), 7) == ()
    assert sizes(dfx.Split.even(3), 7) == (3, 2, 2)
    assert sizes(dfx.Split.balanced([9, 1, 1, 1, 1, 5], 2), 6) == (1, 5)
    assert sizes(dfx.Split.balanced([0, 0, 0], 3), 3) == (1, 1, 1)
