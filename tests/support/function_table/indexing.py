"""Gathers, scatters, sorting, segments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import dynaflow_xla as dfx
from function_table.registry import ROWS, case


@case(lambda d: (d.ints(0, 9, ROWS, 5), d.normal(9, 4)), in_axes=(0, None), wrt=(1,))
def embedding(tokens: Any, table: Any) -> Any:
    return table[tokens] * jnp.sqrt(4.0)


@case(lambda d: (d.ints(0, 9, 5, ROWS), d.normal(9, 4), d.normal(5, 4)), in_axes=(1, None, None),
      out_axes=1, wrt=(1, 2))  # fmt: skip
def embedding_and_logits(tokens: Any, table: Any, position: Any) -> Any:
    h = jnp.take(table, tokens, axis=0) + position[:, None]
    return jnp.tanh(h) @ table.T


@case(lambda d: (d.normal(ROWS, 7), d.ints(0, 7, ROWS, 3)), wrt=(0,))
def take_along(x: Any, index: Any) -> Any:
    return jnp.take_along_axis(x, index, axis=1)


@case(lambda d: (d.normal(ROWS, 8), d.ints(0, 5, ROWS)), wrt=(0,))
def slice_of_each_row(x: Any, start: Any) -> Any:
    return jax.vmap(lambda r, s: lax.dynamic_slice(r, (s,), (4,)))(x, start)


@case(lambda d: (d.normal(ROWS, 6), d.ints(0, 6, ROWS, 2), d.normal(ROWS, 2)), wrt=(0, 2))
def scatter_into_rows(x: Any, index: Any, values: Any) -> Any:
    rows = jnp.arange(x.shape[0])[:, None]
    return x.at[rows, index].add(values), x.at[:, 0].set(1.0), x.at[:, 1:3].multiply(2.0)


@case(lambda d: (d.distinct(ROWS, 7),), wrt=(0,))
def sort_rows(x: Any) -> Any:
    return jnp.sort(x, axis=-1), jnp.argsort(x, axis=-1)


@case(lambda d: (d.distinct(7, ROWS), d.normal(7, ROWS)), in_axes=1, out_axes=1, wrt=(1,))
def sort_pairs_in_columns(keys: Any, values: Any) -> Any:
    return lax.sort((keys, values), dimension=0, num_keys=1)


@case(lambda d: (d.distinct(ROWS, 9),), wrt=(0,))
def top_k(x: Any) -> Any:
    values, places = lax.top_k(x, 3)
    return values, places, jnp.argmax(x, -1), x.max(-1)


@case(lambda d: (d.normal(ROWS, 8), d.ints(0, 3, ROWS, 8)), wrt=(0,))
def segment_sum_of_each_row(x: Any, segments: Any) -> Any:
    return jax.vmap(lambda v, s: jax.ops.segment_sum(v, s, num_segments=3))(x, segments)


@case(
    lambda d: (d.normal(ROWS, 4), d.ints(0, 5, ROWS)),
    out_axes=(dfx.Sum(), dfx.Sum()),
    wrt=(0,),
)
def segment_sum_over_rows(x: Any, segments: Any) -> Any:
    """Sums over the batch, by segment: they add up."""
    total = jax.ops.segment_sum(x, segments, num_segments=5)
    return total, jnp.zeros(5, jnp.int32).at[segments].add(1)


@case(lambda d: (d.distinct(12), d.uniform(ROWS, 3)), in_axes=(None, 0), wrt=())
def search(edges: Any, x: Any) -> Any:
    edges = jnp.sort(edges)
    return jnp.searchsorted(edges, x), jnp.digitize(x, edges)


@case(lambda d: (d.uniform(ROWS, 3), d.normal(5)), in_axes=(0, None), wrt=(1,))
def interpolate(x: Any, heights: Any) -> Any:
    return jnp.interp(x, jnp.linspace(0.0, 1.0, 5), heights)


@case(lambda d: (d.normal(ROWS, 6),), wrt=(0,))
def padded_and_flipped(x: Any) -> Any:
    y = jnp.pad(x, ((0, 0), (2, 1)), mode="reflect")
    return jnp.flip(jnp.roll(y, 2, axis=1), axis=1), jnp.repeat(x, 2, axis=1), jnp.diff(x, axis=1)


@case(lambda d: (d.normal(ROWS, 6),), wrt=(0,))
def masked(x: Any) -> Any:
    lower = jnp.tril(jnp.ones((6, 6)))
    return jnp.where(x > 0, x, 0.1 * x) @ lower, jnp.clip(x, -1.0, 1.0), jnp.minimum(x, x[:, :1])


@case(lambda d: (d.ints(0, 2, ROWS, 6),), wrt=())
def nonzero_places(x: Any) -> Any:
    return jax.vmap(lambda r: jnp.nonzero(r, size=4, fill_value=-1)[0])(x)


@case(lambda d: (d.normal(ROWS, 5), d.normal(5)), in_axes=(0, None), out_axes=(0, None, 0, 0, None),
      wrt=(0,))  # fmt: skip
def inputs_constants_and_repeats(x: Any, w: Any) -> Any:
    """Results that are an argument, a constant, or another result."""
    y = jnp.sin(x) * w
    return x, w, y, y, jnp.arange(3.0)
