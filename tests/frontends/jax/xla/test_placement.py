"""Nano-batches on one lane in one XLA program: their parts of a result are written in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((7, 6)), jnp.float32)
W = jnp.asarray(RNG.standard_normal((6, 6)), jnp.float32)


class OneLane(dfx.Strategy):
    def split(self, ctx: Any) -> Any:
        return dfx.Split.of_sizes([3, 2, 2])

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            s.execute(ready[0], lane=0)


def rows_in_front(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) + x, jnp.sum(x * x, axis=1)


def rows_behind(x: Any, w: Any) -> Any:
    return (jnp.tanh(x @ w) + x).T


def scheduled(f: Any, out_axes: Any) -> Any:
    return dfx.schedule(f, OneLane(), backend="xla", in_axes=(0, None), out_axes=out_axes)


CASES = [(rows_in_front, 0), (rows_behind, 1)]


def total(f: Any) -> Any:
    return lambda *args: sum(jnp.sum(y**2) for y in jax.tree_util.tree_leaves(f(*args)))


TRANSFORMS: dict[str, Any] = {
    "plain": lambda f: f(X, W),
    "grad": lambda f: jax.grad(total(f), (0, 1))(X, W),
    "vmap": lambda f: jax.vmap(f, (0, None))(jnp.stack([X, -X, X + 1]), W),
    "vmap_last": lambda f: jax.vmap(f, (2, None), -1)(jnp.stack([X, -X], 2), W),
    "jvp_of_one": lambda f: jax.jvp(lambda w: f(X, w), (W,), (W,)),
    "hessian": lambda f: jax.hessian(total(lambda w: f(X, w)))(W),
    "vmap_of_grad": lambda f: jax.vmap(jax.grad(total(f), 1), (None, 0))(X, jnp.stack([W, -W])),
}


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize(("fn", "out_axes"), CASES)
def test_parts_in_place(fn: Any, out_axes: Any, how: str, assert_same: Any) -> None:
    fast = scheduled(fn, out_axes)
    assert fast.planned((X, W), {}).places
    assert_same(TRANSFORMS[how](jax.jit(fn)), TRANSFORMS[how](fast))


def test_parts_of_lanes_that_run_side_by_side_are_joined() -> None:
    """One write would wait for the other."""
    fast = dfx.schedule(rows_in_front, dfx.NanoBatch(2), backend="xla", in_axes=(0, None))
    assert not fast.planned((X, W), {}).places
