"""Training steps and loops, read back from programs compiled for a GPU."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

LAYERS, ROWS, WIDTH = 4, 1024, 512
OPTIMIZER = optax.adamw(1e-3)


def spec(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(params: Any, x: Any, y: Any) -> Any:
    for w in params:
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    return jnp.mean((x - y) ** 2)


def step(params: Any, state: Any, x: Any, y: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(params, x, y)
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


PARAMS = [{"up": spec(WIDTH, 4 * WIDTH), "down": spec(4 * WIDTH, WIDTH)} for _ in range(LAYERS)]
ARGUMENTS = (
    PARAMS,
    jax.eval_shape(OPTIMIZER.init, PARAMS),
    spec(ROWS, WIDTH),
    spec(ROWS, WIDTH),
)


def test_training_step() -> None:
    """One CUDA graph; an update waits for its gradient and nothing of an earlier layer for it."""
    fast = dfx.schedule(jax.jit(step, donate_argnums=(0, 1)), dfx.Branches(), target="nvidia-h200")
    report = dfx.compile(fast, *ARGUMENTS)
    order = report.order
    assert not order.broken and not order.extra and not order.partly and not order.merged
    assert not order.conflicts
    assert len(report.scheduled.command_buffers) == 1 and not report.scheduled.uncaptured
    assert report.scheduled.kernels == report.original.kernels
    assert report.copied_bytes_added < 1024
    made = fast.planned(ARGUMENTS, {})
    names = {region.id: region.name for region in made.pg.regions}
    producer = made.pg.producer_region()
    updates = {
        names[producer[out]] for out in made.captured.outputs[: 2 * LAYERS] if out in producer
    }
    assert len(updates) == 2 * LAYERS
    products = {
        region.name
        for region in made.pg.regions
        if any(made.pg.graph.ops[i].kind == "dot_general" for i in region.ops)
    }
    beside = [pair for pair in order.parallel if updates & {*pair} and products & {*pair}]
    assert len(beside) >= LAYERS, "no update runs beside a product of the backward pass"


def layer(x: Any, w: Any) -> Any:
    with dfx.mark("left"):
        a = jnp.tanh(x @ w["a"]) @ w["b"]
    with dfx.mark("right"):
        b = jnp.tanh(x @ w["c"]) @ w["d"]
    with dfx.mark("join"):
        return x + a * b, None


def scanned(ws: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, ws)[0]


# At larger sizes XLA may let the two branches share memory, which orders them.
WEIGHTS = {name: spec(8, 256, 256) for name in "abcd"}
TOKENS = spec(512, 256)


def test_the_body_of_a_loop_is_scheduled() -> None:
    fast = dfx.schedule(scanned, dfx.Branches(), target="nvidia-h200")
    report = dfx.compile(fast, WEIGHTS, TOKENS)
    (body,) = report.bodies
    assert set(body.order.held) == {("left", "join"), ("right", "join")}
    assert set(body.order.parallel) == {("left", "right")}
    assert not body.order.conflicts and not body.order.extra and not body.order.partly
    assert report.scheduled.kernels == report.original.kernels
    assert report.copied_bytes_added == 0


class OneLane(dfx.Strategy):
    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            s.execute(ready[0], lane=0)


def test_gates_order_the_body_of_a_loop() -> None:
    fast = dfx.schedule(scanned, OneLane(), target="nvidia-h200")
    (body,) = dfx.compile(fast, WEIGHTS, TOKENS).bodies
    assert ("left", "right") in body.order.held
    assert not body.order.broken and not body.order.parallel


def test_loops_of_a_training_step() -> None:
    """Forward and backward loop: both bodies have plans, and nothing of these is broken."""
    f = jax.value_and_grad(lambda ws, x: jnp.mean(scanned(ws, x) ** 2))
    report = dfx.compile(dfx.schedule(f, dfx.Branches(), target="nvidia-h200"), WEIGHTS, TOKENS)
    assert len(report.bodies) == 2
    for order in (report.order, *(body.order for body in report.bodies)):
        assert not order.broken and not order.extra and not order.conflicts
    assert "body of the loop" in str(report)
