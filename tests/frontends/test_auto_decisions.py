"""Auto's decisions in JAX: who measures and beside what, and what a decision rests on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dynaflow_xla as dfx
from dynaflow_xla import autotune, quiet


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What shall be measured, by name (default 2.0); each candidate runs once for that."""
    told: dict[str, Any] = {"measured": []}

    def measure(runs: dict[str, Any], *_: Any, **__: Any) -> dict[str, float]:
        told["measured"].append(dict(runs))
        for run in runs.values():
            run()
        return {name: told.get(name, 2.0) for name in runs}

    monkeypatch.setattr(autotune, "measure", measure)
    return told


def sorts(x: Any, y: Any) -> Any:
    return jnp.sort(x) + jnp.sort(-y)


def arguments(size: int = 1 << 12) -> tuple[Any, Any]:
    kx, ky = jax.random.split(jax.random.key(size))
    return jax.random.normal(kx, (size,)), jax.random.normal(ky, (size,))


def auto_of(f: Any, **options: Any) -> Any:
    return dfx.schedule(f, dfx.Auto(min_cost_ns=0.0, **options))


# -- one measures, and nothing runs beside it --------------------------------------------------------


def test_threads_that_make_the_first_call_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    """One thread measures; that the others called meanwhile is noticed, and nothing is kept."""
    fast, args = auto_of(jax.jit(sorts)), arguments()
    want = sorts(*args)
    measuring: list[str] = []
    most = 0
    others_called = threading.Event()
    real = autotune.measure

    def measure(runs: Any, *given: Any, **options: Any) -> Any:
        nonlocal most
        measuring.append(threading.current_thread().name)
        most = max(most, len(measuring))
        assert others_called.wait(60)
        try:
            return real(runs, *given, **options)
        finally:
            measuring.pop()

    monkeypatch.setattr(autotune, "measure", measure)
    start = threading.Barrier(4)
    results: list[Any] = []

    def first_call() -> None:
        start.wait()
        results.append(fast(*args))
        if len(results) >= 3 or len(measuring) > 1:
            others_called.set()

    threads = [threading.Thread(target=first_call, name=f"caller {i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert most == 1 and len(results) == 4
    for result in results:
        assert_same(want, result)
    assert not list(folder.glob("*.json")), "a decision that was disturbed is not kept"
    assert fast.decision(args, {}) is None
    assert "beside it; a later call tries again" in dfx.explain(fast, *args)
    others_called.set()
    until = time.monotonic() + 60
    while fast.decision(args, {}) is None and time.monotonic() < until:
        assert_same(want, fast(*args))  # alone now
    assert fast.decision(args, {}) is not None and len(list(folder.glob("*.json"))) == 1


def test_tune_beside_a_busy_thread_is_an_error_and_keeps_nothing(folder: Path) -> None:
    fast, args = auto_of(jax.jit(sorts)), arguments()
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin, name="spinner")
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="not measured: .*(spinner|busy)"):
            dfx.tune(fast, *args)
    finally:
        stop.set()
        thread.join(60)
    assert not list(folder.glob("*.json")) and fast.decision(args, {}) is None


def test_what_is_never_undisturbed_is_the_original_and_says_so(
    monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    fast, args = auto_of(jax.jit(sorts)), arguments()
    now = 0.0
    fast.put_off = quiet.PutOff(clock=lambda: now)

    def measure(*_: Any, **__: Any) -> Any:
        raise quiet.Disturbed("not measured: the thread 'x' ran beside it")

    monkeypatch.setattr(autotune, "measure", measure)
    for _ in range(100):
        assert_same(sorts(*args), fast(*args))
        if fast.decision(args, {}) is not None:
            break
        now += 1000.0
    choice = fast.decision(args, {})
    assert choice is not None and choice.child is None
    assert "dfx.tune measures" in dfx.explain(fast, *args)


def test_donated_arguments_are_measured_with_donation_on_fresh_copies(
    monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    f = jax.jit(lambda state, x: ({"a": state["a"] + sorts(x, x)}, x), donate_argnums=0)
    fast = dfx.schedule(f, dfx.Auto(min_cost_ns=0.0))
    x, y = arguments()
    checked: list[str] = []

    def measure(runs: dict[str, Any], *_: Any, **__: Any) -> dict[str, float]:
        for name, run in runs.items():
            assert isinstance(run, autotune.Fresh), "copies are no part of what is timed"
            (given, other), _ = run.given()
            (again, _), _ = run.given()
            assert other is y, "what is not donated is no copy"
            assert given["a"] is not again["a"]
            run.run((((given, other)), {}))
            assert given["a"].is_deleted() and not again["a"].is_deleted()
            checked.append(name)
        return dict.fromkeys(runs, 1.0)

    monkeypatch.setattr(autotune, "measure", measure)
    state = {"a": x.copy()}
    assert_same(f({"a": x.copy()}, y), fast(state, y))
    assert state["a"].is_deleted() and not y.is_deleted(), "the call itself donates"
    assert len(checked) >= 2
