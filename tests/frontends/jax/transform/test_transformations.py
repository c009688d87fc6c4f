"""A scheduled function under vmap and derivatives, and their like inside of it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from two_branches import W, X, block

import dynaflow_xla as dfx

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.fixture(scope="module")
def fast(schedule: Any) -> Any:
    return schedule(block)


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0), (2, 1)])
def test_vmap(axes: Any, fast: Any, assert_same: Any) -> None:
    ws = jnp.stack([W, W * 2, W - 1], axis=axes[0]) if axes[0] is not None else W
    xs = jnp.stack([X, X * 2, X - 1], axis=axes[1]) if axes[1] is not None else X
    want = jax.jit(jax.vmap(block, axes))(ws, xs)
    assert_same(want, jax.vmap(fast, axes)(ws, xs))
    assert_same(want, jax.jit(jax.vmap(fast, axes))(ws, xs))


def test_vmap_of_vmap(fast: Any, assert_same: Any) -> None:
    xs = jnp.stack([jnp.stack([X, X + 1])] * 3)
    want = jax.vmap(jax.vmap(block, (None, 0)), (None, 0))(W, xs)
    assert_same(want, jax.vmap(jax.vmap(fast, (None, 0)), (None, 0))(W, xs))


def test_vmap_with_keys_and_out_axes(schedule: Any, assert_same: Any) -> None:
    def f(k: Any, x: Any) -> Any:
        a, b = jax.random.split(k)
        return jax.random.normal(a, x.shape) + jnp.sort(x), b

    keys = jax.random.split(jax.random.key(0), 3)
    xs = jnp.arange(12.0).reshape(3, 4)
    fast = schedule(f)
    assert_same(jax.vmap(f)(keys, xs), jax.vmap(fast)(keys, xs))
    assert_same(
        jax.vmap(f, (None, 1), (1, None))(keys[0], xs.T)[0],
        jax.vmap(fast, (None, 1), (1, None))(keys[0], xs.T)[0],
    )


def test_vmap_over_nothing_is_mapped(fast: Any, assert_same: Any) -> None:
    got = jax.vmap(lambda i: fast(W, X) * i)(jnp.arange(3.0))
    assert_same(jax.vmap(lambda i: block(W, X) * i)(jnp.arange(3.0)), got)


def loss(f: Any, w: Any, x: Any) -> Any:
    return jnp.mean(f(w, x) ** 2)


def test_grad(strategy: str, schedule: Any, assert_same: Any) -> None:
    scheduled = schedule(block, strategy)
    original, fast = functools.partial(loss, block), functools.partial(loss, scheduled)
    assert_same(jax.grad(original)(W, X), jax.grad(fast)(W, X))
    want = jax.jit(jax.value_and_grad(original, (0, 1)))(W, X)
    assert_same(want, jax.jit(jax.value_and_grad(fast, (0, 1)))(W, X))


def test_grad_of_a_scheduled_loss(schedule: Any, assert_same: Any) -> None:
    fast = schedule(functools.partial(loss, block))
    assert_same(
        jax.value_and_grad(functools.partial(loss, block))(W, X), jax.value_and_grad(fast)(W, X)
    )


def test_scheduled_gradient(strategy: str, schedule: Any, assert_same: Any) -> None:
    step = jax.value_and_grad(functools.partial(loss, block), (0, 1))
    assert_same(jax.jit(step)(W, X), schedule(step, strategy)(W, X))


def test_vjp_jacrev_and_has_aux(fast: Any, assert_same: Any) -> None:
    want, pull = jax.vjp(block, W, X)
    got, fast_pull = jax.vjp(fast, W, X)
    assert_same(want, got)
    assert_same(pull(jnp.ones_like(want)), fast_pull(jnp.ones_like(got)))
    assert_same(jax.jacrev(block)(W, X), jax.jacrev(fast)(W, X))

    def aux(f: Any, w: Any) -> Any:
        y = f(w, X)
        return y.sum(), {"y": y}

    assert_same(
        jax.grad(functools.partial(aux, block), has_aux=True)(W),
        jax.grad(functools.partial(aux, fast), has_aux=True)(W),
    )


def test_grad_with_ints_keys_and_none(schedule: Any, assert_same: Any) -> None:
    """Inputs and outputs without a derivative beside ones that have one."""

    def f(p: Any, n: Any, k: Any) -> Any:
        noise = jax.random.normal(k, p["w"].shape)
        return jnp.sort(p["w"] * n) + noise, n + 1, k, p["none"]

    params = {"w": jnp.arange(4.0), "none": None}
    args = jnp.int32(3), jax.random.key(0)
    fast = schedule(f)

    def total(g: Any, p: Any) -> Any:
        y, n, k, _ = g(p, *args)
        return (y * n).sum() + jax.random.normal(k)

    assert_same(
        jax.grad(functools.partial(total, f))(params),
        jax.grad(functools.partial(total, fast))(params),
    )


def test_grad_through_scan_with_custom_rules_and_remat(fast: Any, assert_same: Any) -> None:
    @jax.custom_vjp
    def halved(x: Any) -> Any:
        return x

    halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))

    def run(f: Any, w: Any, x: Any) -> Any:
        body = jax.checkpoint(lambda c, _: (halved(f(w, c)), None))
        return lax.scan(body, x, None, length=3)[0].sum()

    want = jax.jit(jax.grad(functools.partial(run, block)))(W, X)
    assert_same(want, jax.jit(jax.grad(functools.partial(run, fast)))(W, X))


def test_custom_derivative_inside_is_respected(schedule: Any, assert_same: Any) -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return jnp.sort(x) * 2

    f.defvjp(lambda x: (f(x), None), lambda _, g: (g * 100,))
    whole = lambda x: f(x) + jnp.cos(x)  # noqa: E731
    x = jnp.arange(3.0)
    want = jax.grad(lambda x: whole(x).sum())(x)
    assert_same(want, jax.grad(lambda x: schedule(whole)(x).sum())(x))


def test_vmap_of_grad_and_grad_of_vmap(fast: Any, assert_same: Any) -> None:
    xs = jnp.stack([X, X * 2])
    per_example = lambda f: jax.vmap(jax.grad(functools.partial(loss, f)), (None, 0))(W, xs)  # noqa: E731
    assert_same(per_example(block), per_example(fast))
    batched = lambda f: jax.grad(lambda w: jax.vmap(lambda x: loss(f, w, x))(xs).sum())(W)  # noqa: E731
    assert_same(batched(block), batched(fast))


def test_second_reverse_derivative(fast: Any, assert_same: Any) -> None:
    """Reverse over reverse: the backward pass is the original's, hence differentiable."""
    twice = lambda f: jax.grad(lambda w: (jax.grad(loss, 1)(f, w, X) ** 2).sum())(W)  # noqa: E731
    assert_same(twice(block), twice(fast))


def test_training_loop(schedule: Any) -> None:
    def step(f: Any, w: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(functools.partial(loss, f))(w, x)
        return w - 0.1 * g, value

    slow = jax.jit(functools.partial(step, block), donate_argnums=0)
    fast = jax.jit(functools.partial(step, schedule(block)), donate_argnums=0)
    a, b = W.copy(), W.copy()
    for _ in range(50):
        a, want = slow(a, X)
        b, got = fast(b, X)
    np.testing.assert_allclose(got, want, rtol=1e-3)
    np.testing.assert_allclose(b, a, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("backend", ["ffi", "xla"])
def test_vmap_over_a_named_axis(schedule: Any, assert_same: Any, backend: str) -> None:
    def f(x: Any, w: Any) -> Any:
        mean = jax.lax.pmean(jnp.sort(x), "b")
        return mean @ w, jnp.cos(x) + jax.lax.axis_index("b"), jnp.sin(w)

    fast = schedule(jax.jit(f), dfx.Branches(), backend=backend)
    for axes in ((0, None), (1, 0)):
        w = jnp.stack([W] * len(X)) if axes[1] == 0 else W
        x = X.T if axes[0] == 1 else X
        out_axes = (None if axes[1] is None else 0, 0, None if axes[1] is None else 0)
        how = {"in_axes": axes, "out_axes": out_axes, "axis_name": "b"}
        assert_same(jax.vmap(f, **how)(x, w), jax.vmap(fast, **how)(x, w))

        def loss(g: Any, x: Any, w: Any, how: Any = how) -> Any:
            return sum((out**2).sum() for out in jax.vmap(g, **how)(x, w))

        assert_same(jax.grad(loss, (1, 2))(f, x, w), jax.grad(loss, (1, 2))(fast, x, w))

    def row(g: Any, x: Any) -> Any:
        return jax.grad(lambda x: g(x, W)[0].sum())(x)

    assert_same(
        jax.vmap(lambda x: row(f, x), axis_name="b")(X),
        jax.vmap(lambda x: row(fast, x), axis_name="b")(X),
    )
