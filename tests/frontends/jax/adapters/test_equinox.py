"""Functions of Equinox modules: leaves that are no arrays are static, as for ``eqx.filter_jit``."""

from __future__ import annotations

import functools
from typing import Any

import pytest

jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_to_compile")

OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def data(seed: int, rows: int = 16) -> tuple[Any, Any]:
    a, b = jax.random.split(jax.random.key(seed))
    return jax.random.normal(a, (rows, 8)), jax.random.normal(b, (rows, 4))


def model(seed: int = 0) -> Any:
    return eqx.nn.MLP(8, 4, 8, 1, key=jax.random.key(seed))


def loss(net: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jax.vmap(net)(x) - y) ** 2)


def step(net: Any, state: Any, x: Any, y: Any, *, of: Any = loss) -> Any:
    value, gradient = eqx.filter_value_and_grad(of)(net, x, y)
    updates, state = OPTIMIZER.update(gradient, state, net)
    return eqx.apply_updates(net, updates), state, value


def trained(train: Any) -> Any:
    net = model()
    state = OPTIMIZER.init(eqx.filter(net, eqx.is_array))
    values = []
    for seed in range(3):
        net, state, value = train(net, state, *data(seed))
        values.append(value)
    assert net.activation is model().activation  # what is static comes back as it is
    return values, eqx.filter((net, state), eqx.is_array)


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def original() -> Any:
    return trained(eqx.filter_jit(step))


WAYS = {
    "filter_jit inside": lambda strategy: dfx.schedule(eqx.filter_jit(step), strategy),
    "filter_jit outside": lambda strategy: eqx.filter_jit(dfx.schedule(step, strategy)),
    "no filter_jit": lambda strategy: dfx.schedule(step, strategy),
    "the loss": lambda strategy: functools.partial(step, of=dfx.schedule(loss, strategy)),
    "donated": lambda strategy: dfx.schedule(eqx.filter_jit(step, donate="all"), strategy),
}
CASES = [(way, "branches") for way in WAYS] + [("filter_jit inside", "auto"), ("the loss", "auto")]


@pytest.mark.parametrize(("way", "strategy"), CASES)
def test_training_steps_train(way: str, strategy: str, original: Any) -> None:
    same(trained(WAYS[way](strategy)), original)


class Gate(eqx.Module):
    weight: Any
    act: Any = jax.nn.relu
    scale: float = 2.0

    @dfx.schedule(strategy="branches")
    def __call__(self, x: Any) -> Any:
        return self.act(x @ self.weight) * self.scale

    def plain(self, x: Any) -> Any:
        return self.act(x @ self.weight) * self.scale


def test_modules_and_their_methods() -> None:
    x, _ = data(1)
    gate = Gate(jax.random.normal(jax.random.key(2), (8, 4)))
    want = gate.plain(x)
    same(gate(x), want)
    same(dfx.schedule(gate.plain, "branches")(x), want)
    net = model()
    same(dfx.schedule(net, "branches")(x[0]), net(x[0]))
    same(dfx.schedule(functools.partial(Gate.plain, gate), "branches")(x), want)
    other = eqx.tree_at(lambda g: g.act, gate, jnp.tanh)
    same(dfx.schedule(Gate.plain, "branches")(other, x), other.plain(x))


def test_numbers_are_traced_and_other_leaves_are_not() -> None:
    traces = []

    def scaled(gate: Any, x: Any, factor: float, twice: bool) -> Any:
        traces.append(1)
        return gate.plain(x) * factor * (2 if twice else 1)

    gate, (x, _) = Gate(jnp.ones((8, 4))), data(1)
    fast = dfx.schedule(scaled, "branches")
    fast(gate, x, 0.5, True)
    count = len(traces)
    same(fast(gate, x, 0.25, True), gate.plain(x) * 0.5)
    assert len(traces) == count
    same(fast(gate, x, 0.25, False), gate.plain(x) * 0.25)


def test_states_are_passed_on() -> None:
    def call(net: Any, state: Any, x: Any) -> Any:
        return jax.vmap(net, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(x, state)

    def norm() -> Any:
        return eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "rows", mode="batch")

    fast = dfx.schedule(call, "branches")
    x, _ = data(4)
    want, got = eqx.filter_jit(call)(*norm(), x), fast(*norm(), x)
    same(jax.tree.leaves(got), jax.tree.leaves(want))
    assert dfx.verify(fast, *norm(), x).rows


def test_inspection() -> None:
    fast = dfx.schedule(eqx.filter_jit(loss), "branches")
    x, y = data(1)
    assert "strategy Branches()" in dfx.explain(fast, model(), x, y)
    assert dfx.plan(fast, model(), x, y).instructions
    assert [row[0] for row in dfx.verify(fast, model(), x, y).rows] == ["result"]
    same(fast.lower(model(), x, y).compile()(model(), x, y), loss(model(), x, y))
    with pytest.raises(dfx.UnsupportedError, match=r"eqx\.partition"):
        dfx.schedule(eqx.filter_jit(loss), dfx.NanoBatch(2), in_axes=(None, 0, 0))


def test_a_module_with_a_default_that_was_put_together_again() -> None:
    """Equinox writes an object that is no text to its ``__name__``, as after each training step."""

    class Layer(eqx.Module):
        linear: eqx.nn.Linear
        count: int = 3

        def __init__(self, key: Any) -> None:
            self.linear = eqx.nn.Linear(6, 5, key=key)

        def __call__(self, x: Any) -> Any:
            return jnp.sort(self.linear(x))

    module = jax.tree.map(lambda leaf: leaf, Layer(jax.random.key(0)))
    x = jnp.linspace(-1.0, 1.0, 6)
    fast = dfx.schedule(module, "branches")
    assert (fast(x) == module(x)).all() and "Layer" in dfx.explain(fast, x)


@pytest.mark.parametrize("strategy", ["branches", "auto"])
def test_a_wrong_shape_is_told_as_that(strategy: str) -> None:
    """The functions that a model holds are no arguments that cannot be traced."""
    net = eqx.nn.MLP(16, 16, 8, 2, key=jax.random.key(0))
    fast = dfx.schedule(lambda net, x: jax.vmap(net)(x), strategy)
    fast(net, jnp.ones((4, 16)))
    with pytest.raises(TypeError, match="contracting dimensions") as raised:
        fast(net, jnp.ones((4, 5)))
    assert "cannot trace" not in str(raised.value)
