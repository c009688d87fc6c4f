"""Narrow floats, integers, bits, random keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import dynaflow_xla as dfx
from function_table.registry import ROWS, case

BF16 = jnp.bfloat16


@case(lambda d: (d.normal(ROWS, 16, dtype=BF16), d.weight(16, 16, dtype=BF16)), in_axes=(0, None),
      out_axes=(0, dfx.Mean()), wrt=(0, 1))  # fmt: skip
def bf16_layer(x: Any, w: Any) -> Any:
    h = jax.nn.relu(x @ w + 0.01)
    return h, jnp.mean(h, dtype=BF16)


@case(lambda d: (d.normal(ROWS, 8), d.weight(8, 32)), in_axes=(0, None), wrt=(0, 1), tolerance=0.06)
def mixed_precision(x: Any, w: Any) -> Any:
    h = lax.dot_general(x.astype(BF16), w.astype(BF16), (((1,), (0,)), ((), ())),
                        preferred_element_type=jnp.float32)  # fmt: skip
    return jax.nn.silu(h)


@case(lambda d: (d.normal(ROWS, 9, dtype=jnp.float16),), wrt=(0,))
def float16(x: Any) -> Any:
    return jnp.sin(x) * x + jnp.float16(0.5)


@case(lambda d: (d.ints(-99, 99, ROWS, 7),), out_axes=(0, 0, 0, dfx.Sum()), wrt=())
def integers(x: Any) -> Any:
    return (x << 2) ^ (x >> 1), lax.population_count(x), jnp.cumsum(x, 1) // 3, x.sum()


@case(lambda d: (d.ints(0, 255, ROWS, 5, dtype=jnp.uint8), d.ints(-9, 9, 5, 4, dtype=jnp.int8)),
      in_axes=(0, None), wrt=())  # fmt: skip
def small_integers(x: Any, w: Any) -> Any:
    y = lax.dot_general(x.astype(jnp.int8), w, (((1,), (0,)), ((), ())),
                        preferred_element_type=jnp.int32)  # fmt: skip
    return y, (x > 100) & (x % 2 == 0), x + jnp.uint8(200)


@case(lambda d: (d.ints(0, 2, ROWS, 4, dtype=bool),), out_axes=(0, 0, 0), wrt=())
def booleans(x: Any) -> Any:
    return ~x, x.any(-1), jnp.logical_xor(x[:, 0], x.all(-1))


@case(lambda d: (d.normal(ROWS, 4),), wrt=())
def bits(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.uint32), jnp.isnan(x), jnp.frexp(x)[1]


@case(lambda d: (d.keys(ROWS), d.normal(ROWS, 8)), wrt=(1,))
def dropout_with_keys_of_rows(keys: Any, x: Any) -> Any:
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.7, (8,)))(keys)
    return jnp.where(keep, x / 0.7, 0.0), jax.vmap(jax.random.split)(keys)


@case(lambda d: (d.keys(), d.normal(ROWS, 8)), in_axes=(None, 0), out_axes=(0, None), wrt=(1,))
def noise_shared_by_rows(key: Any, x: Any) -> Any:
    mine, following = jax.random.split(key)
    return x * (1 + jax.random.normal(mine, (8,))), following


@case(lambda d: (jax.random.PRNGKey(3), d.normal(ROWS, 8)), in_axes=(None, 0), wrt=(1,))
def raw_key(key: Any, x: Any) -> Any:
    return x + jax.random.uniform(key, (8,))


@case(lambda d: (d.keys(), d.normal(ROWS, 8)), in_axes=(None, 0), wrt=(1,),
      refused="random_bits|threefry|another")  # fmt: skip
def dropout_over_the_batch(key: Any, x: Any) -> Any:
    """Draws for the whole batch: a split would draw others."""
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.0)
