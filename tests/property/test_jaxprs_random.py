"""Random JAX programs: a schedule returns what the original returns, whatever the cut."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("hypothesis")
jax = pytest.importorskip("jax")

import hypothesis.strategies as st  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from hypothesis import HealthCheck, given, note, settings  # noqa: E402
from jax import lax  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

LANES = min(2, len(os.sched_getaffinity(0)))
N = 4  # every value is [N, N]; programs stay closed under every operator
DTYPES = (jnp.float32, jnp.float32, jnp.bfloat16, jnp.int32)

# Every operator maps [N, N] arrays to one and is continuous in float arguments: rounding may differ
# between a program and its cut. `bounded` follows each step, so that rounding is not blown up.
UNARY: dict[str, Callable[[Any], Any]] = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "logistic": lambda x: jax.nn.sigmoid(x * 1.0),
    "sort0": lambda x: jnp.sort(x, axis=0),
    "sort1": lambda x: jnp.sort(x, axis=1),
    "transpose": jnp.transpose,
    "reverse": lambda x: x[::-1, ::-1],
    "cumsum": lambda x: jnp.cumsum(x, axis=1) / N,
    "roll": lambda x: jnp.roll(x, 1, axis=0),
    "row_mean": lambda x: jnp.broadcast_to(jnp.mean(x, 1, keepdims=True), x.shape),
    "column_max": lambda x: jnp.broadcast_to(jnp.max(x, axis=0), x.shape),
    "reshape": lambda x: x.reshape(2, -1).reshape(x.shape) * 2,
    "gather": lambda x: x[jnp.array([2, 0, 3, 1])],
    "scatter": lambda x: x.at[jnp.array([1, 1])].add(1),
    "pad_slice": lambda x: jnp.pad(x, 1)[2:, :-2],
    "softmax": lambda x: jax.nn.softmax(x.astype(jnp.float32), axis=-1),
    "relu": jax.nn.relu,
    "scan": lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c - r), x[0] * 1.0, x * 1.0)[1],
    "while": lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.cos(c + i), x * 1.0),
    "cond": lambda x: lax.cond(x.size > 3, lambda y: y + 1, lambda y: y - 1, x),
    "jitted": jax.jit(lambda x: jnp.abs(x) + 1),
    "vmapped": jax.vmap(lambda r: r - r.sum() / N),
    "cast": lambda x: x.astype(jnp.float32),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "subtract": jnp.subtract,
    "multiply": jnp.multiply,
    "maximum": jnp.maximum,
    "matmul": lambda x, y: x @ y / N,
    "concatenate": lambda x, y: jnp.concatenate([x[: N // 2], y[N // 2 :]]),
    "where_index": lambda x, y: jnp.where(jnp.arange(N) < 2, x, y),
    "outer_sum": lambda x, y: x[:, :1] + y[:1],
}


# Operators with kinks, or that choose between nearly equal values, have no stable derivative.
KINKED = {"sort0", "sort1", "column_max", "relu", "jitted"}
SMOOTH_UNARY, SMOOTH_BINARY = sorted(set(UNARY) - KINKED), sorted(set(BINARY) - {"maximum"})

# bfloat16 values are rounded where the program says so, in the original and in the cut alike.
OPTIONS = {"xla_allow_excess_precision": False}


def bounded(x: Any) -> Any:
    return jnp.clip(x, -8, 8) if x.dtype == jnp.int32 else jnp.tanh(x)


class Spread(dfx.Strategy):
    """Regions of one operator or of the default cut, each on a drawn lane (or all on lane 0)."""

    def __init__(self, fine: bool, draws: tuple[int, ...], lanes: int) -> None:
        self.fine, self.draws, self.lanes = fine, draws, lanes

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("*")] if self.fine and graph.ops else None

    def schedule(self, s: Any) -> None:
        count = 0
        while ready := s.ready():
            order = ready[::-1] if self.draws[count % len(self.draws)] else ready
            for op in order:
                s.execute(op, lane=self.draws[count % len(self.draws)] % self.lanes)
                count += 1

    def __repr__(self) -> str:
        return f"Spread({self.fine}, {self.draws}, {self.lanes})"


@st.composite
def programs(
    draw: st.DrawFn, smooth: bool = False
) -> tuple[tuple[Any, ...], list[tuple[Any, ...]], tuple[int, ...]]:
    """(dtypes of the inputs, steps, which values are returned)."""
    types = DTYPES[:2] if smooth else DTYPES
    unary = SMOOTH_UNARY if smooth else sorted(UNARY)
    binary = SMOOTH_BINARY if smooth else sorted(BINARY)
    dtypes = tuple(draw(st.lists(st.sampled_from(types), min_size=1, max_size=3)))
    steps: list[tuple[Any, ...]] = []
    for number in range(draw(st.integers(1, 9))):
        value = st.integers(0, len(dtypes) + number - 1)
        if draw(st.booleans()):
            steps.append((draw(st.sampled_from(unary)), draw(value)))
        else:
            steps.append((draw(st.sampled_from(binary)), draw(value), draw(value)))
    values = len(dtypes) + len(steps)
    outputs = draw(st.lists(st.integers(0, values - 1), min_size=0, max_size=2))
    return dtypes, steps, (values - 1, *outputs)


def build(steps: list[tuple[Any, ...]], outputs: tuple[int, ...]) -> Callable[..., Any]:
    def program(*args: Any) -> Any:
        values = list(args)
        for name, *operands in steps:
            fn = UNARY.get(name) or BINARY[name]
            values.append(bounded(fn(*[values[i] for i in operands])))
        return [values[i] for i in outputs]

    return program


def inputs(dtypes: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.integers(-8, 8, (N, N)) / 8, d) if d != jnp.int32
                 else jnp.asarray(rng.integers(-8, 8, (N, N)), d) for d in dtypes)  # fmt: skip


def assert_close(want: Any, got: Any) -> None:
    narrow = any(w.dtype == jnp.bfloat16 for w in want)
    assert len(want) == len(got)
    for w, g in zip(want, got, strict=True):
        assert (w.dtype, w.shape, w.weak_type) == (g.dtype, g.shape, g.weak_type)
        a, b = np.asarray(w), np.asarray(g)
        if a.dtype.kind in "iub":
            np.testing.assert_array_equal(b, a)
            continue
        tolerance = 3e-2 if narrow else 1e-3
        a, b = a.astype(np.float64), b.astype(np.float64)
        scale = max(1.0, float(np.max(np.abs(a), initial=0.0)))
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance * scale)


@functools.cache
def examples() -> int:
    return int(os.environ.get("DYNAFLOW_XLA_EXAMPLES", "16"))


COMMON = settings(
    max_examples=examples(),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@COMMON
@given(programs(), st.integers(0, 2**31))
def test_branches_equals_original(program: Any, seed: int) -> None:
    dtypes, steps, outputs = program
    fn = jax.jit(build(steps, outputs), compiler_options=OPTIONS)
    fast = dfx.schedule(fn, dfx.Branches(), lanes=LANES, compiler_options=OPTIONS)
    for number in range(2):
        args = inputs(dtypes, seed + number)
        assert_close(fn(*args), fast(*args))


@COMMON
@given(
    programs(),
    st.booleans(),
    st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple),
    st.integers(0, 2**31),
)
def test_any_lanes_equal_one_lane(
    program: Any, fine: bool, draws: tuple[int, ...], seed: int
) -> None:
    dtypes, steps, outputs = program
    fn = jax.jit(build(steps, outputs), compiler_options=OPTIONS)
    spread = dfx.schedule(fn, Spread(fine, draws, LANES), lanes=LANES, compiler_options=OPTIONS)
    one = dfx.schedule(fn, Spread(fine, draws, 1), lanes=1, compiler_options=OPTIONS)
    args = inputs(dtypes, seed)
    note(dfx.plan(spread, *args).to_text())
    assert dfx.graph(spread, *args).to_json() == dfx.graph(one, *args).to_json()
    want, got, alone = fn(*args), spread(*args), one(*args)
    assert_close(want, got)
    assert_close(alone, got)  # not bit-equal: a lane fuses its regions
    for _ in range(3):  # the same plan, again: no data left over from a call before
        for a, b in zip(got, spread(*args), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def quick_to_compile() -> Iterator[None]:
    """The compiler's optimisations, which take most of the time, are met by the tests above."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@COMMON
@given(programs(smooth=True), st.integers(0, 2**31))
@pytest.mark.usefixtures("quick_to_compile")
def test_gradients_equal(program: Any, seed: int) -> None:
    dtypes, steps, outputs = program
    fn = jax.jit(build(steps, outputs))

    def total(g: Any) -> Callable[..., Any]:
        def loss(*args: Any) -> Any:
            return sum(jnp.sum(x.astype(jnp.float32)) for x in g(*args))

        return jax.grad(loss, tuple(range(len(dtypes))))

    args = inputs(dtypes, seed)
    fast = dfx.schedule(fn, dfx.Branches(), lanes=LANES)
    assert_close(total(fn)(*args), total(fast)(*args))
