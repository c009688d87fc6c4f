"""Cumulative operators of lanes, in one pass by a kernel of the engine."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.errors import PlanTypeError  # noqa: E402
from dynaflow_xla.frontends.jax.regions import one_pass  # noqa: E402
from dynaflow_xla.planning.instructions import Launch  # noqa: E402

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("quick_to_compile")]

ON_LANES = dfx.Branches(wide=False)
OPERATORS = {
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
}
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["bfloat16", "float16", "float32", "float64"]
SHAPES = [(1,), (7,), (1025,), (0, 3), (3, 0), (1, 1), (5, 33), (64, 8), (17, 1, 9), (3, 40, 5)]


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: Any) -> None:
    monkeypatch.setattr(one_pass, "MIN_ELEMENTS", 0)


def on_lanes(fn: Callable[..., Any], *args: Any, passes: int = 1, **settings: Any) -> Any:
    """Results of a function on two lanes, of which so many operators have to be in one pass."""
    fast = dfx.schedule(fn, ON_LANES, **{"lanes": 2} | settings)
    made = fast(*args)
    assert len(re.findall(r"one pass: \w+ of ", dfx.explain(fast, *args))) == passes
    return made


def _calls(fast: Any, *args: Any) -> list[tuple[int, int]]:
    """Of each lane's program: calls of the kernel, and those that write to the plan's buffers."""
    texts = [t for stage, _ in fast.planned(args, {}).stages for t in stage.lane_texts.values()]
    return [
        (text.count("@dfx_cumulative"), len(re.findall(r"dfx_cumulative.*buffer = \d", text)))
        for text in texts
    ]


def _values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return np.asarray(rng.standard_normal(shape) + 0.1).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
@pytest.mark.parametrize("name", OPERATORS)
def test_values(name: str, dtype: str) -> None:
    if name == "cumprod" and dtype in FLOATS:
        pytest.skip("XLA's")
    rng = np.random.default_rng()
    with jax.enable_x64(True):
        for shape in rng.permutation(np.array(SHAPES, object))[:4]:
            axis, reverse = int(rng.integers(len(shape))), bool(rng.integers(2))

            def fn(x: Any, axis: int = axis, reverse: bool = reverse) -> Any:
                return OPERATORS[name](x, axis=axis, reverse=reverse)

            x = _values(rng, dtype, tuple(shape))
            want, got = jax.jit(fn)(x), on_lanes(fn, x)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            if dtype in INTEGERS or name in ("cummax", "cummin"):
                np.testing.assert_array_equal(got, want, err_msg=f"{shape} {axis} {reverse}")
                continue
            exact = x.astype(np.longdouble)
            exact = np.flip(exact, axis) if reverse else exact
            exact = np.cumsum(exact, axis=axis)
            exact = np.flip(exact, axis) if reverse else exact
            _no_less_exact(got, want, exact, dtype)


def _no_less_exact(got: Any, want: Any, exact: Any, dtype: str) -> None:
    """Within a rounding of the exact values, and together no farther from them than the original's."""
    errors = [np.abs(np.asarray(v).astype(np.longdouble) - exact) for v in (got, want)]
    eps, tiny = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).tiny)
    largest = np.max(np.abs(exact), initial=0.0)
    if dtype == "float64":  # short stretches are added plainly
        assert np.all(errors[0] <= 8 * eps * largest + tiny)
    else:
        assert np.all(errors[0] <= 0.501 * eps * np.abs(exact) + 1e-3 * eps * largest + tiny)
    if dtype != "float64" or exact.size > 10_000:  # a few roundings of float64 may be lucky
        assert errors[0].sum() <= 1.001 * errors[1].sum() + 1e-3 * eps * largest + tiny


@pytest.mark.parametrize("small", [1e-30, 1e30])
def test_products_that_leave_the_range_do_not_come_back(small: float) -> None:
    x = jnp.array([small, small, 1 / small, 1 / small])
    got = on_lanes(jnp.cumprod, x, passes=0)
    np.testing.assert_array_equal(got, jax.jit(jnp.cumprod)(x))
    assert got[-1] == (0.0 if small < 1 else np.inf)


@pytest.mark.parametrize("dtype", FLOATS)
def test_long_sums_are_no_less_exact(dtype: str) -> None:
    with jax.enable_x64(True):
        x = _values(np.random.default_rng(), dtype, (1 << 16,))
        x = (np.abs(x.astype(np.float64)) * (2.0**-9 if dtype == "float16" else 1.0)).astype(
            x.dtype
        )
        got, want = on_lanes(lax.cumsum, x), jax.jit(lax.cumsum)(x)
        _no_less_exact(got, want, np.cumsum(x.astype(np.longdouble)), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(48,), (24, 5)])
@pytest.mark.parametrize("reverse", [False, True])
def test_nan_infinity_and_signs_of_zeros(dtype: str, shape: tuple[int, ...], reverse: bool) -> None:
    rng = np.random.default_rng()

    def fn(x: Any) -> Any:
        return [f(x, axis=0, reverse=reverse) for f in (lax.cumsum, lax.cummax, lax.cummin)]

    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -2.0])
    with jax.enable_x64(True):
        for trial in range(4):
            among = special[1 if trial % 2 else 0 :] if trial < 2 else special[3:]
            x = rng.choice(among, shape).astype(jnp.dtype(dtype))
            want = [np.asarray(v, np.float64) for v in jax.jit(fn)(x)]
            got = [np.asarray(v, np.float64) for v in on_lanes(fn, x, passes=3)]
            for g, w in zip(got, want, strict=True):
                np.testing.assert_array_equal(g, w)
            for g, w in zip(got[1:], want[1:], strict=True):
                np.testing.assert_array_equal(
                    np.signbit(g)[~np.isnan(w)], np.signbit(w)[~np.isnan(w)]
                )


def test_complex_numbers_and_small_arrays_are_xlas(monkeypatch: Any) -> None:
    x = np.random.default_rng().standard_normal(300)
    z = (x + 1j * x[::-1]).astype(np.complex64)
    np.testing.assert_allclose(on_lanes(lax.cumsum, z, passes=0), jax.jit(lax.cumsum)(z), rtol=1e-5)
    monkeypatch.setattr(one_pass, "MIN_ELEMENTS", 301)
    on_lanes(lax.cumsum, x.astype(np.float32), passes=0)


def _two(x: Any) -> Any:
    a, b = jnp.cumsum(x, 0), jnp.cumsum(2 * x, 1)
    return a, b, lax.cummax(jnp.sin(b), 1, reverse=True)


def _x(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng().standard_normal(shape), jnp.float32)


def _close(got: Any, want: Any) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)


def test_results_are_written_where_the_caller_gets_them() -> None:
    fast = dfx.schedule(lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1)), ON_LANES, lanes=2)
    x = _x(12, 20)
    _close(fast(x), (jnp.cumsum(x, 0), jnp.cumsum(x, 1)))
    assert sorted(into for _, into in _calls(fast, x)) == [1, 1]
    told = "one pass: 1920 bytes of results are written where the caller gets them, not copied"
    assert told in dfx.explain(fast, x)


@pytest.mark.parametrize(
    ("fn", "into"),
    [
        (lambda x: (lambda a: (a, a))(jnp.cumsum(x)), 0),  # two results
        (lambda x: (lambda a: (a, jnp.sin(a)))(jnp.cumsum(x)), 0),  # it is read on the lane
        (lambda x: jnp.sin(jnp.cumsum(x)), 0),
        (lambda x: (jnp.cumsum(x), jnp.cumsum(x)), 2),
        (lambda x: jnp.cumsum(x).reshape(4, -1), 0),
    ],
)
def test_what_else_reads_a_result(fn: Any, into: int) -> None:
    fast = dfx.schedule(fn, ON_LANES, lanes=1)
    for _ in range(2):
        x = _x(64)
        _close(fast(x), fn(x))
    assert _calls(fast, x)[0][1] == into


def test_values_that_cross_lanes() -> None:
    fast = dfx.schedule(_two, ON_LANES, lanes=2)
    for _ in range(3):
        x = _x(9, 31)
        _close(fast(x), _two(x))
    assert dfx.verify(fast, x)
    assert dfx.profile(fast, x).spans


def test_inside_of_loops_and_conditions() -> None:
    def fn(x: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            return carry + jnp.cumsum(row), lax.cummax(row)

        scanned = lax.scan(step, jnp.zeros(x.shape[1]), x)
        there = lax.cond(x[0, 0] > 0, lambda v: jnp.cumsum(v, 0), lambda v: jnp.cumsum(v, 1), x)
        return scanned, there, lax.fori_loop(0, 3, lambda _, v: jnp.cumsum(v) / 8, x[0])

    fast = dfx.schedule(fn, ON_LANES, lanes=2)
    for _ in range(2):
        x = _x(6, 40)
        _close(fast(x), fn(x))
    assert sum(calls for calls, _ in _calls(fast, x)) >= 5


def test_derivatives_and_vmap() -> None:
    def loss(x: Any) -> Any:
        a, b, c = _two(x)
        return (a * b + jnp.sin(c)).sum() / 1e2

    fast, x, v = dfx.schedule(loss, ON_LANES, lanes=2), _x(8, 16), _x(8, 16)
    _close(jax.grad(fast)(x), jax.grad(loss)(x))
    _close(jax.jvp(fast, (x,), (v,)), jax.jvp(loss, (x,), (v,)))
    _close(jax.jit(jax.vmap(fast))(_x(3, 8, 16) * 0 + x), jax.vmap(loss)(_x(3, 8, 16) * 0 + x))


def test_nano_batches() -> None:
    fn = lambda x: jnp.cumsum(jnp.tanh(x), axis=1)  # noqa: E731
    fast = dfx.schedule(fn, dfx.NanoBatch(2), in_axes=0, lanes=2)
    x = _x(8, 40)
    _close(fast(x), fn(x))
    # Each lane's half is written where it belongs in the whole.
    assert [into for _, into in _calls(fast, x)] == [1, 1]


def test_calls_from_several_threads() -> None:
    fast = dfx.schedule(_two, ON_LANES, lanes=2)
    wrong: list[str] = []

    def calls() -> None:
        for _ in range(10):
            x = _x(30, 50)
            try:
                _close(fast(x), _two(x))
            except AssertionError as error:
                wrong.append(str(error))

    threads = [threading.Thread(target=calls) for _ in range(3)]
    [t.start() for t in threads]
    [t.join(timeout=120) for t in threads]
    assert not wrong and not any(t.is_alive() for t in threads)


def test_a_wrong_kernel_is_noticed(monkeypatch: Any) -> None:
    monkeypatch.setitem(one_pass.KINDS, "cumsum", one_pass.KINDS["cummax"])
    x = _x(77)
    got = on_lanes(jnp.cumsum, x)
    np.testing.assert_array_equal(got, lax.cummax(x))
    with pytest.raises(AssertionError):
        _close(got, jnp.cumsum(x))


def test_off() -> None:
    lanes = dfx.Lanes(2, one_pass=False)
    x = _x(12, 20)
    _close(on_lanes(_two, x, passes=0, lanes=lanes), _two(x))
    assert all(c == 0 for c, _ in _calls(dfx.schedule(_two, ON_LANES, lanes=lanes), x))
    with pytest.raises(PlanTypeError, match="one_pass must be True or False"):
        dfx.Lanes(2, one_pass=1)  # type: ignore[arg-type]


def test_explain_says_what_runs_in_one_pass() -> None:
    text = dfx.explain(dfx.schedule(_two, ON_LANES, lanes=2), _x(12, 20))
    assert re.search(
        r"one pass: cumsum of float32\[12,20\] along axis 0, in region '\w+' on lane \d", text
    )
    assert "last bits may differ" in text and "one_pass=False" in text
    wide = dfx.explain(dfx.schedule(_two, dfx.Sequential(), lanes=2), _x(12, 20))
    assert "one pass" not in wide


def test_branches_uses_lanes_where_one_pass_gains() -> None:
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)

    def wide(**settings: Any) -> list[bool]:
        fast = dfx.schedule(
            lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1)), dfx.Branches(), **settings
        )
        return [i.lane < 0 for i in dfx.plan(fast, x).instructions if isinstance(i, Launch)]

    assert wide(lanes=2) == [False, False]
    seen = []

    class Looks(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            for op in s.handles:
                seen.append((op.cost_at(s.context.lane_cores), op.cost_at(s.context.cores)))
            dfx.Sequential().schedule(s)

    for lanes in (dfx.Lanes(2, width=1), dfx.Lanes(2, width=1, one_pass=False)):
        dfx.plan(dfx.schedule(lambda x: jnp.cumsum(x, 1), Looks(), lanes=lanes), x)
    (lane, all_cores), (lane_of_xla, all_of_xla) = seen
    assert lane < lane_of_xla and all_cores == pytest.approx(all_of_xla)


def test_exported_programs_hold_no_call_of_ours() -> None:
    fast, x = dfx.schedule(_two, ON_LANES, lanes=2), _x(12, 20)
    with pytest.warns(dfx.FallbackWarning, match="holds the original"):
        exported = jax.export.export(jax.jit(fast))(x)
    assert "custom_call @dfx" not in exported.mlir_module()
    _close(jax.export.deserialize(exported.serialize()).call(x), _two(x))
