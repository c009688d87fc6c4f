"""Marks in the model become regions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dynaflow_xla as dfx

X = jnp.asarray(np.random.default_rng(0).standard_normal((16, 16)), jnp.float32)


def test_a_mark_around_nested_calls_is_one_region() -> None:
    def f(x: jax.Array) -> jax.Array:
        with dfx.mark("head", resource="memory", tags={"first"}):
            y = jnp.cumsum(jnp.sort(x) * 2 + 1, axis=0)
        return y @ x

    fast = dfx.schedule(f, "branches")
    regions = {r.name: r for r in dfx.graph(fast, X).regions}
    assert [name for name in regions if name.startswith("head")] == ["head"]
    assert regions["head"].resource == "memory" and "first" in regions["head"].tags
    np.testing.assert_allclose(fast(X), jax.jit(f)(X), rtol=1e-4, atol=1e-4)


def test_two_uses_are_two_regions_also_as_a_decorator() -> None:
    @dfx.mark("block")
    def block(x: jax.Array) -> jax.Array:
        return jnp.sort(x) + 1

    def f(x: jax.Array) -> jax.Array:
        return block(x) + block(x.T)

    names = [r.name for r in dfx.graph(dfx.schedule(f, "branches"), X).regions]
    assert {"block", "block_1"} <= set(names)


def test_a_marked_function_jitted_once_and_called_twice() -> None:
    @jax.jit
    def block(x: jax.Array) -> jax.Array:
        with dfx.mark("inner"):
            return jnp.sort(x) + 1

    def f(x: jax.Array) -> jax.Array:
        return block(x) + block(x.T)

    names = [r.name for r in dfx.graph(dfx.schedule(f, "branches"), X).regions]
    assert sum(name.startswith("inner") for name in names) == 2


def test_marks_change_nothing_without_a_schedule() -> None:
    def f(x: jax.Array) -> jax.Array:
        with dfx.mark("quiet"):
            return jnp.sin(x)

    np.testing.assert_array_equal(jax.jit(f)(X), jax.jit(jnp.sin)(X))
    jax.grad(lambda x: f(x).sum())(X)


def test_a_scope_is_one_region_with_the_calls_inside_it() -> None:
    """``relu`` and ``where`` are jitted functions of their own; they must not cut the scope."""

    def attention(x: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            y = jax.nn.relu(jnp.sort(x @ x))
            return jnp.where(y > 0.5, y, 0.0) @ x

    rules = [dfx.Scope("**/attention")]
    x = jnp.ones((16, 16))
    fast = dfx.schedule(attention, dfx.Sequential(), rules=rules)
    assert [r.name for r in dfx.graph(fast, x).regions] == ["attention"]

    block = jax.jit(attention)
    fast = dfx.schedule(lambda x: jnp.sort(block(block(x))), dfx.Sequential(), rules=rules)
    regions = dfx.graph(fast, x).regions
    assert [r.name for r in regions] == ["attention", "attention_1", "sort"]
    assert len(regions[0].ops) == len(regions[1].ops)


def test_a_mark_inside_a_loop_is_said_to_cut_nothing() -> None:
    def f(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            with dfx.mark("inner"):
                made = jnp.sort(row)
            return carry + made.sum() + jnp.cumsum(row)[0], made

        with dfx.mark("around"):
            return jax.lax.scan(body, 0.0, x)

    x = jnp.asarray(np.random.default_rng(5).normal(size=(3, 8)))
    fast = dfx.schedule(f, dfx.Sequential(), lanes=1)
    fast(x)
    text = dfx.explain(fast, x)
    assert "mark 'inner' inside of scan at" in text and "cuts nothing" in text, text
    assert "mark 'around'" not in text
    # Where the body has a plan of its own, the mark cuts that.
    planned = dfx.explain(dfx.schedule(f, dfx.Sequential(), backend="xla", lanes=2), x)
    assert "body of the loop" in planned and "cuts nothing" not in planned, planned
