"""Splits under conditions, in JAX: the values of the original, cut where it is allowed, shown."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dynaflow_xla as dfx

pytestmark = pytest.mark.usefixtures("quick_to_compile")

KEYS = jax.random.split(jax.random.key(0), 4)
W = {"a": jax.random.normal(KEYS[0], (8, 16)), "b": jax.random.normal(KEYS[1], (16, 8))}


def layer(w: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w["a"]) @ w["b"]


def data(*shape: int) -> jax.Array:
    return jax.random.normal(KEYS[2], shape)


@pytest.mark.parametrize(
    ("strategy", "sizes", "told"),
    [
        (dfx.NanoBatch(2, align=8), [16, 12], "beginning at multiples of 8 rows"),
        (dfx.NanoBatch(2, boundaries="starts"), [11, 17], "beginning at 4 given boundaries only"),
        (dfx.NanoBatch(2, weights="tokens"), [20, 8], "balanced by the work of each row"),
    ],
)
def test_conditions_are_kept_and_shown(
    strategy: Any, sizes: list[int], told: str, assert_same: Any
) -> None:
    context = {"starts": [0, 3, 11, 20], "tokens": range(28)}
    fast = dfx.schedule(layer, strategy, in_axes=(None, 0), context=context)
    x = data(28, 8)
    assert_same(layer(W, x), fast(W, x))
    loss = lambda f: lambda w: jnp.sum(f(w, x) ** 2)  # noqa: E731
    assert_same(jax.grad(loss(layer))(W), jax.grad(loss(fast))(W))
    text = dfx.explain(fast, W, x)
    assert f"split into nano-batches of {sizes}" in text and f"nano-batches are {told}" in text


def test_what_cannot_be_is_told_before_anything_runs() -> None:
    fast = dfx.schedule(jax.jit(layer), dfx.NanoBatch(4, align=16), in_axes=(None, 0))
    with pytest.raises(dfx.PlanError, match="at most 2 nano-batches"):
        fast(W, data(28, 8))


def test_the_cost_model_chooses_among_uneven_sizes(assert_same: Any) -> None:
    class OneWaits(dfx.NanoBatch):
        """What is not split runs beside the second nano-batch, which should be the smaller one."""

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    s.execute(op, lane=1 if op.nano or "sort" in op.name else 0)

    def model(w: Any, x: jax.Array, table: jax.Array) -> Any:
        return layer(w, x), jnp.sort(table, axis=-1)

    x, table = data(512, 8), data(256, 512)
    fast = dfx.schedule(
        model, OneWaits(2, uneven=True), in_axes=(None, 0, None), out_axes=(0, None), lanes=2
    )
    assert_same(model(W, x, table), fast(W, x, table))
    told = dfx.explain(fast, W, x, table)
    chosen = told.partition("the cost model chose ")[2].partition(" of: ")[0]
    assert chosen in ("[341, 171]", "[410, 102]"), told
    assert f"split into nano-batches of {chosen}" in told and "[256, 256] " in told


def test_what_does_not_depend_on_the_batch_runs_once_for_uneven_sizes(assert_same: Any) -> None:
    def model(w: Any, x: jax.Array) -> jax.Array:
        return jnp.sort(x, axis=-1) @ jnp.sort(w["a"], axis=0)

    x = data(12, 8)
    fast = dfx.schedule(model, dfx.NanoBatch([6, 4, 2]), in_axes=(None, 0), rules=[dfx.Op("*")])
    assert_same(model(W, x), fast(W, x))
    sorts = [r.name for r in dfx.graph(fast, W, x).regions if r.name.startswith("sort")]
    assert len(sorts) == 4, sorts  # one of the weights, and one for each nano-batch
    assert "1 regions do not depend on the batch and run once for all" in dfx.explain(fast, W, x)


@pytest.mark.parametrize("how", [dfx.NanoBatch(2), dfx.NanoBatch([7, 5, 4], align=1)])
def test_the_sequence_is_split_where_rows_of_it_are_independent(how: Any, assert_same: Any) -> None:
    """A transformer's block along its sequence: attention is joined, the rest is split."""

    def block(w: Any, x: jax.Array) -> jax.Array:
        def norm(v: jax.Array) -> jax.Array:
            return (v - v.mean(-1, keepdims=True)) / (v.std(-1, keepdims=True) + 1e-3)

        h = norm(x)
        q, k, v = h @ w["q"], h @ w["k"], h @ w["v"]
        scores = jax.nn.softmax(q @ k.swapaxes(-1, -2), axis=-1)
        return layer(w, x + scores @ v)

    w = W | {
        name: 0.3 * jax.random.normal(key, (8, 8)) for name, key in zip("qkv", KEYS, strict=False)
    }
    fast = dfx.schedule(block, how, in_axes=(None, 1), out_axes=1)
    x = data(3, 16, 8)
    assert_same(block(w, x), fast(w, x))
    loss = lambda f: lambda w, x: jnp.sum(f(w, x) ** 2)  # noqa: E731
    assert_same(jax.grad(loss(block), (0, 1))(w, x), jax.grad(loss(fast), (0, 1))(w, x))
    told = dfx.explain(fast, w, x)
    assert "joined: dot_general" in told and "tanh" not in told.partition("joined: ")[2]
