"""Random keys in nano-batches: a key for each row, of every implementation, and keys closed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx

pytestmark = pytest.mark.usefixtures("quick_to_compile")

ROWS = 6
DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "fold_in": lambda k, i: jax.vmap(jax.random.fold_in)(k, i),
    "fold_in one": lambda k, i: jax.vmap(jax.random.fold_in, (None, 0))(k[0], i),
    "split": lambda k, i: jax.vmap(lambda k: jax.random.split(k, 2))(k),
    "uniform": lambda k, i: jax.vmap(lambda k: jax.random.uniform(k, (3,)))(k),
    "gamma": lambda k, i: jax.vmap(lambda k: jax.random.gamma(k, 2.0))(k),
    "mapped": lambda k, i: jax.lax.map(lambda k: jax.random.uniform(k, (3,)), k),
}


def _data(made: Any) -> Any:
    keys = jnp.issubdtype(made.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(made) if keys else made)


@pytest.mark.parametrize("sizes", [2, [3, 2, 1]], ids=str)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_key_for_each_row(impl: str, draw: str, sizes: Any) -> None:
    """JAX makes bits of a batch of some keys from the first one: such a draw is whole, or joined."""
    keys = jax.random.split(jax.random.key(3, impl=impl), ROWS)
    args = keys, jnp.arange(ROWS)
    if draw == "fold_in one":
        fast = dfx.schedule(jax.jit(DRAWS[draw]), dfx.NanoBatch(sizes), in_axes=(None, 0))
    else:
        fast = dfx.schedule(jax.jit(DRAWS[draw]), dfx.NanoBatch(sizes), in_axes=0)
    want = _data(fast.original(*args))
    np.testing.assert_allclose(_data(fast(*args)), want, rtol=1e-6)
    notes = dfx.explain(fast, *args)
    by_first = {"rbg": ["uniform", "gamma"], "unsafe_rbg": [*DRAWS]}.get(impl, [])
    assert ("draws from the first one alone" in notes) == (draw in by_first and draw != "mapped")


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_key_that_is_closed_over(impl: str, assert_same: Any) -> None:
    key = jax.random.key(0, impl=impl)

    def weights(x: Any) -> Any:
        return x @ jax.random.normal(key, (5, 3))

    def steps(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c * jax.random.uniform(key), None), x, None, length=2)[0]

    x = jax.random.normal(jax.random.key(1), (ROWS, 5))
    for fn in (weights, steps):
        fast = dfx.schedule(jax.jit(fn), dfx.NanoBatch(2), in_axes=0)
        assert_same(fast.original(x), fast(x))
        assert_same(fast.original(x), jax.jit(lambda x, fast=fast: fast(x))(x))
        assert_same(*(jax.grad(lambda x, f=f: f(x).sum())(x) for f in (fast.original, fast)))


def test_a_batch_of_kalman_filters(assert_same: Any) -> None:
    """Their covariances have no batch: the systems solved in the loop are one for all rows."""
    eye = jnp.eye(2)

    def gains(y: Any) -> Any:
        def step(p: Any, row: Any) -> Any:
            return p * 0.5 + eye, jnp.linalg.inv(p + eye) @ row

        return jax.lax.scan(step, eye, y)[1]

    ys = jax.random.normal(jax.random.key(0), (ROWS, 7, 2))
    fast = dfx.schedule(jax.jit(jax.vmap(gains)), dfx.NanoBatch([3, 2, 1]), in_axes=0)
    assert_same(fast.original(ys), fast(ys))
    assert_same(*(jax.grad(lambda y, f=f: (f(y) ** 2).sum())(ys) for f in (fast.original, fast)))
