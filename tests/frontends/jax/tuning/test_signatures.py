"""Auto meets further signatures of a function: calls do not stay in Python for that, and keys stay whole."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from unhurried import unhurried

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax import scheduled
from dynaflow_xla.tuning import autotune


@pytest.fixture(autouse=True)
def original_is_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate runs once to be measured, and the original is the fastest."""

    def measure(runs: dict[str, Any], *_: Any, **__: Any) -> autotune.Medians:
        for run in runs.values():
            run()
        return autotune.Medians({name: [1.0 if name == "original" else 2.0] for name in runs})

    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "measure", measure)
    unhurried(monkeypatch)


def arguments(size: int) -> tuple[Any, Any]:
    x = jax.random.normal(jax.random.key(size), (size,))
    return x, x + 1


def _files_in_python(call: Any) -> set[str]:
    """Files of the Python functions that a call runs."""
    files: set[str] = set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename))
    try:
        call()
    finally:
        sys.setprofile(before)
    return {Path(file).name for file in files}


def test_no_signature_stays_in_python() -> None:
    """JAX runs in Python, for ever, what a program raised for; a new decision compiles nothing anew."""
    compiled: list[str] = []
    traced: list[int] = []

    def listen(event: str, _: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(str(about.get("fun_name", "")))

    def of_several_sizes(x: Any, y: Any) -> Any:
        traced.append(x.shape[0])
        return jnp.sort(x) + jnp.sort(-y)

    fast = dfx.schedule(jax.jit(of_several_sizes), dfx.Auto(min_cost_ns=0.0))
    given = [arguments(size) for size in (256, 512, 768, 1024)]
    for number, args in enumerate(given):
        for _ in range(2):
            fast(*args)
        jax.monitoring.register_event_duration_secs_listener(listen)
        before = len(traced)
        try:
            for earlier in given[: number + 1]:
                fast(*earlier)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert not compiled and len(traced) == before
    for args in given:
        assert fast.decision(args, {}).name == "original"
        assert "pjit.py" not in _files_in_python(functools.partial(fast, *args))
    x, y = given[0]
    for _ in range(2):
        fast(x=x, y=y)
    assert "pjit.py" not in _files_in_python(lambda: fast(x=x, y=y))


def test_static_values_that_are_new_at_every_call_are_decided_for_a_few_times(
    monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    monkeypatch.setattr(scheduled, "_MOST_UNUSED", 2)
    f = functools.partial(jax.jit, static_argnums=1)(lambda x, name: jnp.sort(x) + len(name))
    fast, (x, _) = dfx.schedule(f, dfx.Auto(min_cost_ns=0.0)), arguments(256)
    for name in "ab":
        assert_same(f(x, name), fast(x, name))
    with pytest.warns(dfx.errors.FallbackWarning, match="new signatures keep coming") as told:
        for name in "cdef":
            assert_same(f(x, name), fast(x, name))
    assert len(told) == 1 and told[0].filename == __file__
    assert len(fast.decisions) == 2
    assert "the second call with one decides" in dfx.explain(fast, x, "f")
    assert_same(f(x, "f"), fast(x, "f"))
    assert len(fast.decisions) == 3 and fast.decision((x, "f"), {}).name == "original"
    for _ in range(2):
        fast(x, "f")
    assert "pjit.py" not in _files_in_python(functools.partial(fast, x, "f"))


@pytest.mark.parametrize("strategy", ["auto", dfx.Auto(min_cost_ns=0.0)])
def test_keys_that_may_be_used_once_are_not_measured(strategy: Any) -> None:
    fast = dfx.schedule(jax.jit(lambda key: jnp.sort(jax.random.normal(key, (512,)))), strategy)
    with jax.debug_key_reuse(True):
        key = jax.random.key(0)
        fast(key)
        with pytest.raises(jax.errors.KeyReuseError):
            fast(key)
