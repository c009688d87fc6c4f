"""Functions as models have them, for the suite ``functions``: attention, convolutions, towers, gradients.

None was chosen for what it gains: sizes are such that a call takes one to twenty milliseconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models import cases
from models.cases import Case, Made

Weights = list[jax.Array]
HEADS = 8


class _Draws:
    """Random arrays, the same for the same name."""

    def __init__(self, name: str) -> None:
        self._key = jax.random.key(zlib.crc32(name.encode()))

    def normal(self, *shape: int) -> jax.Array:
        """Of the normal distribution."""
        self._key, key = jax.random.split(self._key)
        return jax.random.normal(key, shape)

    def dense(self, *widths: int) -> Weights:
        """Matrices [D, E] from each width to the next."""
        return [self.normal(d, e) / d**0.5 for d, e in zip(widths[:-1], widths[1:], strict=True)]

    def kernel(self, size: int, channels: int, to: int) -> jax.Array:
        """Of a convolution, [H, W, C, D]."""
        return self.normal(size, size, channels, to) / (size * size * channels) ** 0.5

    def attention(self, width: int) -> Weights:
        """Queries, keys, values and results."""
        return [w for _ in range(4) for w in self.dense(width, width)]

    def block(self, width: int) -> Weights:
        """Attention and two dense layers."""
        return [*self.attention(width), *self.dense(width, 4 * width, width)]


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    """[B, H, W, C]."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


def norm(x: jax.Array) -> jax.Array:
    """Over the last axis, without scale."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(p: Weights, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
    """[B, T, D] to the same, over ``memory`` [B, S, D] or itself."""
    memory = x if memory is None else memory
    width = x.shape[-1]
    q, k, v = (
        (read @ w).reshape(*read.shape[:2], HEADS, width // HEADS)
        for read, w in zip((x, memory, memory), p[:3], strict=True)
    )
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // HEADS) ** 0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p[3]


def block(p: Weights, x: jax.Array) -> jax.Array:
    """A transformer's, its norms first."""
    x = x + attention(p, norm(x))
    return x + jax.nn.gelu(norm(x) @ p[4]) @ p[5]


def _chain(step: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def whole(layers: Sequence[Any], x: jax.Array, *others: jax.Array) -> jax.Array:
        for p in layers:
            x = step(p, x, *others)
        return x

    return whole


def _encoder() -> Made:
    d = _Draws("encoder")
    return _chain(block), ([d.block(256) for _ in range(2)], d.normal(4, 128, 256))


def _parallel() -> Made:
    def parallel(p: Weights, x: jax.Array) -> jax.Array:
        y = norm(x)
        return x + attention(p, y) + jax.nn.gelu(y @ p[4]) @ p[5]

    d = _Draws("parallel")
    return _chain(parallel), ([d.block(256) for _ in range(2)], d.normal(4, 128, 256))


def _decoder() -> Made:
    def layer(p: Weights, x: jax.Array, memory: jax.Array) -> jax.Array:
        x = x + attention(p[6:], norm(x), memory)
        return block(p, x)

    d = _Draws("decoder")
    layers = [[*d.block(192), *d.attention(192)] for _ in range(2)]
    return _chain(layer), (layers, d.normal(4, 96, 192), d.normal(4, 128, 192))


def _two_attentions() -> Made:
    def both(p: Weights, x: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
        return attention(p, x, one) + attention(p[4:], x, other)

    d = _Draws("two attentions")
    weights = [*d.attention(256), *d.attention(256)]
    return both, (weights, d.normal(4, 128, 256), d.normal(4, 128, 256), d.normal(4, 96, 256))


def _towers() -> Made:
    tower = _chain(block)

    def towers(left: Any, right: Any, w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return (tower(left, x).mean(1) @ w) @ tower(right, y).mean(1).T

    d = _Draws("towers")
    left, right = ([d.block(width) for _ in range(2)] for width in (128, 192))
    return towers, (left, right, *d.dense(128, 192), d.normal(8, 32, 128), d.normal(8, 64, 192))


def _inception(batch: int, width: int, channels: int) -> Made:
    def module(p: Weights, x: jax.Array) -> jax.Array:
        near = conv(jax.nn.relu(conv(x, p[1])), p[2])
        far = conv(jax.nn.relu(conv(x, p[3])), p[4])
        return jnp.concatenate([jax.nn.relu(conv(x, p[0])), near, far], -1)

    d = _Draws("inception")
    few = 3 * channels // 4
    kernels = [
        d.kernel(1, channels, channels), d.kernel(1, channels, few), d.kernel(3, few, channels),
        d.kernel(1, channels, few), d.kernel(5, few, channels),
    ]  # fmt: skip
    return module, (kernels, d.normal(batch, width, width, channels))


def residual(p: list[Weights], x: jax.Array) -> jax.Array:
    """Blocks of two convolutions, then the mean of the image."""
    for first, second in p:
        x = jax.nn.relu(x + conv(jax.nn.relu(conv(x, first)), second))
    return x.mean((1, 2))


def _residual(width: int, channels: int) -> Made:
    d = _Draws("residual")
    p = [[d.kernel(3, channels, channels) for _ in range(2)] for _ in range(2)]
    return residual, (p, d.normal(8, width, width, channels))


def _siamese() -> Made:
    def embedded(p: Weights, x: jax.Array) -> jax.Array:
        for kernel in p:
            x = jax.nn.relu(conv(x, kernel, 2))
        return x.mean((1, 2))

    def distance(p: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.square(embedded(p, x) - embedded(p, y)).sum(-1)

    d = _Draws("siamese")
    kernels = [d.kernel(3, 3, 32), d.kernel(3, 32, 64), d.kernel(3, 64, 64)]
    return distance, (kernels, d.normal(8, 64, 64, 3), d.normal(8, 64, 64, 3))


def _pyramid() -> Made:
    def heads(p: list[Weights], x: jax.Array) -> list[jax.Array]:
        levels = []
        for down, head in p:
            x = jax.nn.relu(conv(x, down, 2))
            levels.append(conv(x, head))
        return levels

    d = _Draws("pyramid")
    p = [[d.kernel(3, c, 64), d.kernel(3, 64, 64)] for c in (3, 64, 64)]
    return heads, (p, d.normal(4, 64, 64, 3))


def _depthwise() -> Made:
    def layer(p: Weights, x: jax.Array) -> jax.Array:
        return jax.nn.relu(conv(conv(x, p[0], groups=x.shape[-1]), p[1]))

    d = _Draws("depthwise")
    p = [[d.normal(3, 3, 1, 64) / 3, d.kernel(1, 64, 64)] for _ in range(3)]
    return _chain(layer), (p, d.normal(4, 32, 32, 64))


def _mixer() -> Made:
    def layer(p: Weights, x: jax.Array) -> jax.Array:
        y = jnp.swapaxes(norm(x), 1, 2)
        x = x + jnp.swapaxes(jax.nn.gelu(y @ p[0]) @ p[1], 1, 2)
        return x + jax.nn.gelu(norm(x) @ p[2]) @ p[3]

    d = _Draws("mixer")
    p = [[*d.dense(64, 128, 64), *d.dense(128, 256, 128)] for _ in range(2)]
    return _chain(layer), (p, d.normal(8, 64, 128))


def _autoencoder() -> Made:
    def whole(p: Weights, x: jax.Array, noise: jax.Array) -> jax.Array:
        h = jax.nn.relu(x @ p[0])
        return jax.nn.relu((h @ p[1] + jnp.exp(h @ p[4]) * noise) @ p[2]) @ p[3]

    d = _Draws("autoencoder")
    weights = [*d.dense(784, 512, 64, 512, 784), *d.dense(512, 64)]
    return whole, (weights, d.normal(128, 784), d.normal(128, 64))


def _readers() -> Made:
    def ends(members: Any, x: jax.Array) -> jax.Array:
        made = [cases.lstm(p, x, reverse=False)[-1] for p in members]
        return jnp.stack(made).mean(0)

    d = _Draws("readers")
    members = [cases.lstm_parameters(jax.random.key(n), 64, 96) for n in range(4)]
    return ends, (members, d.normal(40, 8, 64))


def _factors() -> Made:
    def factors(*xs: jax.Array) -> list[jax.Array]:
        return [jnp.linalg.cholesky(x) for x in xs]

    d = _Draws("factors")
    squares = (d.normal(256, 256) for _ in range(4))
    return factors, tuple(x @ x.T / 256 + jnp.eye(256) for x in squares)


def _decompositions() -> Made:
    def both(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.linalg.svd(x, compute_uv=False), jnp.linalg.qr(y)[1]

    d = _Draws("decompositions")
    return both, (d.normal(128, 128), d.normal(256, 256))


def _quantiles() -> Made:
    def quantiles(x: jax.Array) -> list[jax.Array]:
        return [jax.scipy.special.erfinv(jnp.tanh(x * k)) for k in (0.1, 0.2, 0.3, 0.4)]

    return quantiles, (_Draws("quantiles").normal(256, 512),)


def _messages() -> Made:
    def layer(p: Weights, x: jax.Array, ends: jax.Array) -> jax.Array:
        sent = jnp.take(x @ p[0], ends[0], 0)
        return jax.nn.relu(jax.ops.segment_sum(sent, ends[1], x.shape[0]) @ p[1])

    d = _Draws("messages")
    ends = jax.random.randint(jax.random.key(0), (2, 16000), 0, 2000)
    return layer, (d.dense(64, 64, 64), d.normal(2000, 64), ends)


def _gradient(made: Made, target: tuple[int, ...]) -> Made:
    function, (p, x) = made

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.square(function(p, x) - y).mean()

    return jax.grad(loss), (p, x, _Draws("target").normal(*target))


def _small_encoder() -> Made:
    d = _Draws("small encoder")
    return _chain(block), ([d.block(128) for _ in range(2)], d.normal(4, 64, 128))


CASES: list[Case] = [
    Case("encoder", "loss", "transformer encoder, 2 blocks d256 B4 T128", _encoder),
    Case("parallel", "gain", "2 blocks, attention beside dense layers, d256 B4 T128", _parallel),
    Case("decoder", "gain", "decoder, 2 blocks with cross attention, d192 B4 T96", _decoder),
    Case("two_attentions", "gain", "two attentions side by side, d256 B4 T128", _two_attentions),
    Case("towers", "gain", "text and image tower, 2 blocks each, d128 and d192, B8", _towers),
    Case("inception_64", "gain", "Inception module, 64 channels, B8 32x32", lambda: _inception(8, 32, 64)),
    Case("inception_128", "gain", "the same, 128 channels, B4 16x16", lambda: _inception(4, 16, 128)),
    Case("residual_32", "loss", "2 residual blocks, 32 channels, B8 32x32", lambda: _residual(32, 32)),
    Case("residual_128", "loss", "the same, 128 channels, B8 16x16", lambda: _residual(16, 128)),
    Case("siamese", "gain", "siamese convolutions, B8 64x64", _siamese),
    Case("pyramid", "gain", "feature pyramid, 3 levels with heads, B4 64x64", _pyramid),
    Case("depthwise", "loss", "3 depthwise separable convolutions, B4 32x32", _depthwise),
    Case("mixer", "loss", "MLP-Mixer, 2 layers, 64 tokens d128 B8", _mixer),
    Case("autoencoder", "loss", "variational autoencoder, 784-512-64, B128", _autoencoder),
    Case("readers", "gain", "4 LSTMs T40 B8 d96", _readers),
    Case("factors", "gain", "4 Cholesky 256", _factors, lapack=True),
    Case("decompositions", "gain", "singular values of 128, QR of 256", _decompositions, lapack=True),
    Case("quantiles", "gain", "4 chains with erfinv on 256x512", _quantiles),
    Case("messages", "loss", "graph layer, 2000 nodes, 16000 edges", _messages),
    Case("gradient_encoder", "gain", "gradient of 2 blocks d128 B4 T64",
         lambda: _gradient(_small_encoder(), (4, 64, 128))),
    Case("gradient_residual", "gain", "gradient of 2 residual blocks, 32 channels, B8",
         lambda: _gradient(_residual(32, 32), (8, 32))),
]  # fmt: skip
