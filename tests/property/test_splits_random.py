"""Random programs, split at random where the proof allows it, give the original's values and gradients."""

from __future__ import annotations

import os
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from batch_programs import BATCH, Program, generate, traced  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.batch.proof import Mean, mergers  # noqa: E402
from dynaflow_xla.frontends.jax.batch import separability  # noqa: E402

SIZES = ((2, 3), (3, 2), (1, 4), (2, 1, 2), (1, 1, 1, 1, 1))
EXAMPLES = int(os.environ.get("DFX_SPLIT_EXAMPLES", "14"))


class Scattered(dfx.Strategy):
    """Random lanes and order; now and then a region of several nano-batches as one batch."""

    def __init__(self, sizes: tuple[int, ...], seed: int) -> None:
        self.sizes, self.seed = sizes, seed

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("*")] if self.seed % 2 and graph.ops else None

    def split(self, ctx: Any) -> Any:
        return dfx.Split.of_sizes(self.sizes)

    def schedule(self, s: Any) -> None:
        rng = np.random.default_rng(self.seed)
        while ready := s.ready():
            s.execute(ready[rng.integers(len(ready))], lane=int(rng.integers(s.lanes)))

    def __repr__(self) -> str:
        return f"Scattered({self.sizes}, {self.seed})"


def merges(program: Program, sizes: tuple[int, ...], rng: np.random.Generator) -> list[Any] | None:
    """One of the merges that the proof allows for each output; None if there is none."""
    whole, consts = traced(program, BATCH)
    try:
        parts = {n: traced(program, n) for n in dict.fromkeys(sizes)}
    except (TypeError, ValueError):  # a slice of two rows does not fit a nano-batch of one
        return None
    proof = separability.prove(
        whole, {n: c for n, (c, _) in parts.items()}, batch=BATCH, in_axes=program.axes,
        out_axes=[None] * len(program.outputs), consts=[consts, *(c for _, c in parts.values())],
    )  # fmt: skip
    found = []
    for number, output in enumerate(proof.outputs):
        allowed = list(mergers(output.state))
        out, is_value = whole.outputs[number], whole.output_is_value[number]
        inexact = is_value and jnp.issubdtype(whole.avals[out].dtype, jnp.inexact)
        allowed = [m for m in allowed if inexact or not isinstance(m, Mean)]
        if not allowed:
            return None
        found.append(allowed[rng.integers(len(allowed))])
    return found


def close(want: Any, got: Any) -> None:
    for w, g in zip(want, got, strict=True):
        a, b = np.asarray(w), np.asarray(g)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if not np.isfinite(a).all():
            continue
        scale = max(1.0, float(np.max(np.abs(a), initial=0.0)))
        np.testing.assert_allclose(b, a, rtol=1e-7, atol=1e-7 * scale)


def loss(f: Any) -> Any:
    return lambda *a: sum(
        jnp.sum(x * jnp.cos(jnp.arange(x.size).reshape(x.shape) + n)) for n, x in enumerate(f(*a))
    )


@pytest.fixture(autouse=True)
def exact() -> Any:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.timeout(600)
def test_splits_equal_the_original(lanes: int = min(2, os.cpu_count() or 1)) -> None:
    split = tried = 0
    rng = np.random.default_rng(20)
    while split < EXAMPLES:
        tried += 1
        program = generate(rng)
        sizes = SIZES[tried % len(SIZES)]
        out_axes = merges(program, sizes, rng)
        if out_axes is None:
            continue
        split += 1
        fast = dfx.schedule(
            lambda *a, p=program: p(*a), Scattered(sizes, tried), in_axes=tuple(program.axes),
            out_axes=out_axes, lanes=lanes,
        )  # fmt: skip
        args = [jnp.asarray(rng.normal(size=s)) for s in program.shapes(BATCH)]
        close(fast.original(*args), fast(*args))
        if split % 3 == 0 and not any(name in _NO_REVERSE for name, _, _ in program.steps):
            wrt = tuple(range(len(args)))
            want = jax.jit(jax.grad(loss(fast.original), wrt))(*args)
            close(want, jax.jit(jax.grad(loss(fast), wrt))(*args))
    assert tried < 20 * EXAMPLES


# JAX has no reverse mode for while.
_NO_REVERSE = {"while", "vmap_while"}
