"""``debug`` and ``check_determinism`` find what is broken in a JAX plan or beside it, and name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from edited_plans import ByName, without_waits  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.frontends.jax.lanes.emitter import LaneEmitter  # noqa: E402
from dynaflow_xla.frontends.jax.signature import entry  # noqa: E402

X, Y = np.random.default_rng(0).standard_normal((2, 16, 16)).astype(np.float32)


def marked(x: Any, y: Any) -> Any:
    with dfx.mark("left"):
        a = jnp.sin(x) @ y
    with dfx.mark("right"):
        b = jnp.cos(y) @ x
    with dfx.mark("both"):
        d = a @ y - jnp.tanh(b)
    return a, d


def scheduled(f: Callable[..., Any] = marked, **options: Any) -> Any:
    return dfx.schedule(jax.jit(f), ByName("right"), lanes=2, **{"backend": "ffi", **options})


@pytest.mark.parametrize("backend", ["ffi", "xla"])
def test_a_sound_plan_passes_every_kind_of_round(backend: str) -> None:
    fast = scheduled(backend=backend)
    report = dfx.debug(fast, X, Y, rounds=8)
    kinds = 4 if backend == "ffi" else 3
    assert report.ok and len(report.rounds) == kinds and sum(report.rounds.values()) == 8
    assert report.regions == 3 and "nothing found" in str(report)
    assert dfx.check_determinism(fast, X, Y, runs=3).ok


@pytest.mark.parametrize("backend", ["ffi", "xla"])
def test_a_wait_that_was_dropped_behind_the_proof_is_found_and_named(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_waits(monkeypatch, entry)
    with pytest.raises(dfx.VerificationError, match="region 'both' on lane 0") as found:
        dfx.debug(scheduled(backend=backend), X, Y)
    finding = found.value.report.finding  # type: ignore[attr-defined]
    assert finding.kind == "unwritten" and "'right' on lane 1" in finding.detail
    assert "dot_general" in finding.place.operators and "test_debug.py" in finding.place.source


def test_lane_programs_that_do_not_wait_are_found_though_the_plan_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flush = LaneEmitter.flush

    def hasty(self: Any, **options: Any) -> None:
        self.waits = []
        flush(self, **options)

    monkeypatch.setattr(LaneEmitter, "flush", hasty)
    with pytest.raises(dfx.VerificationError, match="compiled lane programs") as found:
        dfx.debug(scheduled(), X, Y, rounds=80)
    finding = found.value.report.finding  # type: ignore[attr-defined]
    assert finding.kind == "changed" and finding.place.region == "both"


def test_a_callback_that_is_not_pure_is_found_and_named() -> None:
    calls: list[int] = []

    def drifting(x: Any) -> Any:
        calls.append(1)
        return np.asarray(x) + np.float32(len(calls))

    def f(x: Any, y: Any) -> Any:
        a = jnp.sin(x) @ y
        b = jax.pure_callback(drifting, jax.ShapeDtypeStruct(a.shape, a.dtype), a)
        return jnp.cos(x), b @ y

    fast = dfx.schedule(jax.jit(f), "sequential", lanes=2, backend="ffi")
    with pytest.raises(dfx.VerificationError, match="pure_callback") as found:
        dfx.debug(fast, X, Y)
    finding = found.value.report.finding  # type: ignore[attr-defined]
    assert finding.kind == "changed" and finding.place.lane == -1
    with pytest.raises(dfx.VerificationError, match=r"result\[1\] differs.*pure_callback") as twice:
        dfx.check_determinism(fast, X, Y)
    assert twice.value.report.place.operators == ("pure_callback",)  # type: ignore[attr-defined]


def test_a_function_with_effects_is_refused_before_anything_runs() -> None:
    said: list[Any] = []

    def f(x: Any) -> Any:
        jax.debug.callback(said.append, x.sum())
        return jnp.sin(x) @ x

    fast = dfx.schedule(jax.jit(f), "branches", lanes=2)
    for look in (dfx.debug, dfx.check_determinism):
        with pytest.raises(dfx.UnsupportedError, match=rf"{look.__name__} runs .*test_debug\.py:"):
            look(fast, X)
    assert not said


def test_a_split_batch_and_auto_are_looked_at_too() -> None:
    def model(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w) @ w.T

    fast = dfx.schedule(jax.jit(model), dfx.NanoBatch(2), lanes=2, in_axes=(None, 0), backend="ffi")
    report = dfx.debug(fast, X, Y, rounds=4)
    assert report.ok and report.regions > 1 and report.values
    auto = dfx.schedule(jax.jit(marked), "auto", lanes=2, backend="ffi")
    assert "Auto" in str(dfx.debug(auto, X, Y, rounds=2))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3"])
def test_counts_are_counts(wrong: Any) -> None:
    fast = scheduled()
    with pytest.raises(dfx.PlanError, match="rounds must be an integer, at least 1"):
        dfx.debug(fast, X, Y, rounds=wrong)
    with pytest.raises(dfx.PlanError, match="runs must be an integer, at least 2"):
        dfx.check_determinism(fast, X, Y, runs=wrong)


def test_shapes_are_no_arrays() -> None:
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    for look in (dfx.debug, dfx.check_determinism, dfx.verify, dfx.profile, dfx.why):
        told = f"{look.__name__} runs the function: it takes arrays, not shapes"
        with pytest.raises(dfx.UnsupportedError, match=told):
            look(scheduled(), shape, shape)
        with pytest.raises(dfx.UnsupportedError, match=told):
            jax.jit(lambda x, look=look: look(scheduled(), x, Y) and x)(X)
    for look in (dfx.debug, dfx.check_determinism):
        with pytest.raises(dfx.UnsupportedError, match="takes what dynaflow_xla.schedule returned"):
            look(marked, X, Y)


def test_tools_under_a_guard_against_transfers() -> None:
    """The guard is for the user's transfers: tools run regions one by one, with constants of their own."""

    def two(x: Any, y: Any) -> Any:
        return jnp.sort(x) + jnp.sort(y) * 2, jnp.log(jnp.abs(y) + 5.0).sum()

    x, y = jnp.sin(jnp.arange(2000.0)), jnp.cos(jnp.arange(2000.0))
    fast, auto = dfx.schedule(jax.jit(two), dfx.Branches(wide=False)), dfx.schedule(jax.jit(two))
    with jax.transfer_guard("disallow"):
        fast(x, y)
        assert dfx.verify(fast, x, y).bit_equal
        assert dfx.profile(fast, x, y).total_ns > 0
        assert dfx.debug(fast, x, y).ok
        dfx.tune(auto, x, y, budget_s=60.0)
        auto(x, y)
