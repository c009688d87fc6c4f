"""backend="xla": the body of a ``lax.scan`` has a plan of its own; values, gradients, what stays whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dynaflow_xla as dfx

RNG = np.random.default_rng(0)
LAYERS = 3
WS = jnp.asarray(RNG.standard_normal((LAYERS, 8, 8)) / 3, jnp.float32)
X = jnp.asarray(RNG.standard_normal((4, 8)), jnp.float32)


def layer(x: Any, w: Any) -> Any:
    with dfx.mark("left"):
        a = jnp.tanh(x @ w) @ w
    with dfx.mark("right"):
        b = jax.nn.softmax(x @ w.T)
    return x + a - b


def layers(ws: Any, x: Any) -> Any:
    return lax.scan(lambda h, w: (layer(h, w), h.sum()), x, ws)


def backwards(ws: Any, x: Any) -> Any:
    return lax.scan(lambda h, w: (layer(h, w), h * w[0]), x, ws, reverse=True, unroll=2)


def closing_over(ws: Any, x: Any) -> Any:
    first = ws[0]
    return lax.scan(lambda h, i: (layer(h, first) * i, i), x, jnp.arange(1.0, 4.0))


def nested(ws: Any, x: Any) -> Any:
    def outer(h: Any, w: Any) -> Any:
        return lax.scan(lambda g, s: (layer(g, w) * s, None), h, jnp.ones(2))[0], None

    return lax.scan(outer, x, ws)[0]


def with_keys(ws: Any, x: Any) -> Any:
    def body(carry: Any, w: Any) -> Any:
        key, h = carry
        key, mine = jax.random.split(key)
        return (key, layer(h, w) * jax.random.bernoulli(mine, 0.5, h.shape)), None

    (_, h), _ = lax.scan(body, (jax.random.key(1), x), ws)
    return h


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.1, 0.1) * jnp.cos(x),))


def with_rules(ws: Any, x: Any) -> Any:
    def body(h: Any, w: Any) -> Any:
        with dfx.mark("left"):
            a = clipped(h @ w)
        with dfx.mark("right"):
            b = jax.nn.relu(h @ w.T)
        return h + a * b, None

    return lax.scan(body, x, ws)[0]


def rematerialised(ws: Any, x: Any) -> Any:
    return lax.scan(jax.checkpoint(lambda h, w: (layer(h, w), None)), x, ws)[0]


FUNCTIONS = (layers, backwards, closing_over, nested, with_keys, with_rules, rematerialised)
TRANSFORMS: dict[str, Any] = {
    "call": lambda f: f(WS, X),
    "grad": lambda f: jax.jit(jax.grad(lambda *a: total(f(*a)), (0, 1)))(WS, X),
    "vmap": lambda f: jax.vmap(f, (None, 0))(WS, jnp.stack([X, -X])),
}


@pytest.fixture(autouse=True)
def quick_to_compile() -> Any:
    """Values are what is tested, not the compiler's optimisations, which take most of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def total(tree: Any) -> Any:
    return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree_util.tree_leaves(tree))


def bodies(fast: Any, *args: Any) -> list[tuple[str, list[str]]]:
    """Name of each scheduled loop and the regions of its body."""
    found = []
    open_entries = [fast.planned(args, {})]
    for made in open_entries:
        for name, body in made.bodies():
            found.append((name, [region.name for region in body.pg.regions]))
            open_entries.append(body)
    return found


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_values(fn: Any, how: str, schedule: Any, assert_same: Any) -> None:
    fast = schedule(fn, dfx.Branches(), backend="xla")
    assert_same(TRANSFORMS[how](jax.jit(fn)), TRANSFORMS[how](fast))


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_the_body_is_scheduled(fn: Any, schedule: Any) -> None:
    found = bodies(schedule(fn, dfx.Branches(), backend="xla"), WS, X)
    assert any({"left", "right"} <= set(regions) for _, regions in found), found


def test_gradient_of_a_whole_function(schedule: Any, assert_same: Any) -> None:
    """Forward and backward loop are both in the graph, and both bodies have plans."""
    step = jax.value_and_grad(lambda ws, x: total(rematerialised(ws, x)))
    fast = schedule(step, dfx.Branches(), backend="xla")
    assert_same(jax.jit(step)(WS, X), fast(WS, X))
    assert len(bodies(fast, WS, X)) == 2


def test_nano_batches(schedule: Any, assert_same: Any) -> None:
    def loss(ws: Any, x: Any) -> Any:
        return (layers(ws, x)[0] ** 2).mean(axis=1)

    fast = schedule(loss, dfx.NanoBatch(2), backend="xla", in_axes=(None, 0))
    assert_same(jax.jit(loss)(WS, X), fast(WS, X))
    grads = [jax.grad(lambda *a, f=f: f(*a).sum(), (0, 1))(WS, X) for f in (loss, fast)]
    assert_same(*grads)
    assert bodies(fast, WS, X)


@pytest.mark.parametrize("strategy", [dfx.NanoBatch(2), dfx.DualBatch()], ids=str)
def test_nano_batches_meet_in_each_turn(strategy: Any, schedule: Any, assert_same: Any) -> None:
    """A layer that is split inside of the loop: values, gradients, and a scheduled loop around it."""
    fast = schedule(layer, strategy, backend="xla", in_axes=(0, None))

    def loss(f: Any, ws: Any, x: Any) -> Any:
        return lax.scan(lambda h, w: (f(h, w), None), x, ws)[0].sum()

    for transform in (lambda f: f, jax.grad, lambda f: jax.grad(jax.checkpoint(f))):
        want = transform(lambda ws: loss(layer, ws, X))
        assert_same(jax.jit(want)(WS), jax.jit(transform(lambda ws: loss(fast, ws, X)))(WS))
    around = schedule(lambda ws, x: loss(fast, ws, x), dfx.Branches(), backend="xla")
    assert_same(loss(layer, WS, X), around(WS, X))


def test_rules_may_speak_of_the_body_alone(schedule: Any, assert_same: Any) -> None:
    def f(ws: Any, x: Any) -> Any:
        return lax.scan(lambda h, w: (jnp.sort(h @ w) + jnp.tanh(h), None), x, ws)[0]

    fast = schedule(f, dfx.Branches(), backend="xla", rules=[dfx.Op("sort", name="mine")])
    assert_same(jax.jit(f)(WS, X), fast(WS, X))
    assert any("mine" in regions for _, regions in bodies(fast, WS, X))
    with pytest.raises(dfx.RuleError, match="no_such"):
        schedule(f, dfx.Branches(), backend="xla", rules=[dfx.Op("no_such")])(WS, X)


def test_a_body_of_one_region_stays(schedule: Any) -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, y: (c + y, c), jnp.float32(0), x)

    assert not bodies(schedule(f, dfx.Branches(), backend="xla"), jnp.ones(4))


def test_gates_are_inside_the_loop(schedule: Any) -> None:
    """The two marks on one lane: only a gate in the body can order them."""
    fast = schedule(jax.jit(layers), dfx.Sequential(), backend="xla")
    disabled = [jax.export.DisabledSafetyCheck.custom_call("dfx_order")]
    exported = jax.export.export(fast._jit, platforms=["cuda"], disabled_checks=disabled)(WS, X)
    assert "dfx_order" in exported.mlir_module()
    ((_, body),) = fast.planned((WS, X), {}).bodies()
    assert body.gates


def test_planning_does_not_trace_the_layer_again(schedule: Any) -> None:
    """Planning 32 layers costs what planning two does: the user's layer is not traced again for it."""
    count = [0]

    def counted(h: Any, w: Any) -> Any:
        count[0] += 1
        return layer(h, w), None

    def f(ws: Any, x: Any) -> Any:
        return lax.scan(counted, x, ws)[0]

    jax.jit(lambda *a: f(*a)).trace(WS, X)
    once, count[0] = count[0], 0
    fast = schedule(f, dfx.Branches(), backend="xla")
    dfx.plan(fast, jax.ShapeDtypeStruct((32, 8, 8), jnp.float32), X)
    assert count[0] <= once


def test_explain_shows_the_body(schedule: Any) -> None:
    text = dfx.explain(schedule(layers, dfx.Branches(), backend="xla"), WS, X)
    assert "body of the loop" in text and "left" in text and "right" in text
