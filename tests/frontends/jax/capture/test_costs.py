"""Costs of operators: what is handed out, and how often."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla import machine  # noqa: E402
from dynaflow_xla.frontends.jax.capture import costs  # noqa: E402
from dynaflow_xla.frontends.jax.capture.costs import Step, in_their_readers  # noqa: E402

LARGE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def forks(f: Any, *shapes: Any) -> float:
    """Of the graph, and the same of the function as a whole."""
    fast = dfx.schedule(jax.jit(f), dfx.Sequential(), backend="ffi")
    arrays = [jnp.zeros(s.shape, s.dtype) for s in shapes]
    (made,) = {sum(r.spread.forks for r in dfx.graph(fast, *arrays).regions)}
    jaxpr = jax.make_jaxpr(f)(*shapes)
    cores = 2
    whole = costs.original_ns(jaxpr, 1) - costs.original_ns(jaxpr, cores)
    shared = sum(
        r.spread._replace(forks=0.0).saved_ns(cores) for r in dfx.graph(fast, *arrays).regions
    )
    assert whole == pytest.approx(shared - made * machine.numbers().fork_ns, rel=1e-6)
    return made


def test_a_chain_of_loops_is_handed_out_once() -> None:
    assert forks(lambda x: jnp.tanh(x * 2 + 1) - x, LARGE) == 1
    assert forks(lambda x: (jnp.tanh(x), jnp.sin(x)), LARGE) == 2
    assert forks(lambda x: jnp.exp(x - 1).sum(-1), LARGE) == 1  # inside of the sum
    assert forks(lambda x: jnp.tanh(x) @ jnp.cos(x), LARGE) == 3  # the product reads memory
    assert forks(lambda x: jnp.sort(jnp.tanh(x) + 1), LARGE) == 1


def test_a_reshape_is_what_reads_it() -> None:
    assert forks(lambda x: jnp.tanh(x).reshape(-1) * 2, LARGE) == 1
    assert forks(lambda x: jnp.sort((jnp.tanh(x) * 2).reshape(-1)), LARGE) == 1
    steps = [Step("tanh", "x", "a"), Step("reshape", "a", "b"), Step("dot_general", "b", "c")]
    assert in_their_readers(steps, "c") == set()
    steps[2] = Step("mul", "b", "c")
    assert in_their_readers(steps, "c") == {0, 1}
    assert in_their_readers(steps, "ca") == {1}
    assert in_their_readers(steps, "cb") == set()


def test_a_value_with_two_readers_is_made_if_one_needs_it_in_memory() -> None:
    steps = [Step("tanh", "x", "a"), Step("mul", "ab", "c"), Step("sort", "a", "d")]
    assert in_their_readers(steps, "cd") == set()
    steps[2] = Step("reduce_max", "a", "d")
    assert in_their_readers(steps, "cd") == {0}


def test_functions_of_the_c_library_cost_what_they_take() -> None:
    def ns(f: Any) -> float:
        return costs.original_ns(jax.make_jaxpr(f)(LARGE), 1)

    assert ns(jnp.arccos) > 20 * ns(jnp.exp) and ns(jnp.sin) > 5 * ns(jnp.tanh)
    assert ns(jnp.sqrt) < ns(jnp.exp)


def test_narrow_convolutions_may_be_shared_out_after_all() -> None:
    def conv(x: Any, k: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def spread(width: int, channels: int) -> Any:
        fast = dfx.schedule(jax.jit(conv), dfx.Sequential(), backend="ffi")
        args = jnp.zeros((8, width, width, channels)), jnp.zeros((3, 3, channels, channels))
        (region,) = dfx.graph(fast, *args).regions
        return region.spread

    narrow, wide = spread(32, 64), spread(16, 128)
    assert narrow.tiles > 0 == narrow.convolutions == narrow.forks
    assert wide.convolutions > 0 == wide.tiles and wide.forks == 1
    assert narrow.saved_ns(2) == 0 < narrow.unsure_ns(2)
