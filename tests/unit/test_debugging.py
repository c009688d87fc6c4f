"""Random orders of a plan keep what the plan keeps, and its memory is followed by the byte."""

from __future__ import annotations

import pickle
import random
from typing import Any

import msgspec
import pytest

from dynaflow_xla.debugging import orders
from dynaflow_xla.debugging.report import (
    DebugError,
    DebugReport,
    DeterminismError,
    DeterminismReport,
    Finding,
    RegionName,
)
from dynaflow_xla.debugging.shadow import Shadow, Unwritten
from dynaflow_xla.errors import VerificationError
from dynaflow_xla.ir.graph import Graph, Operator, Region, Value
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.instructions import Launch, Record, Wait
from dynaflow_xla.planning.order import HappensBefore
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.recording import Decision, Recording
from dynaflow_xla.planning.validate import validate


def chain(*reads: tuple[int, ...], outer: int = -1) -> PartitionedGraph:
    """Regions of one operator each, which read the input (-1) or what earlier regions make."""
    n = len(reads)
    values = [Value(0, (4,), "float32", 16, -1)]
    values += [Value(i + 1, (4,), "float32", 16, i) for i in range(n)]
    ops, regions = [], []
    for i, read in enumerate(reads):
        ins = tuple(r + 1 for r in read)
        ops.append(Operator(i, "add", ins, (i + 1,), outer=i == outer))
        regions.append(Region(i, f"r{i}", (i,), ins, (i + 1,), outer=i == outer))
    graph = Graph("g", tuple(values), tuple(ops), (0,), (n,))
    return PartitionedGraph(graph, tuple(regions))


def planned(pg: PartitionedGraph, *lanes: int) -> Plan:
    decisions = tuple(Decision(i, lane) for i, lane in enumerate(lanes))
    made = build_plan(pg, Recording(decisions), lanes=max(*lanes, 0) + 1, strategy_text="test")
    validate(made, pg)
    return made


DIAMOND = chain((-1,), (0,), (0,), (1, 2))


def launched(plan: Plan) -> list[int]:
    return [i.region for i in plan.instructions if isinstance(i, Launch)]


def followed(plan: Plan) -> None:
    """Runs a plan's memory in the order of its instructions."""
    shadow = Shadow(plan)
    for instruction in plan.instructions:
        if isinstance(instruction, Launch):
            shadow.read(instruction)
            shadow.wrote(instruction)


@pytest.mark.parametrize("seed", range(8))
def test_an_order_keeps_lanes_events_and_barriers(seed: int) -> None:
    pg = chain((-1,), (-1,), (0, 1), (2,), (2,), (3, 4), outer=2)
    plan = planned(pg, 0, 1, -1, 0, 1, 1)
    made = orders.interleaved(plan, random.Random(seed), first=seed % 6)
    assert sorted(map(repr, made.instructions)) == sorted(map(repr, plan.instructions))
    before = HappensBefore(plan.instructions)
    place = {id(i): n for n, i in enumerate(made.instructions)}
    numbers = [place[id(i)] for i in plan.instructions]
    for a in range(len(numbers)):
        for b in range(len(numbers)):
            assert not before(a, b) or numbers[a] < numbers[b]
    followed(made)


def test_a_region_runs_as_early_as_it_may() -> None:
    plan = planned(DIAMOND, 0, 0, 1, 0)
    for seed in range(5):
        assert launched(orders.interleaved(plan, random.Random(seed), first=2))[:2] == [0, 2]
        assert launched(orders.interleaved(plan, random.Random(seed), first=1))[:2] == [0, 1]


@pytest.mark.parametrize("lanes", [(0, 0, 1, 0), (0, 1, 2, 1), (1, 0, 1, 0)])
def test_without_any_one_wait_some_order_reads_what_is_not_there(lanes: tuple[int, ...]) -> None:
    """Not by chance: the region behind the wait runs as early as the rest lets it."""
    plan = planned(DIAMOND, *lanes)
    waits = [n for n, i in enumerate(plan.instructions) if isinstance(i, Wait)]
    assert waits
    for wait in waits:
        kept = tuple(i for n, i in enumerate(plan.instructions) if n != wait)
        broken = msgspec.structs.replace(plan, instructions=kept)
        found = []
        for first in range(4):
            try:
                followed(orders.interleaved(broken, random.Random(0), first))
            except Unwritten as error:
                found.append(error.launch.region)
        behind = next(i.region for i in plan.instructions[wait:] if isinstance(i, Launch))
        assert behind in found


def test_scratch_that_is_written_over_no_longer_holds_a_value() -> None:
    plan = planned(DIAMOND, 0, 1, 2, 1)
    scratch = [b.id for b in plan.buffers if b.kind == "scratch"]
    assert len(scratch) > 1
    moved = tuple(
        msgspec.structs.replace(b, offset=0) if b.kind == "scratch" else b for b in plan.buffers
    )
    with pytest.raises(Unwritten, match="has been written over|is not written yet"):
        for first in range(4):
            followed(
                orders.interleaved(
                    msgspec.structs.replace(plan, buffers=moved), random.Random(1), first
                )
            )


def test_a_lane_that_waits_for_nothing_that_comes_is_a_deadlock_with_a_name() -> None:
    plan = planned(DIAMOND, 0, 0, 1, 0)
    kept = tuple(i for i in plan.instructions if not isinstance(i, Record))
    with pytest.raises(orders.Deadlock, match="nothing can run") as found:
        orders.interleaved(msgspec.structs.replace(plan, instructions=kept), random.Random(0))
    assert found.value.launch is not None


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_made_anew_has_the_same_regions_and_keeps_outer_ones(seed: int) -> None:
    pg = chain((-1,), (-1,), (0, 1), (2,), (2,), (3, 4), outer=2)
    plan = planned(pg, 0, 1, -1, 0, 1, 1)
    made = orders.replanned(plan, pg, random.Random(seed))
    assert sorted(launched(made)) == list(range(6))
    assert next(i.lane for i in made.instructions if isinstance(i, Launch) and i.region == 2) == -1
    followed(orders.interleaved(made, random.Random(seed)))


def test_reports_are_typed_printed_and_travel() -> None:
    where = RegionName("r1", 1, ("add",), "f.py:3")
    finding = Finding("changed", where, "a round", 2, 7, "float32[4]")
    report = DebugReport("g", 4, {"a round": 2}, 8, 0, finding)
    text = str(report)
    assert "region 'r1' on lane 1 (add) from f.py:3 made another result" in text
    assert not report.ok and DebugReport("g", 4).ok
    twice = DeterminismReport("g", 3, 1, "result[0]", where)
    errors: tuple[Any, ...] = (DebugError(report), DeterminismError(twice))
    for error in errors:
        assert isinstance(error, VerificationError)
        assert pickle.loads(pickle.dumps(error)).report == error.report
    assert "result[0] differs between calls with equal arguments; first differs region 'r1'" in str(
        twice
    )
    assert str(DeterminismReport("g", 3, 1)) == "g: 3 calls, 1 outputs: bit-equal"
