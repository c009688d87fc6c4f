"""Results that reduce over the batch: losses, metrics, gradients of a loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import dynaflow_xla as dfx
from function_table.registry import ROWS, case

D, CLASSES = 6, 4


def _logits(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w["in"]) @ w["out"]


def _weights(d: Any) -> Any:
    return {"in": d.weight(D, 8), "out": d.weight(8, CLASSES)}


@case(lambda d: (_weights(d), d.normal(ROWS, D), d.normal(ROWS, CLASSES)), in_axes=(None, 0, 0),
      out_axes=dfx.Mean(), wrt=(0,))  # fmt: skip
def mean_squared_error(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean((_logits(w, x) - y) ** 2)


@case(lambda d: (_weights(d), d.normal(ROWS, D), d.ints(0, CLASSES, ROWS)), in_axes=(None, 0, 0),
      out_axes=(dfx.Mean(), {"right": dfx.Sum(), "logits": 0}), wrt=(0, 1))  # fmt: skip
def cross_entropy_with_metrics(w: Any, x: Any, y: Any) -> Any:
    logits = _logits(w, x)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
    right = (jnp.argmax(logits, -1) == y).sum()
    return losses.mean(), {"right": right, "logits": logits}


@case(lambda d: (_weights(d), d.normal(ROWS, D), d.normal(ROWS, CLASSES)), in_axes=(None, 0, 0),
      out_axes=(dfx.Mean(), dfx.Mean()), wrt=(0,))  # fmt: skip
def gradient_of_a_mean(w: Any, x: Any, y: Any) -> Any:
    """A train step's value and gradient: both are means over the batch."""
    return jax.value_and_grad(lambda v: jnp.mean((_logits(v, x) - y) ** 2))(w)


@case(lambda d: (_weights(d), d.normal(ROWS, D)), in_axes=(None, 0), out_axes=dfx.Sum(), wrt=(0, 1))
def sum_of_squares(w: Any, x: Any) -> Any:
    return jnp.sum(_logits(w, x) ** 2)


@case(lambda d: (d.normal(ROWS, D, dtype=jnp.complex64),), out_axes=(dfx.Sum(), dfx.Mean()),
      wrt=(0,))  # fmt: skip
def complex_sum_and_mean(x: Any) -> Any:
    return (x * jnp.conj(x)).sum(0), x.mean(0)


@case(lambda d: (d.normal(3, ROWS, D),), in_axes=1, out_axes=(dfx.Sum(), dfx.Mean(), 0), wrt=(0,))
def reduced_over_a_middle_axis(x: Any) -> Any:
    return jnp.sin(x).sum(1), jnp.mean(x**2, axis=(0, 1)), x.sum((0, 2))


@case(lambda d: (d.normal(ROWS, D), d.normal(ROWS)), out_axes=dfx.Sum(), wrt=(0, 1))
def weighted_sum(x: Any, weights: Any) -> Any:
    return weights @ jnp.cos(x)


@case(lambda d: (d.normal(ROWS, D), d.normal(ROWS, D)), wrt=(0, 1), refused="iota|dot_general")
def contrastive(x: Any, y: Any) -> Any:
    """Every row against every other: refused under a split without joins."""
    return jax.nn.log_softmax(x @ y.T).diagonal()
