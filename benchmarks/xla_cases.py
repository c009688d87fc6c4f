"""The functions of the report on ``backend="xla"``: shapes, strategy, and what is donated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

import dynaflow_xla as dfx

TARGET = "nvidia-h200"


@dataclass(frozen=True)
class Case:
    """A function to compile; ``arguments`` are shapes."""

    name: str
    fn: Callable[..., Any]
    arguments: tuple[Any, ...]
    strategy: dfx.Strategy
    donated: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def original(self) -> Any:
        """A new jitted function: nothing of it is traced yet."""
        return jax.jit(lambda *a: self.fn(*a), donate_argnums=self.donated)

    def scheduled(self, **more: Any) -> Any:
        """The scheduled function."""
        return dfx.schedule(self.original(), self.strategy, **self.options, **more)


def spec(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


# -- two branches ----------------------------------------------------------------------------------


def branch(x: Any, w: Any) -> Any:
    h = jnp.tanh(x @ w) * 2 + 1
    h = h - h.mean(axis=-1, keepdims=True)
    return jnp.tanh(h @ w)


def two_branches(x: Any, y: Any, v: Any, w: Any) -> Any:
    with dfx.mark("left"):
        a = branch(x, v)
    with dfx.mark("right"):
        b = branch(y, w)
    with dfx.mark("join"):
        return a + b


# -- transformer block -----------------------------------------------------------------------------

ROWS, TOKENS, WIDTH, HEADS = 8, 256, 512, 8


def attention(x: Any, w: Any) -> Any:
    rows, tokens, width = x.shape
    h = jax.nn.standardize(x, axis=-1)
    q, k, v = (jnp.reshape(h @ w[n], (rows, tokens, HEADS, width // HEADS)) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (width // HEADS) ** 0.5
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return x + jnp.reshape(mixed, x.shape) @ w["o"]


def mlp(x: Any, w: Any) -> Any:
    return x + jax.nn.gelu(jax.nn.standardize(x, axis=-1) @ w["up"]) @ w["down"]


def block(w: Any, x: Any) -> Any:
    with dfx.mark("attention"):
        x = attention(x, w)
    with dfx.mark("mlp"):
        return mlp(x, w)


def block_weights(*lead: int, dtype: Any = jnp.bfloat16) -> Any:
    shapes = {n: (WIDTH, WIDTH) for n in "qkvo"}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {n: spec(*lead, *shape, dtype=dtype) for n, shape in shapes.items()}


# -- mixture of experts ----------------------------------------------------------------------------

EXPERTS = 4


def experts(w: Any, x: Any) -> Any:
    """Each token to the expert that its router likes best; every expert sees all tokens, masked."""
    with dfx.mark("router"):
        best = jax.nn.softmax(x @ w["router"])
        gates = best * (best == best.max(axis=-1, keepdims=True))
    outs = []
    for number in range(EXPERTS):
        with dfx.mark(f"expert_{number}"):
            h = jax.nn.gelu(x @ w["up"][number])
            outs.append((h @ w["down"][number]) * gates[:, number, None])
    with dfx.mark("combine"):
        return x + sum(outs)


EXPERT_WEIGHTS = {
    "router": spec(WIDTH, EXPERTS),
    "up": [spec(WIDTH, 4 * WIDTH)] * EXPERTS,
    "down": [spec(4 * WIDTH, WIDTH)] * EXPERTS,
}


# -- training --------------------------------------------------------------------------------------

LAYERS = 4
OPTIMIZER = optax.adamw(1e-3)


def loss(params: Any, x: Any, y: Any) -> Any:
    for w in params:
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    return jnp.mean((x - y) ** 2)


def step(params: Any, state: Any, x: Any, y: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(params, x, y)
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


PARAMS = [
    {
        "up": spec(WIDTH, 4 * WIDTH, dtype=jnp.float32),
        "down": spec(4 * WIDTH, WIDTH, dtype=jnp.float32),
    }
    for _ in range(LAYERS)
]
BATCH = spec(1024, WIDTH, dtype=jnp.float32)


# -- loops -----------------------------------------------------------------------------------------


def parallel_block(w: Any, x: Any) -> Any:
    """Attention and MLP of the same input, side by side."""
    with dfx.mark("attention"):
        a = attention(x, w)
    with dfx.mark("mlp"):
        m = mlp(x, w)
    return a + m - x


def scanned(ws: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, w: (parallel_block(w, h), None), x, ws)[0]


def scanned_gradient(ws: Any, x: Any) -> Any:
    return jax.value_and_grad(lambda ws: jnp.mean(scanned(ws, x).astype(jnp.float32) ** 2))(ws)


SQUARE = spec(512, 512)
TOKENS_IN = spec(ROWS, TOKENS, WIDTH)
CASES = (
    Case("two branches", two_branches, (SQUARE,) * 4, dfx.Branches()),
    Case(
        "transformer block, 2 nano-batches",
        block,
        (block_weights(), TOKENS_IN),
        dfx.NanoBatch(2),
        options={"in_axes": (None, 0)},
    ),
    Case("mixture of 4 experts", experts, (EXPERT_WEIGHTS, spec(2048, WIDTH)), dfx.Branches()),
    Case(
        "training step, 4 layers, AdamW",
        step,
        (PARAMS, jax.eval_shape(OPTIMIZER.init, PARAMS), BATCH, BATCH),
        dfx.Branches(),
        donated=(0, 1),
    ),
    Case("scan over 32 blocks", scanned, (block_weights(32), TOKENS_IN), dfx.Branches()),
    Case(
        "scan over 32 blocks, gradient",
        scanned_gradient,
        (block_weights(32), TOKENS_IN),
        dfx.Branches(),
    ),
)
