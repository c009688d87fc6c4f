"""Programs of the stand-in's tests: functions of one matrix with marked regions, and strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dynaflow_xla as dfx

# Streams: as many as asked for, however few cores the machine has.
LANES = dfx.Lanes(2)
BACKENDS = ("xla", "ffi")


class OneLane(dfx.Strategy):
    """Every region on lane 0: a chain."""

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            s.execute(ready[0], lane=0)


def two_branches(x: Any) -> Any:
    with dfx.mark("left"):
        a = jnp.tanh(x @ x) + 1
    with dfx.mark("right"):
        b = jax.nn.softmax(x, axis=1) * 2  # XLA would merge two products of one operand
    with dfx.mark("join"):
        return a @ b, (a * b).sum()


def two_products(x: Any) -> Any:
    with dfx.mark("left"):
        a = jnp.tanh(x @ x) + 1
    with dfx.mark("right"):
        b = jnp.sin(x @ x.T) * 2
    with dfx.mark("join"):
        return jnp.cumsum(a @ b, 0), a.sum()


def four_branches(x: Any) -> Any:
    parts = []
    for i in range(4):
        with dfx.mark(f"b{i}"):
            parts.append(jax.nn.softmax(x @ x * (i + 1)) @ x)
    with dfx.mark("sum"):
        return sum(parts)


def rows(x: Any) -> Any:
    """Separable in rows."""
    with dfx.mark("up"):
        h = jax.nn.gelu(x * 3 + 1)
    with dfx.mark("down"):
        return jnp.cumsum(h, axis=1) * 0.1


def _loss(w: Any, x: Any) -> Any:
    with dfx.mark("tower_a"):
        a = jnp.tanh(x @ w["a"])
    with dfx.mark("tower_b"):
        b = jnp.sin(x @ w["b"])
    with dfx.mark("loss"):
        return ((a - b) ** 2).mean()


def training_step(x: Any) -> Any:
    """Loss, gradients and new weights of two towers."""
    w = {"a": x * 0.1, "b": x.T * 0.2}
    loss, grads = jax.value_and_grad(_loss)(w, x)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)


def loop(x: Any) -> Any:
    """Branches in the body of a scan."""

    def body(c: Any, _: Any) -> tuple[Any, Any]:
        with dfx.mark("left"):
            a = jnp.tanh(c @ x)
        with dfx.mark("right"):
            b = jnp.cos(c.T @ x)
        return (a + b) * 0.5, a.sum()

    return jax.lax.scan(body, x, None, length=3)


@dataclass(frozen=True)
class Case:
    """A function, a strategy, and pairs of regions that the plan orders or leaves free."""

    fn: Callable[..., Any]
    strategy: Callable[[], Any]
    before: tuple[tuple[str, str], ...] = ()
    free: tuple[tuple[str, str], ...] = ()
    in_axes: Any = None
    backends: tuple[str, ...] = BACKENDS
    why: str = ""


CASES = {
    "branches": Case(
        two_branches, dfx.Branches, (("left", "join"), ("right", "join")), (("left", "right"),)
    ),
    "four": Case(four_branches, dfx.Branches, tuple((f"b{i}", "sum") for i in range(4))),
    "chain": Case(
        two_products,
        OneLane,
        (("left", "right"), ("right", "join")),
        backends=("xla",),
        why="regions of one lane are one executable, and XLA orders its kernels",
    ),
    "nano_batches": Case(rows, lambda: dfx.NanoBatch(2), (("up", "down"),), (("up", "up"),), 0),
    "training_step": Case(training_step, dfx.Branches),
}


def matrix(seed: int, n: int = 32) -> Any:
    """A small matrix, on the host."""
    return (np.random.default_rng(seed).standard_normal((n, n)) * 0.3).astype(np.float32)


def scheduled(case: Case, backend: str) -> Any:
    """The function under its strategy."""
    more = {} if case.in_axes is None else {"in_axes": case.in_axes}
    return dfx.schedule(case.fn, strategy=case.strategy(), backend=backend, lanes=LANES, **more)


def wanted(fn: Callable[..., Any], *args: Any) -> Any:
    """The unscheduled original, on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(fn)(*args)


def assert_close(want: Any, got: Any) -> None:
    """Equal but for rounding."""
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=2e-4, atol=2e-4)
