"""Steps of loops hand their own short loops to nobody where the original's program is one of its own."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla import machine  # noqa: E402
from dynaflow_xla.frontends.jax.capture import costs  # noqa: E402
from dynaflow_xla.frontends.jax.regions import handed_out  # noqa: E402

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("two_cores")]

SHARED = 'outer_dimension_partitions":["'
TOLD = "handing out costs more than it gains"


def recurrent(w: jax.Array, xs: jax.Array) -> jax.Array:
    """Steps of two products of matrices, each with a short loop over its elements."""

    def step(h: jax.Array, x: jax.Array) -> Any:
        z = jnp.maximum(h @ w + x, 0)
        made = jnp.maximum(z @ w, 0) + 0.5 * h
        return made, made

    return jax.lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[1]


def given(rows: int, width: int, steps: int = 8, seed: int = 0) -> tuple[Any, Any]:
    """A weight and inputs."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((width, width)) / width**0.5
    return jnp.asarray(w, jnp.float32), jnp.asarray(
        rng.standard_normal((steps, rows, width)), jnp.float32
    )


@pytest.mark.parametrize(
    ("rows", "width", "vain"), [(128, 512, True), (8, 32, False), (4096, 1024, False)]
)
def test_by_size(rows: int, width: int, vain: bool) -> None:
    """Below XLA's own limit nothing is handed out, and long loops gain."""
    shapes = (
        jax.ShapeDtypeStruct((width, width), jnp.float32),
        jax.ShapeDtypeStruct((8, rows, width), jnp.float32),
    )
    jaxpr = jax.make_jaxpr(recurrent)(*shapes).jaxpr
    steps = costs.elements_in_steps(jaxpr)
    assert steps.forks == (16 if rows > 8 else 0)  # a chain of operators is handed out once
    assert steps.products == 0
    assert handed_out.costs_more_than_it_gains(jaxpr) == vain


@pytest.mark.parametrize("elements", [1 << 16, 1 << 17, 24_000])
def test_steps_of_loops_alone_are_handed_out_quickly(elements: int) -> None:
    """No product moves what they read to other cores."""

    def steps(xs: Any) -> Any:
        return jax.lax.scan(lambda c, x: (jnp.maximum(c * 0.9 + x, 0), c.sum()), xs[0], xs)

    jaxpr = jax.make_jaxpr(steps)(jax.ShapeDtypeStruct((16, elements), jnp.float32)).jaxpr
    assert not handed_out.costs_more_than_it_gains(jaxpr)
    for strategy in (dfx.Sequential(), dfx.Branches()):
        fast = dfx.schedule(jax.jit(steps), strategy, lanes=2)
        if elements > 1 << 16:  # the original: all cores, and loops are handed out
            assert not dfx.plan(fast, jnp.ones((16, elements))).lanes_used
            assert not fast.planned((jnp.ones((16, elements)),), {}).own_options


def test_forks_of_loops_alone_count_less() -> None:
    def loops(xs: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, x: (jnp.maximum(c * 0.9 + x, 0), None), xs[0], xs)[0]

    def products(xs: Any, w: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            return jnp.maximum(jax.jit(jnp.dot)(c, w) * 0.9 + x, 0), None

        return jax.lax.scan(step, xs[0], xs)[0]

    args = jnp.ones((4, 256, 256)), jnp.eye(256)
    few, many = (costs.elements_in_steps(jax.make_jaxpr(f)(*args).jaxpr) for f in (loops, products))
    assert many.forks == 4 and few.forks == pytest.approx(0.6)
    assert costs.has_products(jax.make_jaxpr(products)(*args))
    assert not costs.has_products(jax.make_jaxpr(loops)(*args))


def test_loops_outside_of_steps_decide_nothing() -> None:
    def body(w: Any, xs: Any) -> Any:
        return jnp.tanh(xs @ w) * 2

    shapes = (
        jax.ShapeDtypeStruct((512, 512), jnp.float32),
        jax.ShapeDtypeStruct((256, 512), jnp.float32),
    )
    jaxpr = jax.make_jaxpr(body)(*shapes).jaxpr
    assert costs.elements_in_steps(jaxpr).forks == 0
    assert not handed_out.costs_more_than_it_gains(jaxpr)


def test_one_core_hands_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 1)
    jaxpr = jax.make_jaxpr(recurrent)(*given(128, 512)).jaxpr
    assert not handed_out.costs_more_than_it_gains(jaxpr)


def test_the_program_alone_is_compiled_so(assert_same: Any) -> None:
    fast = dfx.schedule(jax.jit(recurrent), dfx.Sequential(), lanes=2)
    args = given(128, 512)
    assert not dfx.plan(fast, *args).lanes_used
    assert fast.planned(args, {}).own_options == handed_out.OPTIONS
    assert TOLD in dfx.explain(fast, *args)
    # Short signatures have the program without, in turns.
    for rows, width in ((128, 512), (8, 32), (128, 512)):
        args = given(rows, width, seed=rows)
        for _ in range(2):
            assert_same(recurrent(*args), fast(*args))
        assert bool(fast.planned(args, {}).own_options) == (rows == 128)
    # As a part of something larger, options cannot be given; derivatives are such.
    args = given(128, 512, seed=1)
    assert_same(recurrent(*args) + 1, jax.jit(lambda *a: fast(*a) + 1)(*args))
    wants, gets = (jax.jit(jax.grad(lambda *a, f=f: f(*a).sum()))(*args) for f in (recurrent, fast))
    assert_same(wants, gets)
    compiled = fast.lower(*args).compile()
    assert_same(recurrent(*args), compiled(*args))
    assert SHARED not in compiled.as_text()
    assert SHARED in fast.original.lower(*args).compile().as_text()


def test_a_users_own_option_keeps_its_place(assert_same: Any) -> None:
    options = {"xla_disable_hlo_passes": "dce"}
    fast = dfx.schedule(jax.jit(recurrent, compiler_options=options), dfx.Sequential(), lanes=2)
    args = given(128, 512)
    assert not fast.planned(args, {}).own_options
    assert TOLD not in dfx.explain(fast, *args)
    assert_same(recurrent(*args), fast(*args))
