"""More functions for the study of Auto, most of them of a kind that no schedule helps much."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from models import cases
from models.cases import Case, Made


def _attention(batch: int, steps: int, width: int) -> Made:
    def block(p: Any, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], width // 64, 64)
        q, k, v = ((x @ p[name]).reshape(heads).swapaxes(1, 2) for name in "qkv")
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 8.0)
        x = x + (weights @ v).swapaxes(1, 2).reshape(x.shape) @ p["o"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    keys = jax.random.split(jax.random.key(20), 7)
    shapes = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width),
              "up": (width, 4 * width), "down": (4 * width, width)}  # fmt: skip
    p = {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return block, (p, jax.random.normal(keys[6], (batch, steps, width)))


def _towers(batch: int, width: int) -> Made:
    def towers(left: Any, right: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return (cases.mlp(left, x) * cases.mlp(right, y)).sum(-1)

    ka, kb, kx, ky = jax.random.split(jax.random.key(21), 4)
    members = [cases.mlp_parameters(k, [width] * 4) for k in (ka, kb)]
    return towers, (*members, *(jax.random.normal(k, (batch, width)) for k in (kx, ky)))


def _ffts() -> Made:
    def spectra(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.abs(jnp.fft.fft2(x)) + jnp.abs(jnp.fft.fft2(y))

    kx, ky = jax.random.split(jax.random.key(22))
    return spectra, tuple(jax.random.normal(k, (16, 128, 128)) for k in (kx, ky))


def _svds() -> Made:
    def values(x: jax.Array, y: jax.Array) -> Any:
        return [jnp.linalg.svd(a, compute_uv=False) for a in (x, y)]

    kx, ky = jax.random.split(jax.random.key(23))
    return values, tuple(jax.random.normal(k, (160, 160)) for k in (kx, ky))


def _readers() -> Made:
    def readers(members: Any, xs: jax.Array) -> jax.Array:
        ends = [
            cases.lstm(p, xs, reverse=bool(i % 2))[-1 if i % 2 == 0 else 0]
            for i, p in enumerate(members)
        ]
        return jnp.concatenate(ends, axis=-1)

    *keys, kx = jax.random.split(jax.random.key(24), 5)
    members = [cases.lstm_parameters(k, 64, 64) for k in keys]
    return readers, (members, jax.random.normal(kx, (32, 16, 64)))


STUDY: tuple[Case, ...] = (
    *cases.CASES,
    Case("argsort", "gain", "argsort of 32x2048 along the rows",
         lambda: cases.rows(lambda x: jnp.argsort(x, axis=1), (32, 2048), 25), in_axes=0),
    Case("ffts", "gain", "two fft2 of 16x128x128", _ffts, in_axes=0),
    Case("svds", "gain", "singular values of two 160x160", _svds, lapack=True),
    Case("readers", "gain", "four LSTMs B16 T32 d64 on one sequence", _readers,
         in_axes=(None, 1)),
    Case("towers", "loss", "two MLPs d1024 B256 that meet", lambda: _towers(256, 1024),
         in_axes=(None, None, 0, 0)),
    Case("attention", "loss", "transformer block B8 T64 d256", lambda: _attention(8, 64, 256),
         in_axes=(None, 0)),
    Case("cumsum", "loss", "cumulative sums of 64x8192 along the rows",
         lambda: cases.rows(lambda x: jnp.cumsum(x, axis=1), (64, 8192), 26), in_axes=0),
    Case("matmul", "loss", "one product 1024x1024x1024",
         lambda: cases.rows(lambda x: x @ x.T, (1024, 1024), 27)),
    Case("tiny", "loss", "2 x + 1 on 8 floats", lambda: cases.rows(lambda x: 2 * x + 1, (8,), 28),
         in_axes=0),
)  # fmt: skip
