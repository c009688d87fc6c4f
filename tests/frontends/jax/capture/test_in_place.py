"""Large arrays that are updated in place: donated, carried by a loop, or handed on inside a jit."""

from __future__ import annotations

import re
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

SHAPE = (512, 512)
STRATEGIES = ["branches", "sequential"]


def cache() -> Any:
    return jnp.arange(512.0 * 512).reshape(SHAPE) / 1e5


def slice_update(c: Any, x: Any, i: Any) -> Any:
    return jax.lax.dynamic_update_slice(c, jnp.sort(x)[None], (i, 0)), jnp.sort(-x).sum()


def scatter_update(c: Any, x: Any, i: Any) -> Any:
    return c.at[:, i].add(jnp.sort(x)), jnp.sort(-x)


def read_before(c: Any, x: Any, i: Any) -> Any:
    old = jnp.sort(c[3])
    return c.at[i].set(jnp.sort(x)), old


def read_old_after(c: Any, x: Any, i: Any) -> Any:
    new = c.at[i].set(jnp.sort(x))
    return new, jnp.sort(c[3])


def attend(c: Any, x: Any, i: Any) -> Any:
    new = c.at[i].set(jnp.sort(x))
    return new, jax.nn.softmax(new @ x) @ new


def several(c: Any, x: Any, i: Any) -> Any:
    k, v = c
    for layer in range(2):
        k = k.at[i + layer].set(jnp.sort(x))
        v = v.at[:, i + layer].add(jnp.sort(-x))
    return (k, v), (k @ v)[i]


def scanned(c: Any, x: Any, i: Any) -> Any:
    def body(c: Any, j: Any) -> Any:
        return c.at[j].set(x * j), c[0, 0]

    new, seen = jax.lax.scan(body, c, jnp.arange(4) + i)
    return new, seen.sum() + jnp.sort(x)


def looped(c: Any, x: Any, i: Any) -> Any:
    return jax.lax.fori_loop(0, 4, lambda j, c: c.at[i + j].add(x), c), jnp.sort(x)


FUNCTIONS = [
    slice_update, scatter_update, read_before, read_old_after, attend, several, scanned, looped,
]  # fmt: skip


def arguments(fn: Any) -> tuple[Any, Any, int]:
    x = jax.random.normal(jax.random.key(1), (512,))
    return ((cache(), cache() * 2) if fn is several else cache()), x, 5


def copies(jitted: Any, args: Any) -> int:
    """Copies of a whole array in a compiled program."""
    text = jitted.lower(*args).compile().as_text()
    return len(re.findall(r"= f32\[512,512\][^=]* copy(?:-start)?\(", text))


def same(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_a_donated_cache_is_not_copied(fn: Any, strategy: str) -> None:
    donating = jax.jit(fn, donate_argnums=0)
    fast = dfx.schedule(donating, strategy)
    want = jax.jit(fn)(*arguments(fn))
    args = arguments(fn)
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(args[0])]
    got = fast(*args)
    same(got, want)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(got[0])] == before
    assert all(x.is_deleted() for x in jax.tree.leaves(args[0]))
    assert copies(fast, arguments(fn)) <= copies(donating, arguments(fn))
    assert dfx.plan(fast, *arguments(fn)).copied_bytes < 64 * 1024
    assert "in place" in dfx.explain(fast, *arguments(fn))


@pytest.mark.parametrize("fn", [slice_update, several])
def test_a_carried_cache_is_not_copied(fn: Any) -> None:
    def steps(call: Any) -> Any:
        def run(c: Any, x: Any, i: Any) -> Any:
            return jax.lax.scan(lambda c, j: call(c, x + j, i + j), c, jnp.arange(3))

        return jax.jit(run, donate_argnums=0)

    fast = dfx.schedule(fn, "branches")
    plain, scheduled = steps(fn), steps(fast)
    assert copies(scheduled, arguments(fn)) <= copies(plain, arguments(fn))
    same(scheduled(*arguments(fn)), plain(*arguments(fn)))


def test_derivatives_and_maps_go_through_updates() -> None:
    def loss(c: Any, x: Any) -> Any:
        new = c.at[2].set(jnp.sort(x))
        return (new**2).sum(), new

    c, x, _ = arguments(loss)
    fast = dfx.schedule(loss, "branches")
    same(jax.grad(fast, (0, 1), has_aux=True)(c, x), jax.grad(loss, (0, 1), has_aux=True)(c, x))
    many = jax.vmap(fast, in_axes=(None, 0))
    same(many(c, jnp.stack([x, -x])), jax.vmap(loss, in_axes=(None, 0))(c, jnp.stack([x, -x])))


def test_small_arrays_and_long_loops_stay_on_lanes() -> None:
    def small(c: Any, x: Any) -> Any:
        return c.at[0].set(jnp.sort(x)[0])

    def long(c: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, 40, lambda _, c: jnp.sort(c @ c, axis=1) / 1e3, c), x

    for fn in (small, long):
        c = jnp.ones(8) if fn is small else cache()
        regions = dfx.graph(dfx.schedule(fn, "branches"), c, jnp.ones(4)).regions
        assert not any(region.outer for region in regions)


def test_auto_measures_functions_with_updates() -> None:
    fast = dfx.schedule(jax.jit(slice_update, donate_argnums=0), dfx.Auto(budget_s=0.05))
    same(fast(*arguments(slice_update)), jax.jit(slice_update)(*arguments(slice_update)))
    assert "is not measured" not in dfx.explain(fast, *arguments(slice_update))


def test_what_lanes_copy_into_donated_arguments_is_said() -> None:
    def update(c: Any, x: Any) -> Any:
        return jnp.sort(c, axis=1) + x, x

    fast = dfx.schedule(jax.jit(update, donate_argnums=0), "branches")
    x = jnp.ones(512)
    with pytest.warns(dfx.FallbackWarning, match=r"1 x float32\[512, 512\].*1\.0 MB are copied"):
        got = fast(cache(), x)
    same(got, update(cache(), x))
    assert "float32[512, 512]" in dfx.explain(fast, cache(), x)
    same(fast(cache(), x), got)  # said once
