"""Layers of models: attention, experts, convolutions, recurrences, normalisations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import dynaflow_xla as dfx
from function_table.registry import ROWS, case

T, D, H = 5, 8, 2


def _heads(x: Any) -> Any:
    return x.reshape(*x.shape[:-1], H, x.shape[-1] // H)


def _attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", _heads(q), _heads(k)) / 2.0
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, _heads(v)).reshape(q.shape)


@case(
    lambda d: (d.normal(ROWS, T, D), d.weight(D, 3 * D), d.weight(D, D)),
    in_axes=(0, None, None),
    wrt=(0, 1),
)
def attention(x: Any, w: Any, out: Any) -> Any:
    q, k, v = jnp.split(x @ w, 3, axis=-1)
    return x + _attend(q, k, v, jnp.tril(jnp.ones((T, T), bool))) @ out


@case(
    lambda d: (d.normal(T, ROWS, D), d.normal(T + 2, ROWS, D), d.weight(D, D)),
    in_axes=(1, 1, None),
    out_axes=1,
    wrt=(0, 1, 2),
)
def cross_attention_time_major(x: Any, memory: Any, w: Any) -> Any:
    q, m = jnp.swapaxes(x @ w, 0, 1), jnp.swapaxes(memory, 0, 1)
    return jnp.swapaxes(_attend(q, m, m, True), 0, 1)


@case(
    lambda d: (d.normal(ROWS, D), d.normal(ROWS, 7, D), d.ints(0, 7, ROWS)),
    wrt=(0, 1),
    out_axes=(0, 0, 0),
)
def attention_with_a_cache(x: Any, cache: Any, position: Any) -> Any:
    cache = jax.vmap(lambda c, r, p: lax.dynamic_update_index_in_dim(c, r, p, 0))(
        cache, x, position
    )
    scores = jnp.einsum("bd,btd->bt", x, cache)
    scores = jnp.where(jnp.arange(7)[None] <= position[:, None], scores, -jnp.inf)
    return jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), cache), cache, position + 1


@case(lambda d: (d.normal(ROWS, 8, D), d.weight(D, D)), in_axes=(0, None), wrt=(0, 1))
def attention_by_blocks(x: Any, w: Any) -> Any:
    """Softmax over blocks of keys, as in flash attention: a scan with a running maximum."""
    blocks = jnp.moveaxis(x.reshape(x.shape[0], 4, 2, D), 1, 0)
    q = x @ w

    def step(carry: Any, block: Any) -> Any:
        top, total, acc = carry
        scores = jnp.einsum("bqd,bkd->bqk", q, block)
        new = jnp.maximum(top, scores.max(-1))
        p, old = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
        acc = acc * old[..., None] + jnp.einsum("bqk,bkd->bqd", p, block)
        return (new, total * old + p.sum(-1), acc), None

    start = (jnp.full(x.shape[:2], -1e9), jnp.zeros(x.shape[:2]), jnp.zeros(x.shape))
    (_, total, acc), _ = lax.scan(step, start, blocks)
    return acc / total[..., None]


@case(
    lambda d: (d.normal(ROWS, D), d.weight(D, 3), d.weight(3, D, 2 * D), d.weight(3, 2 * D, D)),
    in_axes=(0, None, None, None),
    out_axes=(0, dfx.Mean()),
    wrt=(0, 1, 2),
)
def experts_all(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """Every expert, weighted; with the z-loss of the router."""
    logits = x @ gate
    y = jnp.einsum("bd,edf->bef", x, up)
    y = jnp.einsum("bef,efd->bed", jax.nn.gelu(y), down)
    z_loss = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return jnp.einsum("be,bed->bd", jax.nn.softmax(logits), y), z_loss


@case(
    lambda d: (d.distinct(ROWS, D), d.weight(D, 4), d.weight(4, D, D)),
    in_axes=(0, None, None),
    out_axes=(0, dfx.Sum()),
    wrt=(0, 2),
)
def experts_top_2(x: Any, gate: Any, w: Any) -> Any:
    """The two best experts of each row, and how many rows each expert got."""
    scores, chosen = lax.top_k(jax.nn.softmax(x @ gate), 2)
    y = jnp.einsum("bd,bkdf->bkf", x, w[chosen])
    load = jax.nn.one_hot(chosen, 4).sum((0, 1))
    return jnp.einsum("bk,bkf->bf", scores / scores.sum(-1, keepdims=True), y), load


@case(lambda d: (d.normal(ROWS, 6, 6, 3), d.weight(3, 3, 3, 4)), in_axes=(0, None), wrt=(0, 1))
def conv_2d(x: Any, w: Any) -> Any:
    y = lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + 0.01)


@case(
    lambda d: (d.normal(4, ROWS, 9), d.weight(1, 4, 3)),
    in_axes=(1, None),
    out_axes=-1,
    wrt=(0, 1),
)
def conv_depthwise(x: Any, w: Any) -> Any:
    """The batch is in the middle of the argument and at the end of the result."""
    y = lax.conv_general_dilated(
        x, w, (1,), [(2, 0)], dimension_numbers=("CNW", "IOW", "CNW"), feature_group_count=4
    )
    return jnp.transpose(y, (0, 2, 1))


@case(lambda d: (d.distinct(ROWS, 6, 6, 2),), wrt=(0,))
def pooling(x: Any) -> Any:
    top = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    mean = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return top + mean / 9


@case(
    lambda d: (d.normal(ROWS, T, D), d.weight(D, D), d.weight(D, D)),
    in_axes=(0, None, None),
    wrt=(0, 1, 2),
)
def rnn(x: Any, w: Any, u: Any) -> Any:
    def step(h: Any, v: Any) -> Any:
        h = jnp.tanh(v @ w + h @ u)
        return h, h

    _, hs = lax.scan(step, jnp.zeros((x.shape[0], D)), jnp.swapaxes(x, 0, 1))
    return jnp.swapaxes(hs, 0, 1)


def _lstm(x: Any, w: Any, u: Any, reverse: bool = False) -> Any:
    def step(carry: Any, v: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(v @ w + h @ u, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((x.shape[1], D))
    return lax.scan(step, (zero, zero), x, reverse=reverse)


@case(
    lambda d: (d.normal(T, ROWS, D), d.weight(D, 4 * D), d.weight(D, 4 * D)),
    in_axes=(1, None, None),
    out_axes=((0, 0), 1),
    wrt=(0, 1, 2),
)
def lstm(x: Any, w: Any, u: Any) -> Any:
    return _lstm(x, w, u)


@case(
    lambda d: (d.normal(T, ROWS, D), d.weight(2, D, 4 * D), d.weight(2, D, 4 * D)),
    in_axes=(1, None, None),
    out_axes=1,
    wrt=(1, 2),
)
def lstm_both_ways(x: Any, w: Any, u: Any) -> Any:
    with dfx.mark("forward"):
        a = _lstm(x, w[0], u[0])[1]
    with dfx.mark("backward"):
        b = _lstm(x, w[1], u[1], reverse=True)[1]
    return jnp.concatenate([a, b], -1)


@case(
    lambda d: (d.normal(ROWS, T, D), d.weight(D, 3 * D), d.weight(D, 3 * D), d.ints(1, 6, ROWS)),
    in_axes=(0, None, None, 0),
    wrt=(0, 1),
)
def gru_with_lengths(x: Any, w: Any, u: Any, lengths: Any) -> Any:
    """Rows end at their own time."""

    def step(h: Any, item: Any) -> Any:
        t, v = item
        a, b = v @ w, h @ u
        r, z = jax.nn.sigmoid(a[:, :D] + b[:, :D]), jax.nn.sigmoid(a[:, D:-D] + b[:, D:-D])
        new = (1 - z) * jnp.tanh(a[:, -D:] + r * b[:, -D:]) + z * h
        return jnp.where((t < lengths)[:, None], new, h), None

    times = (jnp.arange(T), jnp.swapaxes(x, 0, 1))
    return lax.scan(step, jnp.zeros((x.shape[0], D)), times)[0]


@case(
    lambda d: (d.normal(ROWS, D), d.normal(D), d.normal(D)), in_axes=(0, None, None), wrt=(0, 1, 2)
)
def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    return jax.nn.standardize(x, axis=-1, epsilon=1e-3) * scale + bias


@case(lambda d: (d.normal(T, D, ROWS), d.normal(D)), in_axes=(2, None), out_axes=2, wrt=(0, 1))
def rms_norm_and_rotation(x: Any, scale: Any) -> Any:
    """The batch is the last axis."""
    x = x / jnp.sqrt(jnp.mean(x**2, axis=1, keepdims=True) + 1e-3) * scale[:, None]
    angle = jnp.arange(T)[:, None] * 0.5 ** jnp.arange(D // 2)
    cos, sin = jnp.cos(angle)[..., None], jnp.sin(angle)[..., None]
    a, b = x[:, : D // 2], x[:, D // 2 :]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)


@case(lambda d: (d.normal(ROWS, 4, 4, D), d.normal(D)), in_axes=(0, None), wrt=(0, 1))
def group_norm(x: Any, scale: Any) -> Any:
    groups = x.reshape(x.shape[0], 16, 2, D // 2)
    mean = groups.mean((1, 3), keepdims=True)
    var = groups.var((1, 3), keepdims=True)
    return ((groups - mean) * lax.rsqrt(var + 1e-3)).reshape(x.shape) * scale


@case(lambda d: (d.normal(ROWS, D),), wrt=(0,), refused="reduce_sum|mean")
def batch_norm_in_training(x: Any) -> Any:
    """Mixes rows: refused under a split without joins. The sum of what is normalised has no gradient."""
    return jnp.tanh((x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-3))


@case(lambda d: (d.normal(3, D, D, scale=0.3), d.normal(ROWS, D)), in_axes=(None, 0), wrt=(0, 1))
def layers_scanned(ws: Any, x: Any) -> Any:
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, ws)[0]


@case(
    lambda d: (
        {"a": [d.weight(D, D), None], "b": (d.normal(D),)},
        {"x": d.normal(ROWS, D), "mask": None, "y": d.normal(D, ROWS)},
    ),
    in_axes=(None, {"x": 0, "mask": None, "y": 1}),
    out_axes={"rows": (0, 1), "loss": dfx.Mean(), "none": None, "weights": None},
    wrt=(0,),
)
def trees(params: Any, batch: Any) -> Any:
    """Nested arguments and results, with None among them."""
    h = jnp.tanh(batch["x"] @ params["a"][0] + params["b"][0])
    return {
        "rows": (h, h.T * batch["y"]),
        "loss": jnp.mean(h**2),
        "none": None,
        "weights": params["a"][0] * 2,
    }
