"""Which models ``compare.py`` runs; all weights and arguments are random, from one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
from models.pair_models import Expert, Weights, linear
from torch import nn

from peers.models import (
    Block,
    Denoiser,
    Experts,
    Interaction,
    Join,
    Model,
    Part,
    Recurrent,
    Sorted,
    Spectrum,
    Step,
    Table,
    Tower,
    Wired,
    _conv_branch,
    _expert,
    _experts,
    _mlp,
    _spectrum,
)  # fmt: skip

randn = torch.randn


def _both(xp_join: Callable[..., Any]) -> tuple[nn.Module, Callable[..., Any]]:
    """A join without weights: for PyTorch, and for JAX."""
    return Join(lambda outs, *args: xp_join(torch, outs, *args)), (
        lambda p, outs, *args: xp_join(jnp, outs, *args)
    )


def _one(xp: Any, outs: Any, *args: Any) -> Any:
    return outs[0]


def _mean(xp: Any, outs: Any, *args: Any) -> Any:
    return sum(outs) / len(outs)


def _side_by_side(xp: Any, outs: Any, *args: Any) -> Any:
    return xp.concatenate(list(outs), -1)


def _similar(xp: Any, outs: Any, *args: Any) -> Any:
    return outs[0] @ outs[1].T * 14.0


def _guided(xp: Any, outs: Any, x: Any, *args: Any) -> Any:
    noise = outs[0] + 5.0 * (outs[1] - outs[0])
    return 0.9 * x - 0.3 * noise


def _flat(xp: Any, outs: Any, *args: Any) -> Any:
    return xp.concatenate([x.reshape(-1) for x in outs])


class Head(nn.Module):
    """A layer on all results side by side."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, out)

    def forward(self, outs: Any, *args: Any) -> Any:
        return self.dense(torch.concatenate(outs, -1))


def _head(p: Weights, outs: Any, *args: Any) -> Any:
    return linear(p, "dense", jnp.concatenate(outs, -1))


def _interaction(p: Weights, outs: Any, *args: Any) -> Any:
    x = jnp.stack(outs, 1)
    return linear(p, "top", (x @ x.swapaxes(1, 2)).reshape(x.shape[0], -1))


def _inception() -> Model:
    parts = [_conv_branch(32, *kernels) for kernels in ((1,), (1, 3), (1, 5), (3, 3))]
    return Model("inception block", parts, Head(128, 10), _head, (randn(1, 32, 28, 28),))


def _wired() -> Model:
    return Model(
        "randomly wired", [Wired(64, 16, 1).part()], Head(64, 10), _head, (randn(1, 64, 14, 14),)
    )


def _towers() -> Model:
    parts = [Recurrent(128).part() for _ in range(2)]
    return Model("two GRU towers", parts, *_both(_side_by_side), (randn(32, 32, 128),))


def _clip() -> Model:
    image, text = Tower(nn.Linear(192, 192), 192, 2), Tower(nn.Embedding(1000, 128), 128, 2)
    args = (randn(4, 49, 192), torch.randint(0, 1000, (4, 32)))
    return Model("CLIP", [image.part(0), text.part(1)], *_both(_similar), args)


def _bi_gru() -> Model:
    parts = [Recurrent(128, reverse=r, last=False).part() for r in (False, True)]
    return Model("bi-GRU", parts, *_both(_side_by_side), (randn(64, 16, 128),))


def _experts_model() -> Model:
    parts = [Part(Expert(256, 512), _expert) for _ in range(8)]
    return Model("mixture of 8 experts", parts, Experts(256, 8), _experts, (randn(256, 256),))


def _cache(batch: int, tokens: int, d: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(batch, tokens, heads, d // heads), randn(batch, tokens, heads, d // heads)


def _prefill() -> Model:
    part = Block(256, 8, 688, causal=True).part(0)
    return Model("LLM prefill", [part], *_both(_one), (randn(2, 128, 256),), rows=(0,))


def _decode() -> Model:
    part = Block(256, 8, 688, causal=True).part(0, 1, 2)
    args = (randn(8, 1, 256), *_cache(8, 256, 256, 8))
    return Model("LLM decode", [part], *_both(_one), args, rows=(0, 1, 2))


def _prefill_and_decode() -> Model:
    block = Block(256, 8, 688, causal=True)
    args = (randn(1, 128, 256), randn(8, 1, 256), *_cache(8, 256, 256, 8))
    return Model(
        "LLM prefill and decode", [block.part(0), block.part(1, 2, 3)], *_both(_flat), args
    )


def _guidance() -> Model:
    net = Denoiser(192, 2)
    args = (randn(1, 64, 192), randn(1, 16, 192), torch.zeros(1, 16, 192))
    return Model("diffusion with guidance", [net.part(0, 1), net.part(0, 2)], *_both(_guided), args)


def _ensemble() -> Model:
    parts = [_mlp(256, 512, 512, 16) for _ in range(4)]
    return Model("ensemble of 4", parts, *_both(_mean), (randn(64, 256),))


def _recommender() -> Model:
    dense = _mlp(16, 128, 64, 32)
    tables = [Table(20000, 32).part(i + 1) for i in range(6)]
    ids = [torch.randint(0, 20000, (128, 16)) for _ in range(6)]
    args = (randn(128, 16), *ids)
    return Model("recommender", [dense, *tables], Interaction(7), _interaction, args)


def _sorts() -> Model:
    parts = [Sorted(512).part() for _ in range(2)]
    return Model("two sorted projections", parts, *_both(_side_by_side), (randn(512, 512),))


def _spectra() -> Model:
    matrices = [randn(160, 160) for _ in range(2)]
    args = tuple(a @ a.T / 160 + torch.eye(160) for a in matrices)
    parts = [Part(Spectrum(), _spectrum, (i,)) for i in range(2)]
    return Model("two spectra", parts, *_both(_side_by_side), args, lapack=True)


def _train() -> Model:
    args = (randn(128, 256), randn(128, 256))
    return Model("training step", [Step(256, 4).part(0, 1)], *_both(_one), args)


def _train_members() -> Model:
    args = (randn(128, 128), randn(128, 128))
    parts = [Step(128, 4).part(0, 1) for _ in range(4)]
    return Model("training step of 4 members", parts, *_both(_flat), args)


CASES: dict[str, Callable[[], Model]] = {
    "inception": _inception, "wired": _wired, "towers": _towers, "clip": _clip, "bi-gru": _bi_gru,
    "experts": _experts_model, "prefill": _prefill, "decode": _decode,
    "prefill-decode": _prefill_and_decode, "guidance": _guidance, "ensemble": _ensemble,
    "recommender": _recommender, "sorts": _sorts, "spectra": _spectra, "train": _train,
    "train-members": _train_members,
}  # fmt: skip
"""By their names on the command line."""


def make(name: str) -> Model:
    """The model of a case; the same numbers each time."""
    torch.manual_seed(0)
    return CASES[name]()
