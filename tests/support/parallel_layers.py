"""Layers that are spread over devices, as functions of one device under shard_map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import dynaflow_xla as dfx

AXIS = "devices"
DEVICES = 8


def _norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def transformer_block(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, up: Any, down: Any) -> Any:
    """Tensor parallel: heads and hidden features lie on different devices; two psums. x: [B, T, D]."""
    with dfx.mark("attention"):
        h = _norm(x)
        q, k, v = (jnp.reshape(h @ w, (*h.shape[:2], -1, 32)) for w in (wq, wk, wv))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / 6
        probabilities = jax.nn.softmax(scores, -1).astype(x.dtype)
        a = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v).reshape(*h.shape[:2], -1) @ wo
    a = jax.lax.psum(a, AXIS)
    with dfx.mark("mlp"):
        x = x + a
        y = jax.nn.gelu(_norm(x) @ up) @ down
    y = jax.lax.psum(y, AXIS)
    with dfx.mark("add"):
        return x + y


def experts_layer(x: Any, router: Any, up: Any, down: Any) -> Any:
    """Expert parallel: one expert a device, top-1, a fixed number of places a row; two all_to_alls.

    x: [B, T, D] of this device; up, down: this device's expert.
    """
    with dfx.mark("route"):
        h = _norm(x)
        probabilities = jax.nn.softmax((h @ router).astype(jnp.float32), -1)
        chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), DEVICES, dtype=jnp.int32)
        place = jnp.cumsum(chosen, axis=1) * chosen - 1
        places = jax.nn.one_hot(place, 2 * x.shape[1] // DEVICES, dtype=x.dtype)  # [B, T, E, C]
        sent = jnp.einsum("btec,btd->ebcd", places, h)
        weights = places * probabilities[..., None].astype(x.dtype)
    got = jax.lax.all_to_all(sent, AXIS, 0, 0, tiled=True)
    with dfx.mark("expert"):
        made = jax.nn.gelu(got @ up[0]) @ down[0]
    back = jax.lax.all_to_all(made, AXIS, 0, 0, tiled=True)
    with dfx.mark("add"):
        return x + jnp.einsum("btec,ebcd->btd", weights, back)


def sequence_parallel_mlp(x: Any, up: Any, down: Any) -> Any:
    """Rows' tokens lie on different devices: all_gather before, reduce_scatter after. x: [B, T/8, D]."""
    h = jax.lax.all_gather(_norm(x), AXIS, axis=1, tiled=True)
    with dfx.mark("mlp"):
        y = jax.nn.gelu(h @ up) @ down
    return x + jax.lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)


def ring_step(x: Any, left: Any, right: Any) -> Any:
    """Two products; the neighbour's first one is the second's input (ppermute). x: [B, D]."""
    with dfx.mark("left"):
        a = jnp.tanh(_norm(x) @ left)
    a = jax.lax.ppermute(a, AXIS, [(i, (i + 1) % DEVICES) for i in range(DEVICES)])
    with dfx.mark("right"):
        return x + jnp.tanh(a @ right)


@dataclass(frozen=True)
class Layer:
    """A function of one device, shapes of the whole arguments, and how they are spread."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[Any, ...]
    out_spec: Any
    collectives: int

    @property
    def in_axes(self) -> tuple[int | None, ...]:
        """The batch is axis 0 of the first argument."""
        return (0, *(None for _ in self.shapes[1:]))

    def spread(self, fn: Any, mesh: Any, *, check_vma: bool = False) -> Any:
        """``fn`` under shard_map, jitted."""
        return jax.jit(
            jax.shard_map(
                fn, mesh=mesh, in_specs=self.specs, out_specs=self.out_spec, check_vma=check_vma
            )
        )

    def values(self, seed: int = 0) -> list[Any]:
        """Random float32 arguments."""
        rng = np.random.default_rng(seed)
        return [
            jnp.asarray(rng.standard_normal(s) / (1 if n == 0 else s[-2] ** 0.5), jnp.float32)
            for n, s in enumerate(self.shapes)
        ]


def layers(batch: int, length: int, width: int) -> dict[str, Layer]:
    """The layers for ``batch`` rows (of each device, where rows are spread) of ``length`` tokens."""
    whole, columns, rows = P(), P(None, AXIS), P(AXIS, None)
    d, t = width, length
    square, up, down = (d, d), (d, 4 * d), (4 * d, d)
    experts = (DEVICES * batch, t, d), (d, DEVICES), (DEVICES, d, 2 * d), (DEVICES, 2 * d, d)
    return {
        "transformer_block": Layer(
            transformer_block,
            ((batch, t, d), square, square, square, square, up, down),
            (whole, columns, columns, columns, rows, columns, rows),
            whole,
            2,
        ),
        "experts": Layer(experts_layer, experts, (P(AXIS), whole, P(AXIS), P(AXIS)), P(AXIS), 2),
        "sequence_parallel_mlp": Layer(
            sequence_parallel_mlp,
            ((batch, t, d), up, down),
            (P(None, AXIS), columns, rows),
            P(None, AXIS),
            2,
        ),
        "ring_step": Layer(
            ring_step, ((DEVICES * batch, d), square, square), (P(AXIS), whole, whole), P(AXIS), 1
        ),
    }
