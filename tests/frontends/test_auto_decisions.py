"""Auto's decisions in JAX: who measures and beside what, and what a decision rests on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla import autotune, quiet
from dynaflow_xla.frontends.jax import auto


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


# -- ahead of time, and what is told -----------------------------------------------------------------


CALL = "dfx_run"


def decided(f: Any, times: dict[str, Any], which: str, **options: Any) -> tuple[Any, Any]:
    """An Auto function for which this was decided, and arguments."""
    fast, args = auto_of(f, **options), arguments()
    first = repr(auto.candidates_of(fast)[0])
    times[{"lanes": first, "original": "original"}[which]] = 1.0
    fast(*args)
    choice = fast.decision(args, {})
    assert (choice.child is not None) == (which == "lanes")
    return fast, args


@pytest.mark.parametrize("which", ["lanes", "original", "undecided"])
def test_ahead_of_time_is_what_a_call_runs(
    times: dict[str, Any], assert_same: Any, which: str
) -> None:
    if which == "undecided":
        fast, args = auto_of(jax.jit(sorts)), arguments()
    else:
        fast, args = decided(jax.jit(sorts), times, which)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    for given in (args, shapes):
        lowered = fast.lower(*given)
        assert (CALL in lowered.as_text()) == (which == "lanes")
        assert_same(sorts(*args), lowered.compile()(*args))
        traced = fast.trace(*given)
        assert (CALL in traced.lower().as_text()) == (which == "lanes")
        assert fast.eval_shape(*given) == jax.eval_shape(sorts, *given)
        inside = jax.jit(lambda *a: fast(*a)).lower(*given)
        assert (CALL in inside.as_text()) == (which == "lanes")
        made = str(jax.make_jaxpr(fast)(*args))
        assert ("dfx_program" in made) == (which == "lanes")
    times.clear()
    times["measured"] = []
    assert_same(sorts(*args), fast(*args))


def test_ahead_of_time_follows_a_new_decision(times: dict[str, Any]) -> None:
    fast, args = decided(jax.jit(sorts), times, "original")
    assert CALL not in fast.lower(*args).as_text()
    times |= {"original": 2.0, repr(auto.candidates_of(fast)[0]): 1.0}
    dfx.tune(fast, *args)
    assert CALL in fast.lower(*args).as_text()


def test_ahead_of_time_on_the_callers_thread(times: dict[str, Any], assert_same: Any) -> None:
    def small(x: Any) -> Any:
        return jnp.tanh(x @ x)

    fast, x = auto_of(jax.jit(small)), jax.random.normal(jax.random.key(0), (48, 48)) / 7
    times[auto.ON_CALLER] = 1.0
    fast(x)
    assert fast.decision((x,), {}).on_caller
    lowered = fast.lower(x)
    assert CALL not in lowered.as_text()
    assert_same(small(x), lowered.compile()(x))


def test_static_and_donated_arguments_ahead_of_time(times: dict[str, Any]) -> None:
    f = jax.jit(lambda x, y, power: sorts(x, y) ** power, static_argnums=2, donate_argnames="x")
    fast, (x, y) = auto_of(f), arguments()
    times[repr(auto.candidates_of(fast)[0])] = 1.0
    fast(x.copy(), y, 2)
    assert CALL in fast.lower(x, y, 2).as_text()
    assert CALL not in fast.lower(x, y, 3).as_text(), "nothing was decided for this one"
    with pytest.raises(ValueError, match="hashable"):
        fast.lower(x, y, [2])


def test_an_array_of_numpy_shares_the_decision(times: dict[str, Any]) -> None:
    fast, args = decided(jax.jit(sorts), times, "lanes")
    fast(*[np.asarray(x) for x in args])
    assert len(times["measured"]) == 1


@pytest.mark.parametrize("which", ["lanes", "original", "undecided"])
def test_what_is_shown_is_what_runs_or_says_so(times: dict[str, Any], which: str) -> None:
    if which == "undecided":
        fast, args = auto_of(jax.jit(sorts)), arguments()
    else:
        fast, args = decided(jax.jit(sorts), times, which)
    candidate = repr(auto.candidates_of(fast)[0])
    first, *rest = dfx.explain(fast, *args).splitlines()
    runs = {"lanes": candidate, "original": "the original runs", "undecided": "the original runs"}
    assert runs[which] in first
    aside = f"this is the plan of {candidate}, a candidate of Auto's, which does not run"
    shown = {
        "explain": "\n".join(rest),
        "plan": "\n".join(dfx.plan(fast, *args).notes),
        "simulate": dfx.simulate(fast, *args).to_text(),
        "summary": dfx.simulate(fast, *args).summary(),
        "profile": dfx.profile(fast, *args).to_text(),
        "page": dfx.profile(fast, *args).meta.get("notes", ()).__str__(),
    }
    for what, text in shown.items():
        assert (aside in text) == (which != "lanes"), what
    table = next(i for i, line in enumerate(rest) if "strategy Branches" in line)
    assert any("auto:" in line for line in rest[:table]), "the reason stands before the plan"
    timeline = dfx.profile(fast, *args)
    assert type(timeline).from_json(timeline.to_json()) == timeline
    plan = dfx.plan(fast, *args)
    assert dfx.Plan.from_text(plan.to_text()) == plan
    fixed = dfx.schedule(jax.jit(sorts), "branches")
    assert "does not run" not in dfx.explain(fixed, *args) + str(dfx.plan(fixed, *args))


def test_tune_leaves_the_strategy_as_it_is(times: dict[str, Any]) -> None:
    strategy = dfx.Auto(budget_s=0.5, min_cost_ns=0.0)
    before = dict(vars(strategy))
    seen: list[dict[str, Any]] = []
    fast, args = dfx.schedule(jax.jit(sorts), strategy), arguments()
    real = autotune.measure

    def measure(runs: Any, *given: Any, **options: Any) -> Any:
        seen.append(dict(vars(strategy)))
        return real(runs, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotune, "measure", measure)
        dfx.tune(fast, *args, budget_s=7.0)
    assert [before, before] == [*seen, vars(strategy)]
