"""A whole training step, value_and_grad and an optax optimizer, as one scheduled program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

optax = pytest.importorskip("optax")

import dynaflow_xla as dfx  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.fixture(autouse=True)
def quick_to_compile() -> Any:
    """Values are what is tested, not the compiler's optimisations, which take most of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


LAYERS, ROWS, WIDTH = 3, 16, 8


def loss(params: Any, x: Any, y: Any) -> Any:
    for number, w in enumerate(params):
        with jax.named_scope(f"layer_{number}"):
            x = x + jax.nn.gelu(x @ w["up"]) @ w["down"] + w["bias"]
    return jnp.mean((x - y) ** 2)


def scanned_loss(params: Any, x: Any, y: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return h + jax.nn.gelu(h @ w["up"]) @ w["down"] + w["bias"], None

    return jnp.mean((jax.lax.scan(layer, x, params)[0] - y) ** 2)


def make_step(optimizer: Any, of: Any = loss, **options: Any) -> Any:
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradient = jax.value_and_grad(of)(params, x, y)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, **options)


def arguments(optimizer: Any, *, scanned: bool = False) -> Any:
    draw = np.random.default_rng(0).standard_normal

    def weights(*shape: int) -> Any:
        return jnp.asarray(draw(shape) / 3, jnp.float32)

    lead = (LAYERS,) if scanned else ()
    shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH), "bias": (WIDTH,)}
    made = [
        {k: weights(*lead, *s) for k, s in shapes.items()} for _ in range(1 if scanned else LAYERS)
    ]
    params = made[0] if scanned else made
    return params, optimizer.init(params), weights(ROWS, WIDTH), weights(ROWS, WIDTH)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: optax.adamw(1e-2),
    "sgd_momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "clipped_adam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
}


@pytest.mark.parametrize("backend", ["ffi", "xla"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps(name: str, backend: str, schedule: Any, assert_same: Any) -> None:
    optimizer = OPTIMIZERS[name]()
    step = make_step(optimizer)
    fast = schedule(step, dfx.Branches(), backend=backend)
    params, state, x, y = arguments(optimizer)
    want = got = (params, state)
    for _ in range(3):
        *want, value = step(*want, x, y)
        *got, found = fast(*got, x, y)
        assert_same((want, value), (got, found))


@pytest.mark.parametrize("backend", ["ffi", "xla"])
def test_scanned_layers(backend: str, schedule: Any, assert_same: Any) -> None:
    optimizer = optax.adamw(1e-2)
    step = make_step(optimizer, scanned_loss)
    args = arguments(optimizer, scanned=True)
    assert_same(step(*args), schedule(step, dfx.Branches(), backend=backend)(*args))


@pytest.mark.parametrize("backend", ["ffi", "xla"])
def test_donated(backend: str, schedule: Any, assert_same: Any) -> None:
    optimizer = optax.adamw(1e-2)
    args = arguments(optimizer)
    want = make_step(optimizer)(*args)
    fast = schedule(make_step(optimizer, donate_argnums=(0, 1)), dfx.Branches(), backend=backend)
    copies = jax.tree_util.tree_map(jnp.copy, args)
    assert_same(want, fast(*copies))
    assert all(leaf.is_deleted() for leaf in jax.tree_util.tree_leaves(copies[0]))


def test_nano_batches_inside_the_step(schedule: Any, assert_same: Any) -> None:
    """The split loss differentiated inside the step: gradients of the nano-batches are summed."""
    optimizer = optax.adamw(1e-2)
    args = arguments(optimizer)
    split = schedule(
        loss, dfx.NanoBatch(2), backend="xla", in_axes=(None, 0, 0), out_axes=dfx.Mean()
    )
    assert_same(make_step(optimizer)(*args), make_step(optimizer, split)(*args))


def updates_and_backward(fast: Any, *args: Any) -> list[tuple[str, str, bool]]:
    """(update, backward of an earlier layer, whether the plan leaves the two free)."""
    made = fast.planned(args, {})
    graph, before = made.pg.graph, made.order.before
    weights = len(jax.tree_util.tree_leaves(args[0]))
    producer = made.pg.producer_region()
    arguments_of = dict(zip(graph.input_names, graph.inputs, strict=False))
    updates = {}  # weight -> the region that makes its next value
    readers: dict[int, list[int]] = {}
    for number in range(weights):
        updates[number] = producer[made.captured.outputs[number]]
        value = arguments_of[f"arg_{number}"]
        readers[number] = [r.id for r in made.pg.regions if value in r.inputs]
    names = {r.id: r.name for r in made.pg.regions}
    found = []
    for number in range(weights):
        for earlier in range(number):
            backward = [r for r in readers[earlier] if r not in updates.values()]
            if len(backward) > 1:  # forward and backward pass read it
                free = not before(updates[number], backward[-1])
                found.append((names[updates[number]], names[backward[-1]], free))
    return found


def test_updates_run_beside_the_backward_pass(schedule: Any) -> None:
    """With default rules, nothing marked: no earlier layer's backward waits for a later one's update."""
    optimizer = optax.adamw(1e-2)
    big = jax.tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct([n * 64 for n in x.shape], x.dtype), arguments(optimizer)
    )
    fast = schedule(make_step(optimizer), dfx.Branches(), backend="xla")
    pairs = updates_and_backward(fast, *big)
    assert pairs and all(free for *_, free in pairs), pairs
