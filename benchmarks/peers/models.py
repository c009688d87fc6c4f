"""The models of ``compare.py``, each twice: PyTorch modules, and plain JAX functions of their weights.

A model is parts that do not need each other and a join, so that they can be run by hand in threads or as
requests of their own; a model of one chain has one part, and rows that can be dealt out instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch
from models.pair_models import Weights, linear, weights
from torch import nn

import dynaflow_xla as dfx

F = nn.functional


@dataclass
class Part:
    """An independent part of a model.

    Attributes:
        module: In PyTorch.
        jax: The same as a function of ``weights(module)``.
        takes: Which of the model's arguments it takes.
    """

    module: nn.Module
    jax: Callable[..., Any]
    takes: tuple[int, ...] = (0,)


@dataclass
class Model:
    """What all peers run.

    Attributes:
        name: Of the case.
        parts: Its independent parts.
        join: What makes the result of theirs, called with them as a list and all arguments.
        jax_join: The same as a function of ``weights(join)``.
        args: Of a call, all tensors.
        rows: Arguments whose rows (axis 0) do not meet, nor do those of the result; () if there are none.
        lapack: Whether it calls LAPACK inside XLA, whose threads spin after each call.
    """

    name: str
    parts: list[Part]
    join: nn.Module
    jax_join: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    rows: tuple[int, ...] = ()
    lapack: bool = False
    module: nn.Module = field(init=False)
    marked: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        takes = [part.takes for part in self.parts]
        modules = nn.ModuleList(part.module for part in self.parts)
        self.module = Whole(modules, self.join, takes, marks=False).eval()
        self.marked = Whole(modules, self.join, takes, marks=len(takes) > 1).eval()

    def jax_function(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function of the weights and the arguments, and those."""
        parts, join = [(part.jax, part.takes) for part in self.parts], self.jax_join

        def whole(p: Any, *args: Any) -> Any:
            outs = []
            for number, (part, takes) in enumerate(parts):
                with dfx.mark(f"part{number}") if len(parts) > 1 else nullcontext():
                    outs.append(part(p[number], *[args[i] for i in takes]))
            return join(p[-1], outs, *args)

        made: dict[int, Weights] = {}
        p = [
            made.setdefault(id(m), weights(m)) for m in (*(x.module for x in self.parts), self.join)
        ]
        return whole, (p, *map(to_jax, self.args))


def to_jax(x: torch.Tensor) -> jax.Array:
    """The same numbers; whole numbers have 32 bits."""
    return jnp.array(x.numpy() if x.is_floating_point() else x.int().numpy())


class Whole(nn.Module):
    """Parts and what puts them together; ``marks`` tells the schedule where they are."""

    def __init__(self, parts: nn.ModuleList, join: nn.Module, takes: Any, marks: bool) -> None:
        super().__init__()
        self.parts, self.join, self.takes, self.marks = parts, join, takes, marks

    def forward(self, *args: Any) -> Any:
        outs = []
        for number, (part, takes) in enumerate(zip(self.parts, self.takes, strict=True)):
            with dfx.mark(f"part{number}") if self.marks else nullcontext():
                outs.append(part(*[args[i] for i in takes]))
        return self.join(outs, *args)


class Join(nn.Module):
    """A join without weights, of a function that both frameworks can run."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, outs: Any, *args: Any) -> Any:
        return self.fn(outs, *args)


# -- parts ----------------------------------------------------------------------------------------------


def _mlp(*sizes: int) -> Part:
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), nn.ReLU()]

    def run(p: Weights, x: jax.Array) -> jax.Array:
        for i in range(len(sizes) - 1):
            x = linear(p, str(2 * i), x)
            x = jax.nn.relu(x) if i < len(sizes) - 2 else x
        return x

    return Part(nn.Sequential(*layers[:-1]), run)


def _conv(p: Weights, name: str, x: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    kernel = p[f"{name}.weight"]
    pads = [(size // 2, size // 2) for size in kernel.shape[:2]]
    dims = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), pads, dimension_numbers=dims, feature_group_count=groups
    )
    return y + p[f"{name}.bias"]


def _conv_branch(c: int, *kernels: int) -> Part:
    layers: list[nn.Module] = []
    for k in kernels:
        layers += [nn.Conv2d(c, c, k, padding=k // 2), nn.ReLU()]

    def run(p: Weights, x: jax.Array) -> jax.Array:
        x = x.transpose(0, 2, 3, 1)
        for i in range(len(kernels)):
            x = jax.nn.relu(_conv(p, str(2 * i), x))
        return x.mean((1, 2))

    return Part(nn.Sequential(*layers, Pool()), run)


class Pool(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.mean((2, 3))


class Recurrent(nn.Module):
    """The states of a GRU over [T, B, D]; ``reverse`` from the end; ``last`` only the last one."""

    def __init__(self, d: int, *, reverse: bool = False, last: bool = True) -> None:
        super().__init__()
        self.gru, self.reverse, self.last = nn.GRU(d, d), reverse, last

    def forward(self, x: Any) -> Any:
        out = self.gru(x.flip(0) if self.reverse else x)[0]
        if self.last:
            return out[-1]
        return out.flip(0) if self.reverse else out

    def part(self) -> Part:
        reverse, last = self.reverse, self.last

        def run(p: Weights, x: jax.Array) -> jax.Array:
            ih, hh = p["gru.weight_ih_l0"], p["gru.weight_hh_l0"]

            def step(h: jax.Array, given: jax.Array) -> Any:
                r, z, n = jnp.split(given, 3, axis=-1)
                hr, hz, hn = jnp.split(h @ hh + p["gru.bias_hh_l0"], 3, axis=-1)
                r, z = jax.nn.sigmoid(r + hr), jax.nn.sigmoid(z + hz)
                h = (1 - z) * jnp.tanh(n + r * hn) + z * h
                return h, h

            first = jnp.zeros((x.shape[1], hh.shape[0]), x.dtype)
            h, states = jax.lax.scan(step, first, x @ ih + p["gru.bias_ih_l0"], reverse=reverse)
            return h if last else states

        return Part(self, run)


class Wired(nn.Module):
    """Nodes wired at random, each a sum of earlier ones, ReLU and a separable convolution."""

    def __init__(self, c: int, nodes: int, seed: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.c = c
        self.before = [
            sorted({int(torch.randint(0, i + 1, (), generator=drawn)) for _ in range(2)})
            for i in range(nodes)
        ]
        self.deep = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1, groups=c) for _ in range(nodes))
        self.flat = nn.ModuleList(nn.Conv2d(c, c, 1) for _ in range(nodes))

    def forward(self, x: Any) -> Any:
        made = [x]
        for before, deep, flat in zip(self.before, self.deep, self.flat, strict=True):
            made.append(flat(deep(F.relu(sum(made[i] for i in before)))))
        read = {i for before in self.before for i in before}
        return sum(y for i, y in enumerate(made) if i not in read).mean((2, 3))

    def part(self) -> Part:
        wires, c = self.before, self.c

        def run(p: Weights, x: jax.Array) -> jax.Array:
            made = [x.transpose(0, 2, 3, 1)]
            for i, before in enumerate(wires):
                y = jax.nn.relu(sum(made[j] for j in before))
                made.append(_conv(p, f"flat.{i}", _conv(p, f"deep.{i}", y, groups=c)))
            read = {i for before in wires for i in before}
            return sum(y for i, y in enumerate(made) if i not in read).mean((1, 2))  # type: ignore[union-attr]

        return Part(self, run)


def _heads(x: Any, heads: int) -> Any:
    return x.reshape(*x.shape[:2], heads, -1)


def _attend(xp: Any, q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """Attention of [B, T, H, D]; the same words for both frameworks."""
    soft = torch.softmax if xp is torch else jax.nn.softmax
    scores = xp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        t = q.shape[1]
        scores = scores + (xp.tril(xp.ones((t, t))) - 1) * 1e9
    return xp.einsum("bhqk,bkhd->bqhd", soft(scores, -1), v).reshape(*q.shape[:2], -1)


def _rms(xp: Any, x: Any) -> Any:
    return x / (xp.mean(x * x, -1)[..., None] + 1e-6) ** 0.5


class Block(nn.Module):
    """A transformer block over [B, T, D]; ``k``, ``v`` [B, T, H, D] of earlier tokens are attended to, too.

    With ``causal``, tokens see those before them; one that comes after a cache sees all.
    """

    def __init__(self, d: int, heads: int, inner: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(d, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, d, bias=False)

    def forward(self, x: Any, k: Any = None, v: Any = None) -> Any:
        dense = {name: getattr(self, name) for name in ("q", "k", "v", "o", "gate", "up", "down")}
        return self.run(torch, lambda name, x: dense[name](x), x, k, v)

    def run(self, xp: Any, dense: Callable[[str, Any], Any], x: Any, k: Any, v: Any) -> Any:
        silu = F.silu if xp is torch else jax.nn.silu
        y, causal = _rms(xp, x), self.causal and k is None
        q, new_k, new_v = (_heads(dense(name, y), self.heads) for name in "qkv")
        if k is not None:
            new_k, new_v = xp.concatenate([k, new_k], 1), xp.concatenate([v, new_v], 1)
        x = x + dense("o", _attend(xp, q, new_k, new_v, causal))
        y = _rms(xp, x)
        return x + dense("down", silu(dense("gate", y)) * dense("up", y))

    def jax(self, p: Weights, at: str, x: jax.Array, k: Any = None, v: Any = None) -> jax.Array:
        return self.run(jnp, lambda name, x: linear(p, at + name, x), x, k, v)

    def part(self, *takes: int) -> Part:
        return Part(self, lambda p, *args: self.jax(p, "", *args), takes)


class Tower(nn.Module):
    """Tokens to a vector of length 1: a table or a projection, blocks, mean."""

    def __init__(self, into: nn.Module, d: int, blocks: int) -> None:
        super().__init__()
        self.into, self.out = into, nn.Linear(d, 64, bias=False)
        self.blocks = nn.ModuleList(Block(d, 4, 4 * d) for _ in range(blocks))

    def forward(self, x: Any) -> Any:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        y = self.out(x.mean(1))
        return y / (y * y).sum(-1, keepdim=True) ** 0.5

    def part(self, takes: int) -> Part:
        blocks, table = list(self.blocks), isinstance(self.into, nn.Embedding)

        def run(p: Weights, x: jax.Array) -> jax.Array:
            x = p["into.weight"][x] if table else linear(p, "into", x)
            for i, block in enumerate(blocks):
                x = block.jax(p, f"blocks.{i}.", x)
            y = linear(p, "out", x.mean(1))
            return y / jnp.sqrt((y * y).sum(-1, keepdims=True))

        return Part(self, run, (takes,))


class Denoiser(nn.Module):
    """A diffusion transformer: noisy patches [B, T, D] and a prompt [B, S, D] to the noise."""

    def __init__(self, d: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(d, 4, 4 * d) for _ in range(blocks))

    def forward(self, x: Any, prompt: Any) -> Any:
        y = torch.concatenate([x, prompt], 1)
        for block in self.blocks:
            y = block(y)
        return y[:, : x.shape[1]]

    def part(self, *takes: int) -> Part:
        blocks = list(self.blocks)

        def run(p: Weights, x: jax.Array, prompt: jax.Array) -> jax.Array:
            y = jnp.concatenate([x, prompt], 1)
            for i, block in enumerate(blocks):
                y = block.jax(p, f"blocks.{i}.", y)
            return y[:, : x.shape[1]]

        return Part(self, run, takes)


class Table(nn.Module):
    """The mean of a bag of rows of a table, [B, N] to [B, D]."""

    def __init__(self, rows: int, d: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, d)

    def forward(self, ids: Any) -> Any:
        return self.table(ids).mean(1)

    def part(self, takes: int) -> Part:
        return Part(self, lambda p, ids: p["table.weight"][ids].mean(1), (takes,))


class Interaction(nn.Module):
    """Products of all pairs of vectors [B, D], and a layer."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.top = nn.Linear(n * n, 1)

    def forward(self, outs: Any, *args: Any) -> Any:
        x = torch.stack(outs, 1)
        return self.top((x @ x.transpose(1, 2)).flatten(1))


class Sorted(nn.Module):
    """Rows of a projection, sorted: work of one core."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.dense = nn.Linear(d, d)

    def forward(self, x: Any) -> Any:
        return torch.sort(self.dense(x), dim=-1).values

    def part(self) -> Part:
        return Part(self, lambda p, x: jnp.sort(linear(p, "dense", x), axis=-1))


class Spectrum(nn.Module):
    """A symmetric matrix after an exponential filter of its eigenvalues."""

    def forward(self, a: Any) -> Any:
        w, v = torch.linalg.eigh(a)
        return (v * torch.exp(-w)) @ v.transpose(0, 1)


def _spectrum(_: Weights, a: jax.Array) -> jax.Array:
    w, v = jnp.linalg.eigh(a)
    return (v * jnp.exp(-w)) @ v.T


class Experts(nn.Module):
    """Adds what the experts made, each weighted by the router; top 2 of them count."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)

    def forward(self, outs: Any, x: Any) -> Any:
        scores = torch.softmax(self.router(x), -1)
        best, chosen = scores.topk(2, -1)
        gates = torch.zeros_like(scores).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        return sum(gates[:, i, None] * y for i, y in enumerate(outs))


def _experts(p: Weights, outs: list[jax.Array], x: jax.Array) -> jax.Array:
    best, chosen = jax.lax.top_k(jax.nn.softmax(linear(p, "router", x)), 2)
    shares = best / best.sum(-1, keepdims=True)
    gates = (jax.nn.one_hot(chosen, len(outs)) * shares[..., None]).sum(1)
    return sum(gates[:, i, None] * y for i, y in enumerate(outs))  # type: ignore[return-value]


def _expert(p: Weights, x: jax.Array) -> jax.Array:
    return linear(p, "down", jax.nn.silu(linear(p, "gate", x)) * linear(p, "up", x))


class Step(nn.Module):
    """A step of gradient descent on a small regression; matrices as [in, out], all as one vector out."""

    def __init__(self, d: int, layers: int) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(d, d) / d**0.5) for _ in range(layers))

    def forward(self, x: Any, y: Any) -> Any:
        p = tuple(self.w)
        grads = torch.func.grad(lambda p: _loss(torch, p, x, y))(p)
        return torch.stack([w - 0.1 * g for w, g in zip(p, grads, strict=True)])

    def part(self, *takes: int) -> Part:
        layers = len(self.w)

        def run(p: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
            w = tuple(p[f"w.{i}"] for i in range(layers))
            grads = jax.grad(lambda w: _loss(jnp, w, x, y))(w)
            return jnp.stack([a - 0.1 * g for a, g in zip(w, grads, strict=True)])

        return Part(self, run, takes)


def _loss(xp: Any, p: Any, x: Any, y: Any) -> Any:
    for w in p:
        x = xp.tanh(x @ w)
    return ((x - y) ** 2).sum(-1).mean()
