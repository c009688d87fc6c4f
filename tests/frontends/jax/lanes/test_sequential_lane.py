"""``Sequential`` takes one lane where more cores gain nothing, and all cores where they do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.planning.instructions import Launch  # noqa: E402

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("two_cores")]


def sorts(x: Any, y: Any) -> Any:
    return jnp.sort(x), jnp.sort(y)[::-1]


def products(x: Any, y: Any) -> Any:
    for _ in range(3):
        x = x @ y
    return x


def lanes_of(fast: Any, *args: Any) -> set[int]:
    return {step.lane for step in dfx.plan(fast, *args).instructions if isinstance(step, Launch)}


def drawn(*shape: int) -> jax.Array:
    values = np.random.default_rng().standard_normal(shape, dtype=np.float32)
    return jnp.asarray(values / shape[-1] ** 0.5)


def test_sorts_have_one_lane_and_products_all_cores(assert_same: Any) -> None:
    fast = dfx.schedule(jax.jit(sorts), dfx.Sequential())
    args = drawn(1 << 16), drawn(1 << 16)
    assert lanes_of(fast, *args) == {0}
    assert_same(sorts(*args), fast(*args))
    wide = dfx.schedule(jax.jit(products), dfx.Sequential())
    args = drawn(768, 768), drawn(768, 768)
    assert lanes_of(wide, *args) == {-1}
    assert_same(products(*args), wide(*args))


def test_what_is_short_for_a_lane_keeps_all_cores() -> None:
    """A lane's entry would cost more than two percent of it."""
    fast = dfx.schedule(jax.jit(sorts), dfx.Sequential())
    assert lanes_of(fast, drawn(1 << 12), drawn(1 << 12)) == {-1}


def test_what_is_donated_keeps_its_memory(assert_same: Any) -> None:
    """On a lane the result would be copied into it, and the user told so."""
    fast = dfx.schedule(jax.jit(sorts, donate_argnums=(0, 1)), dfx.Sequential())
    args = drawn(1 << 18), drawn(1 << 18)
    want = sorts(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lanes_of(fast, *args) == {-1}
        given = [x.unsafe_buffer_pointer() for x in args]
        got = fast(*args)
    assert all(x.is_deleted() for x in args)
    assert {x.unsafe_buffer_pointer() for x in got} == set(given)
    assert_same(want, got)


def test_part_of_something_larger_is_the_original(assert_same: Any) -> None:
    """XLA fuses it with what is around it."""
    fast = dfx.schedule(jax.jit(sorts), dfx.Sequential())
    args = drawn(1 << 16), drawn(1 << 16)
    around = jax.jit(lambda *a: fast(*(x + 1 for x in a)))
    assert "dfx_run" not in around.lower(*args).as_text()
    assert_same(jax.jit(lambda *a: sorts(*(x + 1 for x in a)))(*args), around(*args))
