"""Seconds that capturing and planning take beyond plain tracing, on a scanned 32-layer transformer.

Nothing is compiled or run: ``plain`` traces the original, ``planned`` makes the scheduled function's plan
(it traces the original, too), the difference is what a schedule adds. Each number is the median of fresh
functions, so that no trace is found in JAX's cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import dynaflow_xla as dfx

BATCH, TIME, WIDTH, HEADS = 8, 64, 128, 4


def model(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...], list[int]]:
    """A loss over scanned layers, shapes for it, and how often its layer was traced."""
    traces = [0]

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        traces[0] += 1
        x = jax.nn.standardize(h, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in jnp.split(x @ w["qkv"], 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((TIME, TIME), bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape)
        h = h + mixed @ w["out"]
        return h + jax.nn.gelu(jax.nn.standardize(h, axis=-1) @ w["up"]) @ w["down"], None

    def loss(weights: Any, x: Any, y: Any) -> Any:
        h, _ = jax.lax.scan(layer, x, weights)
        return jnp.mean((h - y) ** 2)

    def shape(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    weights = {
        "qkv": shape(layers, WIDTH, 3 * WIDTH), "out": shape(layers, WIDTH, WIDTH),
        "up": shape(layers, WIDTH, 4 * WIDTH), "down": shape(layers, 4 * WIDTH, WIDTH),
    }  # fmt: skip
    batch = shape(BATCH, TIME, WIDTH)
    return loss, (weights, batch, batch), traces


def scheduled(fn: Any, strategy: Any) -> Any:
    if isinstance(strategy, dfx.NanoBatch):
        return dfx.schedule(fn, strategy, in_axes=(None, 0, 0), out_axes=dfx.Mean())
    return dfx.schedule(fn, strategy)


def forward(fn: Any, args: Any, strategy: Any = None) -> None:
    if strategy is None:
        jax.jit(fn).trace(*args)
    else:
        dfx.plan(scheduled(fn, strategy), *args)


def gradient(fn: Any, args: Any, strategy: Any = None) -> None:
    f = jax.jit(fn) if strategy is None else scheduled(fn, strategy)
    jax.jit(jax.value_and_grad(f)).trace(*args)


def seconds(what: Callable[..., None], layers: int, strategy: Any) -> tuple[float, int]:
    loss, args, traces = model(layers)
    start = time.perf_counter()
    what(loss, args, strategy)
    return time.perf_counter() - start, traces[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    strategies = {
        "plain": None, "branches": dfx.Branches(), "nano_batch": dfx.NanoBatch(2),
        "nano_batch_uneven": dfx.NanoBatch([5, 3]),
    }  # fmt: skip
    for what in (forward, gradient):
        for strategy in strategies.values():  # imports and first-time tables
            seconds(what, options.layers, strategy)
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in strategies}
        for _ in range(options.repeats):
            for name, strategy in strategies.items():
                found[name].append(seconds(what, options.layers, strategy))
        plain = statistics.median(s for s, _ in found["plain"])
        for name, samples in found.items():
            median = statistics.median(s for s, _ in samples)
            print(
                json.dumps(
                    {
                        "what": what.__name__, "strategy": name, "layers": options.layers,
                        "median_s": round(median, 3), "beyond_plain_s": round(median - plain, 3),
                        "layer_traces": samples[-1][1],
                    }
                )
            )  # fmt: skip


if __name__ == "__main__":
    main()
