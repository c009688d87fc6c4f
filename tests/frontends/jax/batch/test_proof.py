"""Proof that a schedule is really in force: the custom call, two lanes, overlapping launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx

HERE = Path(__file__).name


def two_branches(x: Any) -> Any:
    left = jnp.sort(x, axis=-1)
    right = jnp.sort(-x, axis=0)
    return left[0] + right[:, 0]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line and "line_of" not in line)


@pytest.fixture(scope="module")
def x() -> Any:
    return jnp.asarray(np.random.default_rng(0).random((384, 384)), jnp.float32)


@pytest.fixture(scope="module")
def fast(schedule: Any) -> Any:
    return schedule(two_branches, "branches")


def launches(plan: Any) -> list[Any]:
    return [i for i in plan.instructions if type(i).__name__ == "Launch"]


def test_lowered_text_holds_the_custom_call(fast: Any, x: Any) -> None:
    text = fast.lower(x).as_text()
    assert text.count("@dfx_run") == 1 and "stablehlo.sort" not in text
    outer = jax.jit(lambda x: fast(x) * 2).lower(x)
    assert "dfx_run" in outer.as_text()
    assert "dfx_run" in outer.compile().as_text()


def test_plan_has_two_lanes(fast: Any, x: Any, lanes: int) -> None:
    if lanes < 2:
        pytest.skip("one core")
    plan = dfx.plan(fast, x)
    sorts = {i.lane for i in launches(plan) if "sort" in i.name}
    assert plan.lanes == 2 and sorts == {0, 1}
    assert plan.events >= 1
    assert {r.id for r in dfx.graph(fast, x).regions} == {i.region for i in launches(plan)}


def test_plan_round_trips(fast: Any, x: Any) -> None:
    plan = dfx.plan(fast, x)
    assert dfx.Plan.from_json(plan.to_json()) == plan
    assert dfx.Plan.from_text(plan.to_text()) == plan


def test_planning_is_deterministic(schedule: Any, x: Any) -> None:
    plans = [dfx.plan(schedule(two_branches, "branches"), x) for _ in range(2)]
    assert plans[0].content_hash() == plans[1].content_hash()


def test_strategy_runs_once_per_signature(lanes: int, x: Any) -> None:
    calls: list[int] = []

    class Counted(dfx.Branches):
        def schedule(self, s: Any) -> None:
            calls.append(1)
            super().schedule(s)

    fast = dfx.schedule(two_branches, Counted(), lanes=lanes)
    for _ in range(5):
        fast(x)
    assert len(calls) == 1
    fast(x[:64, :64])
    assert len(calls) == 2


def test_profile_shows_two_launches_at_once(fast: Any, x: Any, lanes: int) -> None:
    """Overlap of spans, in any one of several runs: no duration is asserted."""
    if lanes < 2:
        pytest.skip("one core")
    fast(x)
    for _ in range(20):
        timeline = dfx.profile(fast, x)
        spans = [s for s in timeline.spans if s.kind == "launch"]
        assert {s.lane for s in spans} == {0, 1}
        assert {s.region for s in spans} == {r.id for r in dfx.graph(fast, x).regions}
        assert all(0 <= s.start_ns <= s.end_ns for s in spans)
        for lane in (0, 1):  # a lane does one thing at a time
            own = sorted((s for s in timeline.spans if s.lane == lane), key=lambda s: s.start_ns)
            for a, b in zip(own, own[1:], strict=False):
                assert a.end_ns <= b.start_ns
        zero = [s for s in spans if s.lane == 0]
        one = [s for s in spans if s.lane == 1]
        if any(a.start_ns < b.end_ns and b.start_ns < a.end_ns for a in zero for b in one):
            return
    pytest.fail("no launch of lane 0 ever overlapped one of lane 1")


def test_profile_sees_the_data_order(schedule: Any, lanes: int) -> None:
    """A consumer's span starts after its producers' spans end, across lanes too."""
    fast = schedule(lambda x: jnp.cos(jnp.sort(jnp.sin(jnp.sort(x)))))  # a chain, lane after lane
    x = jnp.arange(20000.0)
    timeline = dfx.profile(fast, x)
    graph = dfx.graph(fast, x)
    when = {s.region: s for s in timeline.spans if s.kind == "launch"}
    for region, before in enumerate(graph.predecessors()):
        for producer in before:
            assert when[producer].end_ns <= when[region].end_ns
            if when[producer].lane == when[region].lane:
                assert when[producer].end_ns <= when[region].start_ns


def test_simulated_lanes_overlap(fast: Any, x: Any, lanes: int) -> None:
    if lanes < 2:
        pytest.skip("one core")
    timeline = dfx.simulate(fast, x)
    assert {s.lane for s in timeline.spans if s.kind == "launch"} == {0, 1}


def test_explain_names_regions_and_lines(fast: Any, x: Any) -> None:
    text = dfx.explain(fast, x)
    for region in dfx.graph(fast, x).regions:
        assert region.name in text
    for source in ("left = jnp.sort(x, axis=-1)", "right = jnp.sort(-x, axis=0)"):
        assert f"{HERE}:{line_of(source)}" in text
    assert "Branches" in text and "custom calls 1" in text


def test_marks_become_regions(schedule: Any, x: Any) -> None:
    def f(x: Any) -> Any:
        with dfx.mark("first", resource="memory", tags={"mine"}):
            a = jnp.sort(x, axis=0) * 2
        with dfx.mark("second"):
            b = jnp.sort(x, axis=1) + 1
        return a + b

    fast = schedule(f, "branches")
    regions = {r.name: r for r in dfx.graph(fast, x[:8, :8]).regions}
    first = next(r for name, r in regions.items() if "first" in name)
    assert first.resource == "memory" and "mine" in first.tags
    assert any("second" in name for name in regions)
    np.testing.assert_array_equal(fast(x[:8, :8]), jax.jit(f)(x[:8, :8]))


def test_verify_reports_each_output(fast: Any, x: Any) -> None:
    report = dfx.verify(fast, x)
    assert len(report.rows) == 1 and "result" in str(report) and report.max_abs < 1e-3


def test_verify_catches_a_wrong_replacement(schedule: Any) -> None:
    class Wrong(dfx.Strategy):
        def rules(self, graph: Any) -> Any:
            return [dfx.Op("sort")]

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    if "sort" in op.name:
                        s.execute(op, replace=lambda x: x)
                    else:
                        s.execute(op)

    fast = schedule(lambda x: {"a": x + 1, "b": jax.lax.sort(x)}, Wrong())
    with pytest.raises(dfx.VerificationError, match="'b'"):
        dfx.verify(fast, jnp.asarray([2.0, 1.0]))


def test_bit_equal_to_one_lane(schedule: Any, lanes: int) -> None:
    """The same regions on one lane and on two give the same bits."""

    class OneLane(dfx.Branches):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    s.execute(op, lane=0)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((32, 32)), jnp.float32)
    two, one = schedule(two_branches, "branches"), schedule(two_branches, OneLane())
    assert dfx.graph(two, x).to_json() == dfx.graph(one, x).to_json()
    assert np.asarray(two(x)).tobytes() == np.asarray(one(x)).tobytes()


def test_timeline_files(fast: Any, x: Any, tmp_path: Path) -> None:
    pytest.importorskip("perfetto")
    dfx.simulate(fast, x).to_perfetto(tmp_path / "trace.pftrace")
    assert (tmp_path / "trace.pftrace").stat().st_size > 0


class Affine:
    @dfx.schedule
    def of(self, x: Any) -> Any:
        return x * 2


@pytest.mark.parametrize("look", [dfx.verify, dfx.explain])
def test_the_way_out_of_what_jax_cannot_trace(look: Any) -> None:
    with pytest.raises(TypeError, match=r"argument 0 of 'of' is a Affine.*Make it static"):
        look(Affine.of, Affine(), jnp.ones(4))
