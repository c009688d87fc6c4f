"""Own lowerings of aten operators: where torchax has none, or another meaning than PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

aten = torch.ops.aten

TABLE: dict[Any, Callable[..., Any]] = {}
"""Operator (overload, or packet for all overloads) -> function over JAX arrays."""

DECOMPOSE: set[Any] = {
    aten.all, aten.any, aten.bernoulli, aten.cauchy_, aten.embedding_renorm_, aten.exponential_,
    aten.max_unpool2d, aten.max_unpool3d, aten.polygamma,
    aten.searchsorted, aten._upsample_bicubic2d_aa, aten._upsample_bilinear2d_aa, aten._unique,
    aten._unique2, aten.linalg_matrix_exp, aten.masked_select, aten.nonzero, aten.is_nonzero,
    aten._local_scalar_dense, aten.unique_dim, aten.unique_consecutive, aten.put,
    aten._embedding_bag, aten._embedding_bag_forward_only, aten.sparse_sampled_addmm,
}  # fmt: skip
"""torchax's lowerings of these are not used: they draw from a fixed key, approximate, or differ."""


def lowers(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the lowering of operators."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            TABLE[op] = fn
        return fn

    return register


@lowers(torch.ops.prims.convert_element_type.default)
def _convert(x: Any, dtype: Any) -> Any:
    return _cast(x, dtype)


def _dims(dim: Any, rank: int) -> tuple[int, ...] | None:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return None
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % rank for d in dims) if rank else ()


@lowers(aten.add.Tensor, aten.add.Scalar)
def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x + (y if alpha == 1 else y * alpha)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def _sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x - (y if alpha == 1 else y * alpha)


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def _any(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.any(x != 0, axis=_dims(dim, x.ndim), keepdims=keepdim)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def _all(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.all(x != 0, axis=_dims(dim, x.ndim), keepdims=keepdim)


def _wide(x: Any) -> Any:
    """Integers and truth values are summed as 64-bit integers."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.int64)


@lowers(aten.sum.default, aten.sum.dim_IntList)
def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.sum(_cast(x, dtype), axis=_dims(dim, x.ndim), keepdims=keepdim)


@lowers(aten.prod.default, aten.prod.dim_int)
def _prod(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.prod(_cast(x, dtype), axis=_dims(dim, x.ndim), keepdims=keepdim)


@lowers(aten.cumsum.default)
def _cumsum(x: Any, dim: int, *, dtype: Any = None) -> Any:
    return jnp.cumsum(_cast(x, dtype), axis=dim) if x.ndim else _cast(x, dtype)


@lowers(aten.cumprod.default)
def _cumprod(x: Any, dim: int, *, dtype: Any = None) -> Any:
    return jnp.cumprod(_cast(x, dtype), axis=dim) if x.ndim else _cast(x, dtype)


def _cast(x: Any, dtype: torch.dtype | None) -> Any:
    return _wide(x) if dtype is None else x.astype(str(dtype).removeprefix("torch."))


TABLE[aten.lgamma.default] = lambda x: jax.lax.lgamma(x)
TABLE[aten.digamma.default] = lambda x: jax.lax.digamma(x)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@lowers(aten.copy.default)
def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    return jnp.broadcast_to(source, x.shape).astype(x.dtype)


@lowers(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(x: Any, dim: Any = None) -> Any:
    dims = _dims(dim, x.ndim)
    if dims is None:
        dims = tuple(range(x.ndim)) if dim is None else ()
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


TABLE[aten.tril] = lambda x, diagonal=0: jnp.tril(x, diagonal)
TABLE[aten.triu] = lambda x, diagonal=0: jnp.triu(x, diagonal)


@lowers(aten.embedding.default)
def _embedding(
    weight: Any, indices: Any, padding_idx: int = -1, by_freq: bool = False, sparse: bool = False
) -> Any:
    return jnp.take(weight, indices, axis=0, mode="clip")


@lowers(aten.sort.default)
def _sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    return _stable_sort(x, dim=dim, descending=descending)


@lowers(aten.sort.stable)
def _stable_sort(x: Any, *, stable: Any = True, dim: int = -1, descending: bool = False) -> Any:
    """Equal elements keep their order in both directions, as they do in PyTorch on CPUs."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
    pair = [jnp.flip(v, dim) for v in (x, places)] if descending else [x, places]
    values, places = jax.lax.sort(pair, dimension=dim, is_stable=True, num_keys=1)
    if descending:
        values, places = jnp.flip(values, dim), jnp.flip(places, dim)
    return values, places.astype(jnp.int64)


@lowers(aten.topk.default)
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    x = jnp.moveaxis(x, dim, -1)
    if largest:
        values, places = jax.lax.top_k(x, k)
    else:
        places = jnp.argsort(x, axis=-1)[..., :k]
        values = jnp.take_along_axis(x, places, axis=-1)
    places = places.astype(jnp.int64)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(places, -1, dim)


@lowers(aten.logsumexp.default)
def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    return jax.nn.logsumexp(x, axis=_dims(dim, x.ndim), keepdims=keepdim)


# -- convolution and pooling ------------------------------------------------------------------------


@lowers(aten.convolution.default)
def _convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    n = weight.ndim - 2
    if x.ndim == n + 1:
        raise NotImplementedError("convolution without a batch dimension")

    def each(given: Any) -> list[int]:
        return list(given) * n if len(given) == 1 else list(given)

    stride, padding, dilation = each(stride), each(padding), each(dilation)
    kernel = weight.shape[2:]
    numbers = (tuple(range(n + 2)),) * 3
    if transposed:
        extra = each(output_padding)
        sides = [
            (d * (k - 1) - p, d * (k - 1) - p + e)
            for d, k, p, e in zip(dilation, kernel, padding, extra, strict=True)
        ]
        inputs, outputs = weight.shape[:2]  # [in, out / groups, ...] to [out, in / groups, ...]
        weight = weight.reshape(groups, inputs // groups, outputs, *kernel)
        weight = jnp.swapaxes(weight, 1, 2).reshape(groups * outputs, inputs // groups, *kernel)
        weight = jnp.flip(weight, tuple(range(2, n + 2)))
        window, spread = [1] * n, stride
    else:
        sides, window, spread = [(p, p) for p in padding], stride, [1] * n
    result = jax.lax.conv_general_dilated(
        x, weight, window, sides, lhs_dilation=spread, rhs_dilation=dilation,
        dimension_numbers=jax.lax.ConvDimensionNumbers(*numbers), feature_group_count=groups,
    )  # fmt: skip
    return result if bias is None else result + bias.reshape(-1, *[1] * n)


@lowers(aten.convolution_backward.default)
def _convolution_backward(
    grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    def forward(a: Any, w: Any) -> Any:
        return _convolution(
            a, w, None, stride, padding, dilation, transposed, output_padding, groups
        )

    for_x, for_weight = jax.vjp(forward, x, weight)[1](grad)
    for_bias = jnp.sum(grad, axis=(0, *range(2, grad.ndim)))
    return [for_x, for_weight, for_bias]


@lowers(aten.max_pool2d_with_indices_backward.default)
def _max_pool2d_backward(
    grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, at: Any
) -> Any:
    planes = math.prod(x.shape[:-2])
    flat = jnp.zeros((planes, x.shape[-2] * x.shape[-1]), grad.dtype)
    rows = jnp.arange(planes)[:, None]
    flat = flat.at[rows, at.reshape(planes, -1)].add(grad.reshape(planes, -1))
    return flat.reshape(x.shape)


# -- attention --------------------------------------------------------------------------------------


def _attention(q: Any, k: Any, v: Any, causal: bool, mask: Any, scale: float | None) -> Any:
    """(output [B, H, T, D], log of the sum of exponentials [B, H, T]), summed in float32 or wider."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=wide) * factor
    low = jnp.asarray(-jnp.inf, wide)
    if causal:
        t, s = scores.shape[-2:]
        scores = jnp.where(jnp.tril(jnp.ones((t, s), bool)), scores, low)
    if mask is not None:
        masked = jnp.where(mask, scores, low) if mask.dtype == jnp.bool_ else scores + mask
        scores = masked.astype(wide)
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    shares = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0)
    out = jnp.einsum("bhts,bhsd->bhtd", shares.astype(q.dtype), v, preferred_element_type=wide)
    return out.astype(q.dtype), jnp.squeeze(jnp.log(total) + top, -1)


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention_forward(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    if dropout_p:
        raise NotImplementedError("dropout inside of fused attention")
    return _attention(q, k, v, is_causal, attn_mask, scale)


@lowers(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, dropout_p: float, is_causal: bool,
    *, attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    def forward(q: Any, k: Any, v: Any) -> Any:
        return _attention(q, k, v, is_causal, attn_mask, scale)[0]

    return list(jax.vjp(forward, q, k, v)[1](grad))


# -- recurrent layers (operators of this package, see recurrent.py) -----------------------------------


def recurrent_layer(
    kind: str, x: Any, hx: Sequence[Any], params: Sequence[Any], has_biases: bool, reverse: bool
) -> tuple[Any, Any, Any]:
    """One layer and direction of an LSTM, GRU or RNN: [T, B, I] -> [T, B, H], last states [1, B, H]."""
    w_in, w_state = params[0], params[1]
    zero = jnp.zeros((), x.dtype)
    b_in, b_state = (params[2], params[3]) if has_biases else (zero, zero)
    rest = params[4 if has_biases else 2 :]  # of an LSTM what projects its state, if anything does
    given = jnp.einsum("tbi,gi->tbg", x, w_in) + b_in

    def lstm(state: Any, u: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(u + h @ w_state.T + b_state, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        h = h @ rest[0].T if rest else h
        return (h, c), h

    def gru(state: Any, u: Any) -> Any:
        (h,) = state
        r_in, z_in, n_in = jnp.split(u, 3, axis=-1)
        r_h, z_h, n_h = jnp.split(h @ w_state.T + b_state, 3, axis=-1)
        r, z = jax.nn.sigmoid(r_in + r_h), jax.nn.sigmoid(z_in + z_h)
        h = (1 - z) * jnp.tanh(n_in + r * n_h) + z * h
        return (h,), h

    def plain(activation: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def step(state: Any, u: Any) -> Any:
            h = activation(u + state[0] @ w_state.T + b_state)
            return (h,), h

        return step

    steps = {"lstm": lstm, "gru": gru, "rnn_tanh": plain(jnp.tanh), "rnn_relu": plain(jax.nn.relu)}
    first = tuple(h[0] for h in hx)
    last, out = jax.lax.scan(steps[kind], first, given, reverse=reverse)
    return out, last[0][None], last[1][None] if kind == "lstm" else jnp.zeros((0,), x.dtype)


def register_recurrent(ops: Any) -> None:
    """Adds the recurrent operators, given their namespace."""

    def forward(
        kind: str,
        x: Any,
        hx: Any,
        params: Any,
        has_biases: bool,
        train: bool,
        reverse: bool,
        *_: Any,
    ) -> Any:
        return recurrent_layer(kind, x, hx, params, has_biases, reverse)

    def backward(
        grads: Any, needed: Any, kind: str, x: Any, hx: Any, params: Any, has_biases: bool,
        train: bool, reverse: bool, *_: Any,
    ) -> Any:  # fmt: skip
        n = 1 + len(hx)

        def layer(*leaves: Any) -> Any:
            return recurrent_layer(kind, leaves[0], leaves[1:n], leaves[n:], has_biases, reverse)

        outs, pull = jax.vjp(layer, x, *hx, *params)
        pairs = zip(grads, outs, strict=True)
        return list(pull(tuple(jnp.zeros_like(o) if g is None else g for g, o in pairs)))

    TABLE[ops.rnn_layer.default] = forward
    TABLE[ops.rnn_layer_backward.default] = backward
