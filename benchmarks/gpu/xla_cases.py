"""The functions of the report on ``backend="xla"``: shapes, strategy, and what is donated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax.xla import collectives

TARGET = "nvidia-h200"
AXIS, DEVICES = "devices", 8
# Nobody has 8 devices here.
ABSTRACT_MESH = jax.sharding.AbstractMesh(
    (DEVICES,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
)


@dataclass(frozen=True)
class Case:
    """A function to compile; ``arguments`` are shapes.

    Attributes:
        around: Makes the whole function of the scheduled one, which is a part of it.
        specs, out_spec: How arguments and result lie on ``DEVICES`` devices, under shard_map; without,
            the function is for one.
    """

    name: str
    fn: Callable[..., Any]
    arguments: tuple[Any, ...]
    strategy: dfx.Strategy
    donated: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    specs: tuple[Any, ...] | None = None
    out_spec: Any = None
    around: Callable[[Any], Any] | None = None

    def original(self, mesh: Any = None) -> Any:
        """A new jitted function: nothing of it is traced yet."""
        return self._whole(lambda *a: self.fn(*a), mesh)

    def scheduled(self, mesh: Any = None, **more: Any) -> Any:
        """The scheduled function."""
        partly = self.specs is not None or self.around is not None
        fn = (lambda *a: self.fn(*a)) if partly else self.original()
        fast = dfx.schedule(fn, self.strategy, **self.options, **more)
        return self._whole(fast, mesh) if partly else fast

    def on(self, mesh: Any) -> tuple[Any, ...]:
        """The arguments on a mesh."""
        if self.specs is None:
            return self.arguments

        def place(part: Any, leaf: Any) -> Any:
            sharding = jax.sharding.NamedSharding(mesh, part)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map(place, self.specs, self.arguments)  # type: ignore[no-any-return]

    def _whole(self, fn: Any, mesh: Any) -> Any:
        if self.around is not None:
            fn = self.around(fn)
        if self.specs is None:
            return jax.jit(fn, donate_argnums=self.donated)
        return jax.jit(
            jax.shard_map(
                fn,
                mesh=ABSTRACT_MESH if mesh is None else mesh,
                in_specs=self.specs,
                out_specs=self.out_spec,
                check_vma=False,
            )
        )


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

ROWS, TOKENS, WIDTH, HEAD = 8, 256, 512, 64
LARGE = 4096  # a width for 8 devices


def attended(x: Any, w: Any) -> Any:
    """What attention adds; with some of the heads in the weights, their share of it."""
    rows, tokens, _ = x.shape
    h = jax.nn.standardize(x, axis=-1)
    q, k, v = (jnp.reshape(h @ w[n], (rows, tokens, -1, HEAD)) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / HEAD**0.5
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return jnp.reshape(mixed, (rows, tokens, -1)) @ w["o"]


def expanded(x: Any, w: Any) -> Any:
    """What the MLP adds; with some of the hidden features in the weights, their share of it."""
    return jax.nn.gelu(jax.nn.standardize(x, axis=-1) @ w["up"]) @ w["down"]


def attention(x: Any, w: Any) -> Any:
    return x + attended(x, w)


def mlp(x: Any, w: Any) -> Any:
    return x + expanded(x, w)


def block(w: Any, x: Any) -> Any:
    with dfx.mark("attention"):
        x = attention(x, w)
    with dfx.mark("mlp"):
        return mlp(x, w)


def parallel_over_devices(w: Any, x: Any) -> Any:
    """The block on one of several devices: heads and hidden features lie on different ones."""
    with dfx.mark("attention"):
        a = attended(x, w)
    a = jax.lax.psum(a, AXIS)
    with dfx.mark("mlp"):
        x = x + a
        m = expanded(x, w)
    m = jax.lax.psum(m, AXIS)
    with dfx.mark("add"):
        return x + m


COLUMNS, LINES = PartitionSpec(None, AXIS), PartitionSpec(AXIS, None)
WEIGHTS_SPREAD = dict.fromkeys(("q", "k", "v", "up"), COLUMNS) | dict.fromkeys(("o", "down"), LINES)


def block_weights(*lead: int, width: int = WIDTH, dtype: Any = jnp.bfloat16) -> Any:
    shapes = {n: (width, width) for n in "qkvo"}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
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


def in_layers(layer: Any) -> Any:
    """A model of equal layers."""
    return lambda ws, x: jax.lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0]


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
    Case(
        "tensor-parallel block, 8 devices, DualBatch",
        parallel_over_devices,
        (block_weights(width=LARGE), spec(2 * ROWS, 4 * TOKENS, LARGE)),
        dfx.DualBatch(),
        options={"in_axes": (None, 0)},
        specs=(WEIGHTS_SPREAD, PartitionSpec()),
        out_spec=PartitionSpec(),
    ),
    Case(
        "tensor-parallel block, 8 devices, DualBatch, collectives in the graph",
        parallel_over_devices,
        (block_weights(width=LARGE), spec(2 * ROWS, 4 * TOKENS, LARGE)),
        dfx.DualBatch(),
        options={"in_axes": (None, 0), "compiler_options": collectives.IN_GRAPH},
        specs=(WEIGHTS_SPREAD, PartitionSpec()),
        out_spec=PartitionSpec(),
    ),
    Case(
        "tensor-parallel block, 8 devices, DualBatch, small",
        parallel_over_devices,
        (block_weights(), TOKENS_IN),
        dfx.DualBatch(),
        options={"in_axes": (None, 0)},
        specs=(WEIGHTS_SPREAD, PartitionSpec()),
        out_spec=PartitionSpec(),
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
    Case(
        "scan over 32 blocks, each in 2 nano-batches",
        block,
        (block_weights(32), TOKENS_IN),
        dfx.NanoBatch(2),
        options={"in_axes": (None, 0)},
        around=in_layers,
    ),
)
