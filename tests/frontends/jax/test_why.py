"""``why`` on functions of which it is known, by how they are made, whether and why they gain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.ffi import xla
from dynaflow_xla.frontends.jax import debug
from dynaflow_xla.frontends.jax.planned import own_device

RNG = np.random.default_rng(0)


def _x(*shape: int) -> Any:
    return jnp.asarray(RNG.normal(size=shape).astype(np.float32))


def two_sorts(x: Any, y: Any) -> Any:
    return jnp.sort(x) + jnp.sort(y)


def two_factors(x: Any, y: Any) -> Any:
    return jnp.linalg.svd(x, compute_uv=False) + jnp.linalg.svd(y, compute_uv=False)


def two_loops(x: Any, y: Any) -> Any:
    def run(a: Any) -> Any:
        return jax.lax.fori_loop(0, 2000, lambda _, b: jnp.sin(b) + a, a)

    return run(x) + run(y)


def chain(x: Any) -> Any:
    with dfx.mark("first"):
        x = jnp.sort(x)
    with dfx.mark("second"):
        return jnp.sort(jnp.sin(x))


def two_products(x: Any, y: Any) -> Any:
    with dfx.mark("left"):
        a = x @ y
    with dfx.mark("right"):
        b = y @ x
    return a, b


def short(x: Any, y: Any) -> Any:
    with dfx.mark("left"):
        a = jnp.sort(x)
    with dfx.mark("right"):
        b = jnp.sort(y)
    return a + b


GAIN = [
    (two_sorts, (_x(1 << 17), _x(1 << 17))),
    (two_factors, (_x(160, 160), _x(160, 160))),
    (two_loops, (_x(4096), _x(4096))),
]
DO_NOT = [
    (chain, (_x(1 << 16),), "dependency"),
    (two_products, (_x(512, 512), _x(512, 512)), "contention"),
    (short, (_x(32), _x(32)), "too short"),
]
LANES = dfx.Branches(wide=False)


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is estimated must not depend on the machine."""
    monkeypatch.setattr("dynaflow_xla.machine.cores", lambda: 2)


@pytest.mark.parametrize(("fn", "args"), GAIN, ids=lambda x: getattr(x, "__name__", ""))
def test_gains(fn: Callable[..., Any], args: Any) -> None:
    found = dfx.why(dfx.schedule(fn, LANES, lanes=2), *args, measure=False)
    assert found.gains, found
    assert found.pairs[0].reason == "overlap"
    assert {one.kind for one in found.ablations} >= {"lane"}


@pytest.mark.parametrize(("fn", "args", "reason"), DO_NOT, ids=lambda x: getattr(x, "__name__", ""))
def test_does_not_gain(fn: Callable[..., Any], args: Any, reason: str) -> None:
    found = dfx.why(dfx.schedule(fn, LANES, lanes=2), *args, measure=False)
    assert found.reason == reason, found


def test_shapes_are_enough_where_nothing_is_measured() -> None:
    shapes = [jax.ShapeDtypeStruct((1 << 17,), jnp.float32)] * 2
    assert dfx.why(dfx.schedule(two_sorts, LANES, lanes=2), *shapes, measure=False).gains


def test_measured_of_every_region_and_of_calls() -> None:
    args = _x(1 << 12), _x(1 << 12)
    fast = dfx.schedule(two_sorts, LANES, lanes=2)
    found = dfx.why(fast, *args, rounds=3)
    assert found.measured and found.original_ns > 0 and found.scheduled_ns > 0
    assert found.timeline.kind == "measured"
    steps = dict(found.steps)
    regions = dfx.graph(fast, *args).regions
    alone = steps["all regions one after another on one core"]
    assert alone > 0 and {s.region for s in found.timeline.spans if s.kind == "launch"} == {
        r.id for r in regions
    }
    assert steps["bound: the longest chain of regions that need each other"] <= alone


def test_arguments_that_calls_take_stay_the_callers() -> None:
    donating = jax.jit(two_sorts, donate_argnums=(0,))
    x, y = _x(256), _x(256)
    dfx.why(dfx.schedule(donating, LANES, lanes=2), x, y, rounds=2)
    assert not x.is_deleted()


def test_together_auto_and_nano_batches() -> None:
    x, y = _x(64, 64), _x(64, 64)
    both = dfx.together(jnp.sort, jnp.linalg.inv, strategy=LANES, lanes=2)
    found = dfx.why(both, (x,), (y,), measure=False)
    assert {p.reason for p in found.pairs} and not any(
        p.reason == "dependency" for p in found.pairs
    )
    auto = dfx.schedule(two_sorts, lanes=2)
    assert dfx.why(
        auto, x[0], y[0], measure=False
    ).notes  # of which plan it is, since none was chosen
    nano = dfx.schedule(
        lambda w, a: jnp.sort(a @ w, -1), dfx.NanoBatch(2), in_axes=(None, 0), lanes=2
    )
    found = dfx.why(nano, y, x, rounds=2)
    assert len({s.nano for s in found.timeline.spans if s.kind == "launch"}) == 2


def test_bad_input() -> None:
    fast = dfx.schedule(two_sorts, LANES, lanes=2)
    with pytest.raises(dfx.PlanError, match="rounds must be an integer >= 1; got 0"):
        dfx.why(fast, _x(8), _x(8), rounds=0)
    with pytest.raises(dfx.UnsupportedError, match="takes what dynaflow_xla.schedule returned"):
        dfx.why(two_sorts, _x(8), _x(8))

    def prints(x: Any) -> Any:
        jax.debug.print("{}", x[0])
        return jnp.sort(x)

    with pytest.raises(dfx.UnsupportedError, match="why runs a function many times"):
        dfx.why(dfx.schedule(prints, LANES, lanes=2), _x(8))
    assert dfx.why(dfx.schedule(prints, LANES, lanes=2), _x(8), measure=False).steps


def test_one_program_has_no_stamps_and_is_measured_as_far_as_it_goes() -> None:
    x = _x(1 << 10)
    found = dfx.why(dfx.schedule(two_sorts, LANES, lanes=2, backend="xla"), x, x, rounds=2)
    assert found.measured and found.timeline.kind == "predicted"
    assert any("is estimated" in note and "no time stamps" in note for note in found.notes)
    assert dict(found.steps)["all regions one after another on one core"] > 0


def test_regions_are_measured_where_a_call_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _x(8)
    own = xla.lane_device(1)
    assert own_device([jax.device_put(x, own)]) is own
    assert own_device([x]) is jax.local_devices()[0]
    with jax.default_device(own):
        assert own_device([]) is own

    fast = dfx.schedule(jax.jit(two_sorts), LANES, lanes=2)  # PyTorch may be loaded
    gpu, used = SimpleNamespace(platform="gpu"), []
    monkeypatch.setattr(debug, "own_device", lambda _: gpu)
    monkeypatch.setattr(jax, "device_put", lambda value, device: used.append(device) or value)
    monkeypatch.setattr(jax, "default_device", lambda _: contextlib.nullcontext())
    assert debug.alone(fast, (x, x), {}, 0) is None
    made = debug.alone(fast, (x, x), {}, 1)
    assert made is not None and used and all(device is gpu for device in used)
    assert {s.cores for s in made.spans if s.kind == "launch"} == {1}
