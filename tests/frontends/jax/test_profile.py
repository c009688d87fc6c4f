"""Measured timelines: what they hold for one stage, several stages and outer regions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.timelines.timeline import Timeline


class Placed(dfx.Strategy):
    """Regions on lanes by mark."""

    def __init__(self, **lanes: int) -> None:
        self.lanes = lanes

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            for op in sorted(ready, key=lambda h: self.lanes.get(h.name, 0)):
                s.execute(op, lane=self.lanes.get(op.name, 0))


def slow_aside(x: Any) -> Any:
    with dfx.mark("quick"):
        a = jnp.sin(x)
    with dfx.mark("slow"):
        b = jnp.sort(jnp.tile(x, 40))[: x.shape[0]]
    with dfx.mark("join"):
        return a + b


def two_stages(x: Any) -> Any:
    with dfx.mark("slow"):
        a = jnp.sort(x)
    with dfx.mark("first"):
        b = jnp.cos(x) + a
    c = jax.pure_callback(np.negative, jax.ShapeDtypeStruct(x.shape, x.dtype), b)
    with dfx.mark("left"):
        d = jnp.sort(c)
    with dfx.mark("late"):
        e = jnp.sort(-c)
    with dfx.mark("last"):
        return d + e * b


@pytest.fixture
def x() -> jax.Array:
    return jnp.sin(jnp.arange(4000.0))


def covered(timeline: Timeline) -> None:
    """Every moment of every lane is in one span, and idle ones say why."""
    for lane in range(timeline.lanes):
        own = sorted(
            (s for s in timeline.spans if s.lane == lane), key=lambda s: (s.start_ns, s.end_ns)
        )
        assert all(a.end_ns <= b.start_ns for a, b in zip(own, own[1:], strict=False))
        assert sum(s.duration_ns for s in own) == timeline.total_ns
        assert all(bool(s.reason) == (s.kind in ("wait", "idle")) for s in own)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert timeline.bound is not None and timeline.bound.ns <= timeline.total_ns


def profiled(fast: Any, x: Any, *waits: str) -> Timeline:
    """A timeline with these waits: on a busy machine who would wait may have no core for so long."""
    for _ in range(30):
        timeline = dfx.profile(fast, x)
        if {s.reason for s in timeline.spans if s.kind == "wait"} == set(waits):
            break
    return timeline


def need_two(lanes: int) -> None:
    if lanes < 2:
        pytest.skip("one core")


def test_wait_names_the_slow_region(x: Any, lanes: int) -> None:
    need_two(lanes)
    fast = dfx.schedule(jax.jit(slow_aside), strategy=Placed(slow=1), lanes=2)
    timeline = profiled(fast, x, "waits for 'slow' on lane 1")
    covered(timeline)
    waits = [s for s in timeline.spans if s.kind == "wait"]
    assert [s.reason for s in waits] == ["waits for 'slow' on lane 1"]
    path = [s.name for s in timeline.critical_path() if s.kind == "launch"]
    assert path[-1] == "join" and path[-2] in ("slow", "quick")
    launches = {s.name: s for s in timeline.spans if s.kind == "launch"}
    assert set(launches) == {"quick", "slow", "join"}
    assert launches["slow"].source.partition(":")[0].endswith("test_profile.py")
    assert launches["slow"].flops > 0 and launches["slow"].resource
    assert [timeline.spans[b].name for b, _ in timeline.hand_overs()] == ["slow"]
    again = dfx.simulate(fast, x, costs=timeline)
    assert again.region_ns() == timeline.region_ns()


def test_stages_and_outer_regions_follow_each_other(x: Any, lanes: int) -> None:
    need_two(lanes)
    fast = dfx.schedule(jax.jit(two_stages), strategy=Placed(slow=1, late=1), lanes=2)
    timeline = profiled(fast, x, "waits for 'slow' on lane 1", "waits for 'late' on lane 1")
    covered(timeline)
    launches = {s.name: s for s in timeline.spans if s.kind == "launch"}
    (outer,) = (s for s in timeline.spans if s.lane < 0)
    for span in timeline.spans:
        if span.lane >= 0 and span.kind != "idle":
            assert span.end_ns <= outer.start_ns or outer.end_ns <= span.start_ns
    assert max(launches["first"].end_ns, launches["slow"].end_ns) <= outer.start_ns
    assert min(launches["left"].start_ns, launches["late"].start_ns) >= outer.end_ns
    waits = {s.reason for s in timeline.spans if s.kind == "wait"}
    assert waits == {"waits for 'slow' on lane 1", "waits for 'late' on lane 1"}
    reasons = {(s.lane, s.reason) for s in timeline.idle()}
    assert {(lane, f"waits for {outer.name!r} in the outer program") for lane in (0, 1)} <= reasons
    path = [s.name for s in timeline.critical_path() if s.kind == "launch"]
    assert outer.name in path and path[-1] == "last"


def test_one_lane(x: Any) -> None:
    fast = dfx.schedule(jax.jit(slow_aside), strategy=dfx.Sequential(), lanes=1)
    timeline = dfx.profile(fast, x)
    covered(timeline)
    assert not [s for s in timeline.spans if s.kind == "wait"]
    assert {s.lane for s in timeline.spans} == {0}


def test_only_an_outer_region(x: Any) -> None:
    def f(v: Any) -> Any:
        return jax.pure_callback(np.negative, jax.ShapeDtypeStruct(v.shape, v.dtype), v)

    timeline = dfx.profile(dfx.schedule(jax.jit(f), strategy=dfx.Sequential(), lanes=1), x)
    covered(timeline)
    assert [s.kind for s in timeline.spans] == ["launch", "idle"]
    assert timeline.total_ns == timeline.spans[0].duration_ns > 0


def test_nothing_to_run(x: Any) -> None:
    timeline = dfx.profile(dfx.schedule(jax.jit(lambda v: v), strategy=dfx.Sequential()), x)
    assert (timeline.spans, timeline.total_ns, timeline.critical_path()) == ((), 0, ())


def test_simulate_refuses_unknown_regions(x: Any) -> None:
    fast = dfx.schedule(jax.jit(slow_aside), strategy=dfx.Sequential(), lanes=1)
    with pytest.raises(dfx.PlanError, match="'fast'"):
        dfx.simulate(fast, x, costs={"fast": 1.0})
