"""What a split captures at other sizes: what it holds meanwhile, and what it may hold."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def _sorted_rows(x: Any, w: Any) -> Any:
    rows = jnp.sort(jnp.tanh(x @ w), axis=1)
    return rows, jnp.mean(rows)


def _in_two() -> Any:
    return dfx.schedule(
        jax.jit(_sorted_rows),
        dfx.NanoBatch(2),
        in_axes=(0, None),
        out_axes=(0, dfx.Mean()),
        lanes=2,
    )


@pytest.mark.parametrize("differentiated", [False, True])
def test_no_tracer_outlives_its_trace(differentiated: bool) -> None:
    fast, x, w = _in_two(), jnp.ones((40, 24)).at[0].set(2.0), jnp.ones((24, 8))
    with jax.checking_leaks():
        if differentiated:
            jax.grad(lambda w: fast(x, w)[1])(w)
        else:
            fast(x, w)


@pytest.mark.parametrize("ask", [dfx.explain, dfx.plan])
def test_who_asks_for_a_plan_keeps_its_arrays(ask: Any) -> None:
    fast = _in_two()
    x, w = jnp.ones((40, 24)), jnp.ones((24, 8))
    ask(fast, x, w)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_kernels_that_are_interpreted_are_split() -> None:
    pallas = pytest.importorskip("jax.experimental.pallas")

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2 + 1

    def fn(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x)

    x = jnp.arange(128.0).reshape(32, 4)
    fast = dfx.schedule(jax.jit(fn), dfx.NanoBatch(2), in_axes=0, lanes=2)
    np.testing.assert_array_equal(fast(x), 2 * x + 1)


def test_types_of_four_bits_are_refused_for_what_they_are() -> None:
    def fn(x: Any) -> Any:
        return (jnp.sort(x, -1).astype(jnp.int4) * 2).astype(jnp.float32)

    fast = dfx.schedule(jax.jit(fn), dfx.NanoBatch(2), in_axes=0, lanes=2)
    with pytest.raises(dfx.UnsupportedError, match="uses int4, .*several programs read") as error:
        fast(jnp.ones((8, 4)))
    assert "once a nano-batch" not in str(error.value)
