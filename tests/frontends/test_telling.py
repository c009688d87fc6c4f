"""Plans, compilations and decisions of both frontends are logged with fields, and counted."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

import dynaflow_xla as dfx


def areas(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The last record of each area."""
    return {r.name.removeprefix("dynaflow_xla."): r for r in caplog.records}


def test_jax(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))

    def f(x: Any) -> Any:
        return jnp.sin(x) @ x, jnp.cos(x) @ x

    class Two(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            lane = 0
            while ready := s.ready():
                for op in ready:
                    s.execute(op, lane=lane)
                    lane = 1 - lane

    x = jnp.ones((16, 16))
    dfx.stats(reset=True)
    with caplog.at_level(logging.INFO, "dynaflow_xla"):
        dfx.schedule(jax.jit(f), Two(), lanes=2, backend="ffi")(x)
    found = areas(caplog)
    assert found["plan"].dfx_function == "f" and found["plan"].dfx_lanes == 2
    assert found["compile"].dfx_programs == 2 and found["compile"].dfx_seconds > 0
    counts = dfx.stats()
    assert (counts.lane_calls, counts.plans, counts.compiles) == (1, 1, 2)
    assert counts.copied_bytes >= 2 * 16 * 16 * 4 and counts.lane_threads >= 1
    with caplog.at_level(logging.INFO, "dynaflow_xla"):
        dfx.schedule(jax.jit(f), "auto", lanes=2, backend="ffi")(x)
    assert areas(caplog)["auto"].dfx_reason and dfx.stats().decisions == 1


def test_torch(caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")

    def f(x: Any) -> Any:
        with dfx.mark("a"):
            a = torch.sin(x) @ x
        with dfx.mark("b"):
            b = torch.cos(x) @ x
        return a, b

    class Two(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    s.execute(op, lane=int(op.name == "b"))

    x = torch.ones(16, 16)
    dfx.stats(reset=True)
    fast = dfx.schedule(f, Two(), lanes=2, backend="torch")
    with caplog.at_level(logging.INFO, "dynaflow_xla"):
        for _ in range(2):  # the first call may still be on its way through PyTorch's compiler
            fast(x)
    assert areas(caplog)["plan"].dfx_regions == 2
    counts = dfx.stats()
    assert counts.lane_calls in (1, 2) and (counts.plans, counts.fallbacks) == (1, 0)
    with torch.profiler.profile() as profiled:
        fast(x)
    assert "dynaflow_xla a" in {event.key for event in profiled.key_averages()}


def test_a_cache_that_is_not_used_is_told_at_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax = pytest.importorskip("jax")
    from dynaflow_xla.caches import private_files

    place = tmp_path / "file"
    place.write_text("not a folder")
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(place))
    monkeypatch.setattr(private_files, "_refused", set())

    def f(x: Any) -> Any:
        return x @ x @ x, (x + 1) @ x @ x

    def call(x: Any) -> Any:
        return dfx.schedule(f, dfx.Auto(min_cost_ns=0.0, budget_s=8.0))(x)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call(jax.numpy.ones((300, 300)))
    said = [w for w in told if "cannot be kept" in str(w.message)]
    line = call.__code__.co_firstlineno + 1
    assert said and {(w.filename, w.lineno) for w in said} == {(__file__, line)}
