"""Reasons and ablations on small graphs, whose truth is known by how they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dynaflow_xla import machine
from dynaflow_xla.advice.costs import Given, matched, spread
from dynaflow_xla.advice.report import Why, why
from dynaflow_xla.ir.graph import Graph
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.rules import Op
from dynaflow_xla.ir.work import Spread
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.recording import Decision, Recording
from dynaflow_xla.timelines.simulator import simulate

MS = 1_000_000.0


def _cut(graph: Graph) -> PartitionedGraph:
    """Every operator a region."""
    return partition(graph, [Op("|".join({op.kind for op in graph.ops}))])


def _report(graph: Graph, lanes: dict[str, int], count: int = 2, **known: Any) -> Why:
    """Of a plan with regions on the lanes given by kind of operator."""
    pg = _cut(graph)
    kinds = {r.id: graph.ops[r.ops[0]].kind for r in pg.regions}
    decisions = tuple(Decision(r.id, lanes[kinds[r.id]]) for r in pg.regions)
    plan = build_plan(pg, Recording(decisions), lanes=count, strategy_text="t", cores=0)
    return why(Given(plan, pg, **known))


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)


def _only(found: Why) -> Any:
    assert len(found.pairs) == 1, found.pairs
    return found.pairs[0]


def test_independent_regions_on_two_lanes_overlap_and_gain(make: Callable[..., Graph]) -> None:
    found = _report(make("a = sort x; b = svd x", "a b"), {"sort": 0, "svd": 1})
    assert found.reason == "gains" and found.gains
    assert _only(found).reason == "overlap" and _only(found).overlap_ns > 0.9 * MS


def test_a_chain_cannot_overlap(make: Callable[..., Graph]) -> None:
    graph = make("a = sort x; b = svd a; c = lu b", "c")
    found = _report(graph, {"sort": 0, "svd": 1, "lu": 0})
    assert found.reason == "dependency"
    assert {p.reason for p in found.pairs} == {"dependency"}
    through = next(p for p in found.pairs if {p.first, p.second} == {"sort", "lu"})
    assert "sort > svd > lu" in through.text


def test_what_fills_all_cores_by_itself_gains_nothing_side_by_side(
    make: Callable[..., Graph],
) -> None:
    spread = {"spread": Spread(products=MS), "cost_ns": MS}
    graph = make("a = dot x; b = conv x", "a b", a=spread, b=spread)
    found = _report(graph, {"dot": 0, "conv": 1})
    assert found.reason == "contention"
    alone = _report(graph, {"dot": 0, "conv": 0})
    assert _only(alone).reason == "contention" and "all 2 cores" in _only(alone).text


def test_what_is_shorter_than_going_to_lanes_is_too_short(make: Callable[..., Graph]) -> None:
    found = _report(make("a = sort x; b = svd x", "a b", cost_ns=3e3), {"sort": 0, "svd": 1})
    assert found.reason == "too short"
    graph = make(
        "a = sort x; b = svd x", "a b", b={"cost_ns": machine.HAND_OVER_NS / 2}, cost_ns=1e5
    )
    # Of two the longer one decides whether the function could gain, the shorter one whether the pair could.
    assert _only(_report(graph, {"sort": 0, "svd": 0})).reason == "too short"


def test_a_schedule_that_puts_all_on_one_lane_is_named(make: Callable[..., Graph]) -> None:
    graph = make("a = sort x; b = svd x", "a b")
    found = _report(graph, {"sort": 0, "svd": 0})
    assert found.reason == "placement" and _only(found).reason == "placement"
    assert "both on lane 0" in _only(found).text
    move = next(one for one in found.ablations if one.kind == "move")
    assert move.gains_ns < -0.9 * MS and "not on lane 1" in move.text
    assert "one lane" in _report(graph, {"sort": 0, "svd": 0}, count=1).text


def test_effects_are_named(make: Callable[..., Graph]) -> None:
    outer = {"outer": True, "outer_reason": "prints", "cost_ns": MS}
    graph = make("a = print x; b = svd x", "a b", a=outer)
    pg = _cut(graph)
    decisions = tuple(Decision(r.id, -1 if r.outer else 0) for r in pg.regions)
    plan = build_plan(pg, Recording(decisions), lanes=2, strategy_text="t")
    pair = _only(why(Given(plan, pg)))
    assert pair.reason == "effects" and "prints" in pair.text


def test_a_lane_is_worth_what_runs_beside_it(make: Callable[..., Graph]) -> None:
    found = _report(make("a = sort x; b = svd x", "a b"), {"sort": 0, "svd": 1})
    lanes = [one for one in found.ablations if one.kind == "lane"]
    assert len(lanes) == 2 and all(0.9 * MS < one.gains_ns < 1.1 * MS for one in lanes)
    assert found.ablations == tuple(sorted(found.ablations, key=lambda one: -abs(one.gains_ns)))


def test_a_wait_costs_what_its_lane_stands_still_for(make: Callable[..., Graph]) -> None:
    # b, on the other lane, has to wait a millisecond for a, and c is all there is besides.
    graph = make("a = sort x; b = svd a; c = lu x", "b c", c={"cost_ns": 1e4})
    found = _report(graph, {"sort": 0, "svd": 1, "lu": 1})
    wait = next(one for one in found.ablations if one.kind == "wait")
    assert -1.1 * MS < wait.gains_ns < -0.9 * MS
    assert "'sort'" in wait.text and "'svd'" in wait.text


def test_measured_times_decide_over_estimated_ones(make: Callable[..., Graph]) -> None:
    graph = make("a = sort x; b = svd x", "a b")
    lanes = {"sort": 0, "svd": 1}
    assert _report(graph, lanes).gains
    slow = _report(graph, lanes, original_ns=MS, scheduled_ns=1.2 * MS)
    assert slow.reason == "contention" and slow.measured
    # Regions that could overlap, of which a call takes far longer than they do.
    busy = _report(graph, lanes, original_ns=9 * MS, scheduled_ns=9 * MS)
    assert busy.reason == "contention" and "other work on these cores" in busy.text
    # One that was faster in half of the calls is not known to gain.
    assert not _report(graph, lanes, original_ns=2 * MS, scheduled_ns=MS, wins=0.5).gains


def test_the_report_as_text_and_as_data(make: Callable[..., Graph]) -> None:
    graph = make("a = sort x; b = svd a; c = lu x", "b c")
    found = _report(graph, {"sort": 0, "svd": 1, "lu": 1}, notes=("of a candidate",))
    text = str(found)
    assert found.text in text and "note: of a candidate" in text
    assert all(one.text in text for one in (*found.pairs, *found.ablations))
    data = found.to_dict()
    assert data["reason"] == found.reason and len(data["pairs"]) == len(found.pairs)
    assert {step["step"] for step in data["steps"]} == {name for name, _ in found.steps}


def test_the_timeline_says_why_at_the_regions(make: Callable[..., Graph]) -> None:
    found = _report(make("a = sort x; b = svd a", "b"), {"sort": 0, "svd": 1})
    launches = {s.name: s.reason for s in found.timeline.spans if s.kind == "launch"}
    assert launches == {
        "sort": "not beside 'svd': dependency", "svd": "not beside 'sort': dependency",
    }  # fmt: skip
    assert any(found.text in note for note in found.timeline.meta["notes"])


def test_costs_of_another_capture_are_found_by_name(make: Callable[..., Graph]) -> None:
    pg = _cut(make("a = sort x; b = svd x", "a b"))
    other = _cut(make("a = sort x; b = svd x", "a b", a={"params": "p"}, b={"params": "q"}))
    plan = build_plan(
        other,
        Recording(tuple(Decision(r.id, 0) for r in other.regions)),
        lanes=1,
        strategy_text="t",
    )
    ran = simulate(plan, other, {"sort": 5e6, "svd": 7e6})
    found, note = matched(pg, ran)
    assert found == {"sort": 5e6, "svd": 7e6} and not note
    assert matched(other, ran) == (ran, "")
    third = _cut(make("a = lu x; b = qr x", "a b"))
    assert matched(third, ran)[0] is None and "estimated" in matched(third, ran)[1]
    assert spread([1.0] * 8) == 0.0 and spread([1.0, 1.0, 2.0, 3.0, 3.0]) == 1.0
