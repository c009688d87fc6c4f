"""A scheduled function returns what the original returns: many functions, each strategy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax_cases import CASES
from unhurried import unhurried

import dynaflow_xla as dfx


@functools.cache
def _original(name: str) -> Any:
    return jax.jit(CASES[name].fn, **CASES[name].jit)


def _pairs() -> list[Any]:
    """Each function with its operators dealt out to lanes, and under one other strategy, by turns."""
    made = []
    for number, name in enumerate(CASES):
        others = ["branches", "sequential", "xla"]
        by_turns = others.pop(number % len(others))
        made += [pytest.param(name, s) for s in ("round_robin", by_turns)]
        made += [pytest.param(name, s, marks=pytest.mark.slow) for s in others]
    return made


@pytest.mark.parametrize(("name", "strategy"), _pairs())
def test_values(
    name: str, strategy: str, schedule: Any, assert_same: Any, request: pytest.FixtureRequest
) -> None:
    if strategy == "round_robin":
        # Operators one by one leave the compiler little to do; the other strategy's code is optimized.
        request.getfixturevalue("one_quick_to_compile")
    made = CASES[name]
    original = _original(name)
    fast = schedule(original, strategy)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        args, kwargs = made.make(rng), made.kwargs(rng)
        assert_same(original(*args, **kwargs), fast(*args, **kwargs))
    assert dfx.plan(fast, *args, **kwargs).graph  # it was planned, not passed by


# -- 64 bit ----------------------------------------------------------------------------------------


def test_x64(strategy: str, schedule: Any, assert_same: Any) -> None:
    def f(x, n, z):
        return jnp.sort(x) @ x, n * n, z * z + x[0], n.astype(float), jnp.sum(x), 2.5 * n

    original = jax.jit(f)
    fast = schedule(original, strategy)
    rng = np.random.default_rng(3)
    args = rng.random(8), np.array([2**40, -(2**33)]), rng.random(3) + 1j * rng.random(3)
    with jax.enable_x64(True):
        want, got = original(*args), fast(*args)
        assert got[0].dtype == jnp.float64 and got[1].dtype == jnp.int64
        assert_same(want, got)
    with jax.enable_x64(False):  # the same callable at 32 bits is another program
        small = (args[0], np.array([2**10, -7]), args[2])
        assert_same(original(*small), fast(*small))
    with jax.enable_x64(True):
        assert_same(original(*args), fast(*args))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn", "float8_e5m2"])
def test_narrow_types_work_or_are_refused(dtype: str, schedule: Any, assert_same: Any) -> None:
    def f(x):
        y = x.astype(jnp.float32)
        return (y * 1).astype(x.dtype), jnp.sin(y), x

    if not hasattr(jnp, dtype):
        pytest.skip(f"this jax has no {dtype}")
    x = jnp.asarray([1, 0, 1, 0, 1, 1, 0], getattr(jnp, dtype))
    want = jax.jit(f)(x)
    try:
        got = schedule(f)(x)
    except dfx.UnsupportedError:
        return
    assert_same(want, got)


def test_what_nobody_reads_is_left_out_also_of_narrow_types(
    schedule: Any, assert_same: Any
) -> None:
    """XLA crashes on a few operators of such types; under jit it never sees those that are not needed."""

    def f(x):
        y = jnp.sort(x.astype(jnp.int4))
        jnp.concatenate([y, y])
        return jnp.sort(x)

    x = jnp.arange(3000.0)[::-1]
    fast = schedule(f)
    assert_same(jnp.sort(x), fast(x))
    assert "3 operators whose results nobody reads were left out" in dfx.explain(fast, x)


# -- arguments that are not plain ------------------------------------------------------------------


def test_closed_over_tracers(strategy: str, schedule: Any, assert_same: Any) -> None:
    def outer(make: Any, x: Any, w: Any, k: Any) -> Any:
        v = jnp.cos(w)

        def inner(y: Any) -> Any:
            return jnp.tanh(v @ y) + jnp.sort(w @ y) + jax.random.normal(k, y.shape)

        return make(inner)(x) * 2 + make(inner)(x + 1)

    args = jnp.arange(4.0), jnp.ones((4, 4)) / 3, jax.random.key(1)
    want = jax.jit(functools.partial(outer, lambda f: f))(*args)
    got = jax.jit(functools.partial(outer, lambda f: schedule(f, strategy)))(*args)
    assert_same(want, got)
    # Gradients flow into what was closed over.
    loss = lambda make: lambda w: outer(make, args[0], w, args[2]).sum()  # noqa: E731
    assert_same(
        jax.grad(loss(lambda f: f))(args[1]),
        jax.grad(loss(lambda f: schedule(f, strategy)))(args[1]),
    )


def test_closed_over_tracer_leaves_no_trace_behind(schedule: Any) -> None:
    """Two outer programs share one scheduled closure maker; neither keeps the other's tracers."""

    def program(x: Any, w: Any) -> Any:
        return schedule(lambda y: jnp.sort(y) * w)(x)

    x = jnp.arange(3.0)
    for w in (2.0, 3.0):
        np.testing.assert_allclose(jax.jit(program)(x, w), x * w)
    with jax.checking_leaks():
        np.testing.assert_allclose(jax.jit(program)(x, 4.0), x * 4)


def test_rebound_closure_value_is_seen(schedule: Any) -> None:
    """As with jax.jit, a closed-over array is fixed at the first trace; new arguments are not."""
    box = {"w": jnp.float32(2.0)}
    fast = schedule(lambda x: jnp.sort(x) * box["w"])
    np.testing.assert_allclose(fast(jnp.ones(3)), 2 * np.ones(3))
    box["w"] = jnp.float32(5.0)
    original = fast.original(jnp.ones(3))
    np.testing.assert_allclose(fast(jnp.ones(3)), original)


@pytest.mark.parametrize("option", [{"donate_argnums": 0}, {"donate_argnames": "x"}])
def test_donated(option: dict[str, Any], strategy: str, schedule: Any) -> None:
    def f(x, y):
        return jnp.sort(x) + y, jnp.sum(y)

    fast = schedule(jax.jit(f, **option), strategy)
    y = jnp.ones((256,), jnp.float32)
    for seed in range(3):
        host = np.random.default_rng(seed).random(256, np.float32)
        x = jnp.array(host)
        got = fast(x, y)
        np.testing.assert_allclose(got[0], np.sort(host) + 1, rtol=1e-6)
        assert x.is_deleted() and not y.is_deleted()
        x = got[0]  # a training loop: the donated result is the next input
        got = fast(x, y)
        np.testing.assert_allclose(got[0], np.sort(host) + 2, rtol=1e-6)


def test_donated_and_read_by_two_lanes(schedule: Any) -> None:
    """The donated buffer may hold the result; no lane may see it overwritten while it reads."""

    def f(x):
        return x[::-1] + 1, jnp.sort(x), jnp.cumsum(x)

    fast = schedule(jax.jit(f, donate_argnums=0))
    for seed in range(20):
        host = np.random.default_rng(seed).random(4096, np.float32)
        a, b, c = fast(jnp.array(host))
        np.testing.assert_array_equal(a, host[::-1] + np.float32(1))
        np.testing.assert_array_equal(b, np.sort(host))
        np.testing.assert_allclose(c, np.cumsum(host), rtol=1e-3)


def test_inputs_are_not_changed(strategy: str, schedule: Any) -> None:
    fast = schedule(lambda x: (x.at[0].set(9.0), jnp.sort(x), x * 2), strategy)
    host = np.arange(64, dtype=np.float32)[::-1].copy()
    x = jnp.array(host)
    for _ in range(3):
        fast(x)
    np.testing.assert_array_equal(x, host)
    fast(host)
    np.testing.assert_array_equal(host, np.arange(64, dtype=np.float32)[::-1])


def test_results_of_two_calls_are_apart(strategy: str, schedule: Any) -> None:
    fast = schedule(lambda x: (jnp.sort(x), x * 2), strategy)
    first = fast(jnp.arange(64.0))
    kept = [np.array(leaf) for leaf in first]
    for i in range(5):
        fast(jnp.full((64,), float(i)))
    for leaf, want in zip(first, kept, strict=True):
        np.testing.assert_array_equal(leaf, want)


def test_unaligned_inputs(strategy: str, schedule: Any) -> None:
    """Slices of a NumPy array start anywhere; XLA copies what is not 64-byte aligned."""
    fast = schedule(lambda x: jnp.sort(x) + jnp.flip(x), strategy)
    base = np.random.default_rng(0).random(300, np.float32)
    for start in range(1, 9):
        x = base[start : start + 128]
        for _ in range(2):
            np.testing.assert_array_equal(fast(x), np.sort(x) + x[::-1])


def test_same_memory_with_new_content(schedule: Any) -> None:
    """Views are cached by address: what is behind the address must be read on every call."""
    fast = schedule(lambda x: (jnp.sort(x), x + 1))
    host = np.zeros(2048, np.float32)
    for i in range(10):
        host[:] = np.random.default_rng(i).random(2048)
        a, b = fast(host)
        np.testing.assert_array_equal(a, np.sort(host))
        np.testing.assert_array_equal(b, host + 1)


def test_same_array_twice(strategy: str, schedule: Any, assert_same: Any) -> None:
    f = lambda x, y: (jnp.sort(x) @ y, x - y)  # noqa: E731
    x = jnp.arange(9.0)
    assert_same(jax.jit(f)(x, x), schedule(f, strategy)(x, x))


def test_committed_array(schedule: Any, assert_same: Any) -> None:
    f = lambda x: jnp.sort(x) @ x  # noqa: E731
    x = jax.device_put(jnp.arange(9.0), jax.devices()[0])
    got = schedule(f)(x)
    assert_same(jax.jit(f)(x), got)
    assert got.devices() == x.devices()


def test_many_signatures(strategy: str, schedule: Any, assert_same: Any) -> None:
    original = jax.jit(lambda x, y: (jnp.sort(x) + y, y * 2))
    fast = schedule(original, strategy)
    signatures = [
        (jnp.ones(3), 1.0), (jnp.ones((2, 3)), 2), (jnp.arange(3), 1.0), (jnp.ones(3), jnp.ones(3)),
    ]  # fmt: skip
    for _ in range(2):
        for args in signatures:
            assert_same(original(*args), fast(*args))


def test_more_signatures_than_are_kept(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature that was dropped is planned anew; executables in use keep their programs."""
    from dynaflow_xla.frontends.jax.transform import programs

    monkeypatch.setattr(programs, "_MAX_ENTRIES", 2)
    fast = schedule(lambda x: jnp.sort(x) + jnp.flip(x))
    for _ in range(2):
        for n in range(1, 6):
            np.testing.assert_allclose(fast(jnp.arange(float(n))), np.full(n, 0) + _sorted_flip(n))


def _sorted_flip(n: int) -> np.ndarray:
    x = np.arange(float(n), dtype=np.float32)
    return np.sort(x) + x[::-1]


@pytest.mark.parametrize("how", ["sequential", "branches"])
def test_named_strategies(how: str, assert_same: Any) -> None:
    f = lambda x: jnp.sort(x) @ jnp.cos(x)  # noqa: E731
    assert_same(jax.jit(f)(jnp.arange(8.0)), dfx.schedule(f, how)(jnp.arange(8.0)))


def test_auto_equals_original(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    unhurried(monkeypatch)
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    f = lambda x: jnp.sort(x, 0) @ jnp.sort(x, 1)  # noqa: E731
    strategy = dfx.Auto(budget_s=0.2, min_cost_ns=0.0)
    x = jnp.asarray(np.random.default_rng(0).random((64, 64)), jnp.float32)
    fast = dfx.schedule(f, strategy)
    assert_same(jax.jit(f)(x), fast(x))
    assert_same(jax.jit(f)(x), fast(x))
    assert_same(jax.jit(f)(x), jax.jit(fast)(x))
    assert "auto:" in dfx.explain(fast, x)


def test_replace_by_an_equal_implementation(schedule: Any, lanes: int) -> None:
    class Swap(dfx.Strategy):
        def rules(self, graph: Any) -> Any:
            return [dfx.Op("sort")]

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    if "sort" in op.name:
                        s.execute(op, replace=lambda x: -jnp.sort(-x)[::-1], lane=lanes - 1)
                    else:
                        s.execute(op, lane=0)

    x = jnp.asarray([3.0, 1.0, 2.0])
    fast = schedule(lambda x: lax.sort(x) * 2 + x, Swap())
    np.testing.assert_allclose(fast(x), np.array([2.0, 4.0, 6.0]) + np.asarray(x))
    assert "replaced" in dfx.explain(fast, x)
