"""What runs once when models that mix rows are split, and why; values and gradients against the original.

    python -P benchmarks/studies/joins.py [--only WORD] [--frameworks torch,jax]

prints for each model, split in two and in three uneven parts: equal or not, and each join with its reason.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import dynaflow_xla as dfx

ROWS = 12
SPLITS: tuple[Any, ...] = (2, [5, 4, 3])


@dataclass
class Shown:
    """What came of a model split in one way."""

    name: str
    split: Any
    outcome: str
    joined: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.name}, {self.split}: {self.outcome}"]
        return "\n".join([*lines, *(f"    {one}" for one in (*self.joined, *self.notes))])


def joined_in(text: str) -> list[str]:
    """Lines of ``explain`` that name a join or what is completed, equal ones counted."""
    found = [
        line.removeprefix("note: ")
        for line in text.splitlines()
        if line.startswith(("note: joined", "note: total", "note: completed"))
    ]
    return [f"{n} x {line}" if n > 1 else line for line, n in Counter(found).items()]


# -- PyTorch --------------------------------------------------------------------------------------


def _config(kind: str, **options: Any) -> Any:
    import transformers

    return getattr(transformers, kind)(**options)


def _moe(kind: str, experts: str) -> Any:
    import transformers

    small = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    many = {"MixtralConfig": {"num_local_experts": 4}}.get(
        kind, {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
    )
    config = _config(kind, **small, **many)
    model = getattr(transformers, kind.replace("Config", "ForCausalLM"))(config)
    model.set_experts_implementation(experts)
    return model


def _logits(model: Any, ids: Any) -> Any:
    return model(input_ids=ids, use_cache=False).logits


def torch_models() -> Iterator[tuple[str, Callable[[], tuple[Any, Any, Any, Any]]]]:
    """Names with makers of a module, its arguments, and the axes of arguments and results."""
    import torch
    import transformers
    from torch import nn
    from torch.nn import functional

    class OfIds(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any) -> Any:
            return _logits(self.model, ids)

    def language(kind: str, experts: str) -> Callable[[], Any]:
        return lambda: (OfIds(_moe(kind, experts)), (torch.randint(1, 64, (ROWS, 7)),), 0, 0)

    for kind in ("MixtralConfig", "Qwen3MoeConfig"):
        for experts in ("eager", "batched_mm", "grouped_mm"):
            yield f"{kind.removesuffix('Config')} ({experts})", language(kind, experts)

    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            text = dict(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=16, eos_token_id=2, projection_dim=16,
            )  # fmt: skip
            vision = dict(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                image_size=16, patch_size=8, projection_dim=16,
            )  # fmt: skip
            self.model = transformers.CLIPModel(
                transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
            )

        def forward(self, ids: Any, pixels: Any) -> Any:
            made = self.model(input_ids=ids, pixel_values=pixels)
            return made.logits_per_image, made.logits_per_text, made.text_embeds, made.image_embeds

    yield "CLIP with logits", lambda: (
        Clip(), (torch.randint(3, 64, (ROWS, 9)), torch.randn(ROWS, 3, 16, 16)), 0, 0,
    )  # fmt: skip

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.ResNetConfig(
                num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic",
                num_labels=5,
            )  # fmt: skip
            self.model = transformers.ResNetForImageClassification(config)

        def forward(self, pixels: Any) -> Any:
            return self.model(pixels).logits

    yield "ResNet, batch norm in training", lambda: (
        Residual(), (torch.randn(ROWS, 3, 32, 32),), 0, 0,
    )  # fmt: skip

    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6))
            self.right = nn.Linear(5, 6)

        def forward(self, a: Any, b: Any) -> Any:
            left = functional.normalize(self.left(a), dim=-1)
            logits = left @ functional.normalize(self.right(b), dim=-1).t() / 0.1
            each = torch.arange(a.shape[0])
            return (
                functional.cross_entropy(logits, each) + functional.cross_entropy(logits.t(), each)
            ) / 2

    yield "contrastive loss", lambda: (
        Contrastive(), (torch.randn(ROWS, 8), torch.randn(ROWS, 5)), 0, None,
    )  # fmt: skip


def show_torch(name: str, made: Any, split: Any) -> Shown:
    """One PyTorch model in training: results, gradients, buffers."""
    import torch

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, args, in_axes, out_axes = made()
    model = model.train().float()
    other = copy.deepcopy(model)
    fast = dfx.schedule(
        other, dfx.NanoBatch(split), in_axes=in_axes, out_axes=out_axes, backend="torch"
    )
    worst = 0.0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        text = dfx.explain(fast, *args)  # from here on calls run what it says
        for module, run in ((model, model), (other, fast)):
            torch.manual_seed(1)
            found = run(*args)
            leaves = found if isinstance(found, tuple) else (found,)
            torch.manual_seed(2)
            sum((x * torch.randn_like(x)).sum() for x in leaves).backward()
            module.found = [x.detach() for x in leaves]
        pairs = [*zip(model.found, other.found, strict=True)]
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            if p.grad is not None or q.grad is not None:
                pairs.append((torch.zeros_like(p) if p.grad is None else p.grad,
                              torch.zeros_like(q) if q.grad is None else q.grad))  # fmt: skip
        pairs += zip(model.buffers(), other.buffers(), strict=True)
        for want, got in pairs:
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-4)
            if want.numel() and want.is_floating_point():
                worst = max(worst, float((want - got).abs().max()))
    notes = sorted(
        {str(w.message)[:300] for w in told if issubclass(w.category, dfx.FallbackWarning)}
    )
    outcome = f"equal, gradients too (largest difference {worst:.1e})"
    split_into = text.count("split into nano-batches")
    return Shown(name, split, f"{outcome}; {split_into} graphs split", joined_in(text), notes)


# -- JAX ------------------------------------------------------------------------------------------


def jax_models() -> Iterator[tuple[str, Callable[[], tuple[Any, Any]]]]:
    """Names with makers of a function of weights and rows, and these."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    experts, top, width, capacity = 4, 2, 8, 10
    keys = jax.random.split(jax.random.key(0), 6)
    w = {
        "router": jax.random.normal(keys[0], (width, experts)),
        "up": jax.random.normal(keys[1], (experts, width, 16)) / 3,
        "down": jax.random.normal(keys[2], (experts, 16, width)) / 4,
    }
    x = jax.random.normal(keys[3], (ROWS, width))

    def route(w: Any, x: Any) -> tuple[Any, Any]:
        return lax.top_k(jax.nn.softmax(x @ w["router"]), top)

    def sorted_by(counted: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def moe(w: Any, x: Any) -> Any:
            share, chosen = route(w, x)
            flat = chosen.reshape(-1)
            order = jnp.argsort(flat)
            sizes = counted(flat)
            y = lax.ragged_dot(x[order // top], w["up"], sizes)
            y = lax.ragged_dot(jax.nn.silu(y), w["down"], sizes)
            y = y * share.reshape(-1)[order][:, None]
            return x + jnp.zeros_like(x).at[order // top].add(y)

        return moe

    def sums(chosen: Any) -> Any:
        return jax.nn.one_hot(chosen, experts, dtype=jnp.int32).sum(0)

    def searched(chosen: Any) -> Any:
        ends = jnp.searchsorted(jnp.sort(chosen), jnp.arange(experts), side="right")
        return jnp.diff(ends, prepend=0)

    ways = {
        "bincount": lambda e: jnp.bincount(e, length=experts),
        "one_hot().sum": sums,
        "at[].add(1)": lambda e: jnp.zeros(experts, jnp.int32).at[e].add(1),
        "searchsorted": searched,
    }
    for name, counted in ways.items():
        yield (
            f"sorted ragged_dot MoE, sizes from {name}",
            lambda counted=counted: (sorted_by(counted), (w, x)),
        )

    def one_hot(w: Any, x: Any) -> Any:
        share, chosen = route(w, x)
        gate = (jax.nn.one_hot(chosen, experts) * share[..., None]).sum(1)
        h = jax.nn.silu(jnp.einsum("bd,edf->bef", x, w["up"]))
        return x + jnp.einsum("bef,efd,be->bd", h, w["down"], gate)

    yield "one-hot MoE, every expert", lambda: (one_hot, (w, x))

    def with_capacity(w: Any, x: Any) -> Any:
        share, chosen = route(w, x)
        hot = jax.nn.one_hot(chosen.reshape(-1), experts)
        place = ((jnp.cumsum(hot, 0) - hot) * hot).sum(-1)
        slot = jax.nn.one_hot(place.astype(jnp.int32), capacity)  # none beyond the capacity
        dispatch = hot[:, :, None] * slot[:, None, :]
        rows = jnp.repeat(x, top, 0)
        # One contraction at a time: of three operands einsum chooses the order by the batch's size.
        sent = jnp.einsum("nec,nd->ecd", dispatch, rows)
        h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", sent, w["up"]))
        y = jnp.einsum("nec,ecd->nd", dispatch, jnp.einsum("ecf,efd->ecd", h, w["down"]))
        return x + (y * share.reshape(-1)[:, None]).reshape(-1, top, width).sum(1)

    yield "one-hot MoE with capacity", lambda: (with_capacity, (w, x))

    def contrastive(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w["router"])
        return jnp.diagonal(jax.nn.log_softmax(h @ h.T, axis=1)).mean()[None]

    yield "contrastive loss", lambda: (contrastive, (w, x))


def show_jax(name: str, made: Any, split: Any) -> Shown:
    """One JAX function: results and gradients."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    fn, (w, x) = made()
    out_axes = None if "loss" in name else 0
    fast = dfx.schedule(fn, dfx.NanoBatch(split), in_axes=(None, 0), out_axes=out_axes)

    def loss(f: Any) -> Any:
        def total(w: Any, x: Any) -> Any:
            y = f(w, x)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

        return jax.grad(total, (0, 1))

    pairs = [(fn(w, x), fast(w, x))]
    pairs += zip(jax.tree.leaves(loss(fn)(w, x)), jax.tree.leaves(loss(fast)(w, x)), strict=True)
    worst = 0.0
    for want, got in pairs:
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
        worst = max(worst, float(jnp.abs(want - got).max()))
    text = dfx.explain(fast, w, x)
    return Shown(
        name, split, f"equal, gradients too (largest difference {worst:.1e})", joined_in(text)
    )


def run(frameworks: list[str], only: str) -> Iterator[Shown]:
    """All that was asked for, one after another."""
    for framework in frameworks:
        models, show = (
            (torch_models(), show_torch) if framework == "torch" else (jax_models(), show_jax)
        )
        for name, made in models:
            if only.lower() not in name.lower():
                continue
            for split in SPLITS:
                try:
                    shown = show(name, made, split)
                except dfx.DynaflowError as error:
                    first = (str(error).splitlines() or [""])[0]
                    shown = Shown(name, split, f"refused: {type(error).__name__}: {first}"[:400])
                except AssertionError as error:
                    shown = Shown(name, split, f"WRONG: {' '.join(str(error).split())[:300]}")
                shown.name = f"{framework}: {shown.name}"
                yield shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the model's name")
    parser.add_argument("--frameworks", default="torch,jax")
    options = parser.parse_args()
    bad = 0
    for shown in run(options.frameworks.split(","), options.only):
        print(shown, flush=True)
        bad += not shown.outcome.startswith("equal")
    print(f"{bad} not equal" if bad else "all equal")
    return bad


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(bool(code))
