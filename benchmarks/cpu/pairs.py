"""One model in JAX and in PyTorch with the same weights, unscheduled and scheduled, side by side.

Before anything is timed the two frameworks' results are compared, and each schedule with its original.
Variants, interleaved in one process:

``jax``, ``jax_one_thread``   ``jax.jit`` on the default client, and on one with a pool of one thread
``jax_sequential``, ``jax_branches``, ``jax_nano``, ``jax_auto``   schedules of the jitted function
``torch_1``, ``torch_2``      plain PyTorch with one and two intra-op threads, without gradients
``torch_sequential``, ``torch_branches``, ``torch_nano``           schedules by hand
``torch_auto_1``, ``torch_auto_2``             ``strategy="auto"`` under the caller's one and two threads

A schedule's ratio is its median over the better plain run *of its framework*; Auto's under so many
threads over the plain run with as many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from common import measure
from models import pair_models, sentences
from torch import nn

import dynaflow_xla as dfx

TOLERANCE = 2e-4
"""Allowed difference between the frameworks, relative to the largest element of the result."""
REST_MS = 20.0
"""Rest before each sample: OpenMP's workers of the variant before spin for some milliseconds."""

BASELINES: dict[str, tuple[str, ...]] = {
    "jax_sequential": ("jax", "jax_one_thread"), "torch_sequential": ("torch_1", "torch_2"),
    "jax_branches": ("jax", "jax_one_thread"), "jax_nano": ("jax", "jax_one_thread"),
    "jax_auto": ("jax", "jax_one_thread"), "torch_branches": ("torch_1", "torch_2"),
    "torch_nano": ("torch_1", "torch_2"), "torch_auto_1": ("torch_1",),
    "torch_auto_2": ("torch_2",),
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A model in both frameworks.

    Attributes:
        module: The PyTorch model.
        args: Its arguments.
        fn: The JAX function, of the weights and the arguments.
        split: Axis of the batch in all arguments and in the result.
        rules: Where to cut the PyTorch model for ``torch_branches``.
        to_jax: Turns a PyTorch argument into the JAX function's.
    """

    module: nn.Module
    args: tuple[Any, ...]
    fn: Callable[..., Any]
    split: int = 0
    rules: list[Any] | None = None
    to_jax: Callable[[Any], Any] = field(default=lambda x: jnp.array(x.numpy()))


@dataclass(frozen=True)
class Pair:
    """One benchmark: its name, shapes in words, and what makes the model."""

    name: str
    note: str
    make: Callable[[], Made]


def _minilm() -> Made:
    module = pair_models.Embedder()
    ids, mask = pair_models.tokenize(sentences.SENTENCES)
    fn = pair_models.minilm(module.encoder.config)
    return Made(module, (ids, mask), fn, to_jax=lambda x: jnp.array(x.numpy(), jnp.int32))


def _llama() -> Made:
    module = pair_models.LlamaBlock(width=256, heads=8, groups=4, inner=704)
    return Made(module, (torch.randn(4, 128, 256),), pair_models.llama(module.config))


def _mixture() -> Made:
    module = pair_models.Mixture(width=256, inner=512, experts=8)
    rules = [dfx.Module("experts/*")]
    return Made(module, (torch.randn(256, 256),), pair_models.mixture(8), rules=rules)


def _resnet() -> Made:
    module = pair_models.ResNet((32, 64))
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):  # as after training
            nn.init.uniform_(child.running_var, 0.5, 2.0)
            nn.init.normal_(child.running_mean, std=0.2)
    return Made(
        module, (torch.randn(8, 3, 32, 32),), pair_models.resnet(module),
        to_jax=lambda x: jnp.array(x.permute(0, 2, 3, 1).contiguous().numpy()),
    )  # fmt: skip


def _bilstm() -> Made:
    return Made(pair_models.BiLstm(128), (torch.randn(64, 32, 128),), pair_models.bilstm, split=1)


CASES: tuple[Pair, ...] = (
    Pair("minilm", f"MiniLM-L6 on {len(sentences.SENTENCES)} sentences, real weights", _minilm),
    Pair("llama_block", "Llama block d256 B4 T128", _llama),
    Pair("moe_block", "MoE block, top 2 of 8 experts d256-512, 256 tokens", _mixture),
    Pair("resnet", "ResNet, 4 basic blocks of 32 and 64 channels, B8 32x32", _resnet),
    Pair("bilstm_pair", "bi-LSTM T64 B32 d128 with a dense layer", _bilstm),
)


def jax_schedules(made: Made, jitted: Any) -> dict[str, Any]:
    """Name -> scheduled function; ``jitted`` is the original of all of them."""
    axes: dict[str, Any] = {
        "in_axes": (None, *[made.split] * len(made.args)), "out_axes": made.split,
    }  # fmt: skip
    return {
        "jax_sequential": dfx.schedule(jitted, dfx.Sequential()),
        "jax_branches": dfx.schedule(jitted, dfx.Branches()),
        "jax_nano": dfx.schedule(jitted, dfx.NanoBatch(2), **axes),
        "jax_auto": dfx.schedule(jitted, "auto", **axes),
    }


def torch_schedules(made: Made) -> dict[str, Any]:
    """Name -> scheduled module or function."""
    auto = {n: dfx.schedule(made.module, "auto", rules=made.rules) for n in (1, 2)}
    return {
        "torch_sequential": dfx.schedule(made.module, dfx.Sequential(), rules=made.rules),
        "torch_branches": dfx.schedule(made.module, dfx.Branches(), rules=made.rules),
        "torch_nano": dfx.schedule(
            made.module, dfx.NanoBatch(2), in_axes=made.split, out_axes=made.split
        ),
        "torch_auto_1": auto[1],
        "torch_auto_2": auto[2],
    }


def difference(want: Any, got: Any) -> float:
    """Largest difference of two arrays, relative to the largest element of the first."""
    want, got = np.asarray(want), np.asarray(got)
    return float(np.abs(want - got).max() / np.abs(want).max())


def without_gradients(fn: Callable[..., Any], args: tuple[Any, ...]) -> measure.Run:
    def run() -> Any:
        with torch.no_grad():
            return fn(*args)

    return run


def measure_case(case: Pair, rounds: int, tick: Any) -> dict[str, Any]:
    """Verifies and times one pair; returns its part of the result file.

    Raises:
        ValueError: the two frameworks' results differ by more than ``TOLERANCE``.
    """
    torch.manual_seed(0)
    made = case.make()
    made.module.eval()
    args = (pair_models.weights(made.module), *map(made.to_jax, made.args))
    want = without_gradients(made.module, made.args)()
    between = difference(want, jax.jit(made.fn)(*args))
    if not between <= TOLERANCE:
        raise ValueError(f"JAX and PyTorch differ by {between:.1e} of the largest element")
    jitted = jax.jit(made.fn)
    in_jax, in_torch = jax_schedules(made, jitted), torch_schedules(made)
    runs = {
        "jax": measure.blocking(jitted, args),
        "jax_one_thread": measure.one_thread(made.fn, args),
        **{name: measure.blocking(fn, args) for name, fn in in_jax.items()},
        **{name: without_gradients(made.module, made.args) for name in ("torch_1", "torch_2")},
        **{name: without_gradients(fn, made.args) for name, fn in in_torch.items()},
    }
    contexts = {
        name: partial(measure.torch_threads, 1 if name.endswith("_1") else 2)
        for name in runs
        if name.startswith("torch")
    }
    first_call_ms = measure.first_calls(runs, contexts)
    checks = {name: difference(jax.jit(made.fn)(*args), fn(*args)) for name, fn in in_jax.items()}
    for name, fn in in_torch.items():
        with contexts[name]():
            checks[name] = difference(want, without_gradients(fn, made.args)())
    if not max(checks.values()) <= TOLERANCE:
        raise ValueError(f"a schedule differs from its original: {checks}")
    timed = measure.timed(
        runs, {name: BASELINES[name] for name in checks}, rounds,
        contexts=contexts, rest_ms=REST_MS, **measure.STEADY, tick=tick,
    )  # fmt: skip
    return {
        "difference_between_frameworks": between,
        "verify": checks,
        "first_call_ms": first_call_ms,
        "auto": {
            "jax": _choice(in_jax["jax_auto"].decision(args, {})),
            **{name: _torch_choice(fn, made.args, contexts[name]) for name, fn in in_torch.items()
               if "auto" in name},
        },
        **timed,
    }  # fmt: skip


def _torch_choice(
    fast: Any, args: tuple[Any, ...], context: Callable[[], Any]
) -> Mapping[str, Any]:
    with context(), torch.no_grad():
        return _choice(fast._dfx_core.decision(args, {}))


def _choice(choice: Any) -> dict[str, Any]:
    """What Auto runs, and why."""
    if choice is None:
        return {"choice": "original", "reason": "", "medians_ms": {}}
    return {"choice": choice.name, "reason": choice.reason, "medians_ms": choice.medians_ms}
