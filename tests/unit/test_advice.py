"""Reasons and ablations on small graphs, whose truth is known by how they are made."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from dynaflow_xla import machine
from dynaflow_xla.advice import ablation
from dynaflow_xla.advice.costs import Given, matched, spread, times
from dynaflow_xla.advice.report import Why, why
from dynaflow_xla.ir.graph import Graph, OuterReason
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.rules import Op
from dynaflow_xla.ir.work import Spread
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.recording import Decision, Recording
from dynaflow_xla.timelines.simulator import simulate

MS = 1_000_000.0


def _cut(graph: Graph) -> PartitionedGraph:
    """Every operator a region."""
    return partition(graph, [Op("|".join({op.kind for op in graph.ops}))])


def _planned(
    graph: Graph, lanes: dict[str, int], count: int, width: int = 1, cores: int = 0
) -> tuple[PartitionedGraph, Plan]:
    """A plan with regions on the lanes given by kind of operator."""
    pg = _cut(graph)
    kinds = {r.id: graph.ops[r.ops[0]].kind for r in pg.regions}
    decisions = tuple(Decision(r.id, lanes[kinds[r.id]]) for r in pg.regions)
    plan = build_plan(
        pg, Recording(decisions), lanes=count, strategy_text="t", cores=cores, width=width
    )
    return pg, plan


def _report(
    graph: Graph,
    lanes: dict[str, int],
    count: int = 2,
    width: int = 1,
    cores: int = 0,
    **known: Any,
) -> Why:
    """Of such a plan."""
    pg, plan = _planned(graph, lanes, count, width, cores)
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
        "a = sort x; b = svd x",
        "a b",
        b={"cost_ns": machine.numbers().hand_over_ns / 2},
        cost_ns=1e5,
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
    outer = {"outer": True, "outer_reason": OuterReason("prints"), "cost_ns": MS}
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
    assert busy.reason == "outside" and "other work on these cores" in busy.text
    # A small cost does not stand for the whole: 3 us of 1.2 ms.
    late = _report(graph, lanes, original_ns=2 * MS, scheduled_ns=2.2 * MS)
    assert late.reason == "outside" and "adds 1.2 ms" in late.text and "3 us" not in late.text
    # One that was faster in half of the calls is not known to gain.
    unsure = _report(graph, lanes, original_ns=2 * MS, scheduled_ns=MS, wins=0.5)
    assert unsure.reason == "outside" and "50% of the calls were faster" in unsure.text
    # What bounds every plan is said of calls that vary, too.
    for text, where in (
        ("a = dot x", {"dot": 0}),
        ("a = dot x; b = conv a", {"dot": 0, "conv": 1}),
    ):
        chain = make(text, "b" if "b" in text else "a", cost_ns=MS)
        chained = _report(chain, where, original_ns=2.2 * MS, scheduled_ns=2 * MS, wins=0.67)
        assert chained.reason == "dependency" and "67% of the calls were faster" in chained.text


def test_lanes_of_several_cores(
    make: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 16)
    spread = {"spread": Spread(products=MS)}
    graph = make("a = dot x; b = conv x", "a b", a=spread, b=spread)
    for cores in (0, 16):
        one = _report(graph, {"dot": 0, "conv": 0}, width=8, cores=cores)
        assert one.reason == "placement", one
        pair = _only(one)
        assert pair.reason == "placement" and "both on lane 0" in pair.text
        assert pair.first_ns < 0.2 * MS
        two = _report(graph, {"dot": 0, "conv": 1}, width=8, cores=cores)
        assert _only(two).reason == "overlap"
        for found in (one, two):
            bounds = [ns for name, ns in found.steps if name.startswith("bound")]
            assert max(bounds) <= two.scheduled_ns


def test_regions_beside_others_are_compared_on_as_many_cores(
    make: Callable[..., Graph],
) -> None:
    spread = {"spread": Spread(products=MS)}
    graph = make("a = dot x; b = conv x", "a b", a=spread, b=spread)
    pg, plan = _planned(graph, {"dot": 0, "conv": 1}, 2, 8)
    _, narrow = _planned(graph, {"dot": 0, "conv": 0}, 1)
    given = Given(plan, pg, alone=simulate(narrow, pg), ran=simulate(plan, pg))
    assert times(given).slowed == pytest.approx(1.0, rel=0.01)


def test_wide_regions_count_with_their_cores(make: Callable[..., Graph]) -> None:
    graph = make("a = dot x; b = sort a; c = svd x", "b c", a={"spread": Spread(products=MS)})
    found = _report(graph, {"dot": -1, "sort": 0, "svd": 1}, cores=2)
    bounds = [ns for name, ns in found.steps if name.startswith("bound")]
    assert max(bounds) <= found.scheduled_ns < 1.7 * MS
    reasons = {frozenset((p.first, p.second)): p for p in found.pairs}
    assert reasons[frozenset(("dot", "sort"))].reason == "dependency"
    assert "'dot' all cores" in reasons[frozenset(("dot", "svd"))].text
    assert reasons[frozenset(("sort", "svd"))].reason == "overlap"


def test_measured_plans_that_beat_their_regions_bound(make: Callable[..., Graph]) -> None:
    graph = make("a = sort x; b = svd a", "b")
    found = _report(graph, {"sort": 0, "svd": 1}, original_ns=1.5 * MS, scheduled_ns=1.6 * MS)
    assert all(ns <= 1.6 * MS for name, ns in found.steps if name.startswith("bound"))
    assert any("compiled together" in note for note in found.notes)


def test_what_is_between_the_stages_of_two_regions_is_named(make: Callable[..., Graph]) -> None:
    outer = {"outer": True, "outer_reason": OuterReason("prints"), "cost_ns": 1e3}
    graph = make("a = sort x; p = print a; b = svd x", "p b", p=outer)
    found = _only(_report(graph, {"sort": 0, "print": -1, "svd": 1}))
    assert found.reason == "effects" and "'print' is between them" in found.text
    graph = make("a = sort x; p = dot a; b = svd x", "p b", p={"cost_ns": 1e3})
    found = _only(_report(graph, {"sort": 0, "dot": -1, "svd": 1}, cores=2))
    assert found.reason == "placement" and "'dot' is between them" in found.text


def test_what_a_lane_does_before_is_named(make: Callable[..., Graph]) -> None:
    graph = make("a = sort x; b = lu x; c = svd b", "a c")
    values = tuple(
        dataclasses.replace(v, bytes=1 << 22) if v.id == graph.ops[1].outputs[0] else v
        for v in graph.values
    )
    found = _report(dataclasses.replace(graph, values=values), {"sort": 0, "lu": 1, "svd": 1})
    pair = next(p for p in found.pairs if {p.first, p.second} == {"sort", "svd"})
    assert pair.reason == "placement" and "lane 1 does 'lu'" in pair.text
    # A lane that stands still while the other one works.
    graph = make(
        "a = sort x; b = lu x; c = svd b; d = qr x", "a c d", inputs="x", b={"cost_ns": 2e6}
    )
    found = _report(graph, {"sort": 2, "lu": 0, "svd": 1, "qr": 1}, count=3)
    pair = next(p for p in found.pairs if {p.first, p.second} == {"sort", "svd"})
    assert "lane 1 waits for 'lu' on lane 0" in pair.text


def test_bytes_count_only_where_the_other_end_stays(make: Callable[..., Graph]) -> None:
    graph = make("a = sort x; b = svd x; c = lu b", "a c", c={"cost_ns": 10.0})
    made = graph.ops[1].outputs[0]
    big = (dataclasses.replace(v, bytes=1 << 24) if v.id == made else v for v in graph.values)
    graph = dataclasses.replace(graph, values=tuple(big))
    # Moving the sort costs nothing, whatever the svd gives to the lu.
    pair = _only(_report(graph, {"sort": 0, "svd": 0, "lu": 0}))
    assert pair.reason == "placement" and "both on lane 0" in pair.text
    graph = make("y = qr x; a = sort y; b = svd y; c = lu a b", "c")
    graph = dataclasses.replace(
        graph, values=tuple(dataclasses.replace(v, bytes=1 << 24) for v in graph.values)
    )
    found = _report(graph, {"qr": 0, "sort": 0, "svd": 0, "lu": 0})
    pair = next(p for p in found.pairs if {p.first, p.second} == {"sort", "svd"})
    assert pair.reason == "copies" and f"{2 << 24} bytes" in pair.text


def test_an_order_of_effects_is_no_reading(make: Callable[..., Graph]) -> None:
    outer = {"outer": True, "outer_reason": OuterReason("prints")}
    graph = make("a = print x; b = put x", "a b", a=outer, b=outer)
    pair = _only(_report(graph, {"print": -1, "put": -1}))
    assert pair.reason == "effects" and "reads" not in pair.text and "order" in pair.text


def test_what_can_be_saved_is_said(make: Callable[..., Graph]) -> None:
    graph = make("a = sort x; b = svd x", "a b", b={"cost_ns": 24e3})
    pair = _only(_report(graph, {"sort": 0, "svd": 0}))
    assert pair.reason == "too short" and "at best 24 us can be saved" in pair.text


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


def test_streams_have_no_cores(make: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 1)
    graph = make("a = sort x; b = svd x", "a b")
    lanes = {"sort": 0, "svd": 0}
    assert "one core" in _only(_report(graph, lanes)).text
    found = _only(_report(graph, lanes, streams=True))
    assert found.reason == "placement" and "core" not in found.text


def test_what_is_tried_does_not_grow_with_the_square_of_lanes(
    make: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = 16
    text = "; ".join(f"a{n} = op{n} x; b{n} = up{n} a{n}" for n in range(lanes))
    graph = make(text, " ".join(f"b{n}" for n in range(lanes)))
    places = {f"{kind}{n}": n for n in range(lanes) for kind in ("op", "up")}
    pg, plan = _planned(graph, places, lanes)
    measured = simulate(plan, pg)
    calls = {"plans": 0, "hashes": 0}
    build, digest = ablation.build_plan, hashlib.sha256

    def built(*args: Any, **options: Any) -> Plan:
        calls["plans"] += 1
        return build(*args, **options)

    def hashed(data: bytes) -> Any:
        calls["hashes"] += 1
        return digest(data)

    monkeypatch.setattr(ablation, "build_plan", built)
    monkeypatch.setattr(hashlib, "sha256", hashed)
    found = why(Given(plan, dataclasses.replace(pg), alone=measured))
    assert any(one.kind == "lane" for one in found.ablations)
    assert calls["plans"] <= 100
    assert calls["hashes"] <= len(pg.regions)


@pytest.mark.parametrize("caller_ns", [0.0, 1e6])
def test_on_the_thread_that_calls_nothing_starts(
    make: Callable[..., Graph], caller_ns: float
) -> None:
    short = {"cost_ns": 1e4}
    graph = make("a = sort x; b = svd x", "a b", a=short, b=short)
    found = _report(graph, {"sort": 0, "svd": 0}, cores=2, caller_ns=caller_ns)
    kinds = {one.kind for one in found.ablations}
    assert ("start" in kinds) == (caller_ns == 0)
    assert found.timeline.total_ns == (2e4 if caller_ns else pytest.approx(2e4 + 4e4, rel=0.5))
