"""Functions of flax.nnx modules: the same values, and the same changes in the modules."""

from __future__ import annotations

import functools
from typing import Any

import pytest

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_to_compile")


class Net(nnx.Module):
    """Normalises with running statistics, drops out with counted random numbers."""

    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.drop(self.norm(x)))


def made() -> tuple[Any, Any]:
    model = Net()
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def data(seed: int, rows: int = 16) -> tuple[Any, Any]:
    a, b = jax.random.split(jax.random.key(seed))
    return jax.random.normal(a, (rows, 8)), jax.random.normal(b, (rows, 4))


def loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((model(x) - y) ** 2)


def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    value, gradient = nnx.value_and_grad(loss)(model, x, y)
    optimizer.update(model, gradient)
    return value


def trained(train: Any, steps: int = 2) -> tuple[list[Any], Any]:
    """Losses of a few steps, and all that the model and its optimizer hold then."""
    model, optimizer = made()
    losses = [train(model, optimizer, *data(seed)) for seed in range(steps)]
    return losses, nnx.to_pure_dict(nnx.state((model, optimizer)))


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(w.dtype, jax.dtypes.prng_key):
            g, w = jax.random.key_data(g), jax.random.key_data(w)
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def original() -> Any:
    losses, state = trained(nnx.jit(step))
    assert len({float(x) for x in losses}) == len(losses)
    return losses, state


def with_scheduled_loss(strategy: str) -> Any:
    fast = dfx.schedule(loss, strategy)

    def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, gradient = nnx.value_and_grad(fast)(model, x, y)
        optimizer.update(model, gradient)
        return value

    return nnx.jit(train)


WAYS = {
    "nnx.jit inside": lambda strategy: dfx.schedule(nnx.jit(step), strategy),
    "nnx.jit outside": lambda strategy: nnx.jit(dfx.schedule(step, strategy)),
    "no jit": lambda strategy: dfx.schedule(step, strategy),
    "loss inside nnx.jit": with_scheduled_loss,
    "without updates of the graph": lambda strategy: dfx.schedule(
        nnx.jit(step, graph_updates=False), strategy
    ),
    "donated": lambda strategy: dfx.schedule(nnx.jit(step, donate_argnums=(0, 1)), strategy),
}


CASES = [(way, "branches") for way in WAYS] + [
    ("nnx.jit inside", "auto"),
    ("loss inside nnx.jit", "auto"),
]


@pytest.mark.parametrize(("way", "strategy"), CASES)
def test_training_steps_train(way: str, strategy: str, original: Any) -> None:
    same(trained(WAYS[way](strategy)), original)


def test_bound_models_are_trained(original: Any) -> None:
    def bound(fn: Any) -> Any:
        model, optimizer = made()
        fast = dfx.schedule(functools.partial(fn, model, optimizer), "branches")
        losses = [fast(*data(seed)) for seed in range(2)]
        return losses, nnx.to_pure_dict(nnx.state((model, optimizer)))

    same(bound(step), original)
    same(bound(nnx.jit(step)), original)


def test_a_module_and_its_methods_are_functions_of_it() -> None:
    x, _ = data(7)
    want, a, b = Net(), Net(), Net()
    called, method = dfx.schedule(a, "branches"), dfx.schedule(b.__call__, "branches")
    for _ in range(2):
        result = want(x)
        same(called(x), result)
        same(method(x), result)
    for got in (a, b):
        same(nnx.to_pure_dict(nnx.state(got)), nnx.to_pure_dict(nnx.state(want)))
    # Weights are arguments: a later change is seen.
    want.out.bias[...] = a.out.bias[...] = want.out.bias[...] + 1
    same(called(x), want(x))


def test_one_function_takes_arrays_and_modules() -> None:
    def double(thing: Any) -> Any:
        if isinstance(thing, nnx.Module):
            thing.out.kernel[...] = thing.out.kernel[...] * 2
            return thing.out.kernel[...]
        return thing * 2

    fast = dfx.schedule(double, "branches")
    x, model = jnp.arange(4.0), Net()
    for _ in range(2):
        same(fast(x), x * 2)
        before = model.out.kernel[...]
        same(fast(model), before * 2)
        same(model.out.kernel[...], before * 2)


def test_variables_that_appear_and_shared_ones() -> None:
    def call(pair: Any, x: Any) -> Any:
        first, second = pair
        first.seen = nnx.Variable(x.sum())
        first.out.bias[...] = first.out.bias[...] + x.sum()
        return second(x)

    x, _ = data(3)
    (a,) = models = (Net(),)
    want = call((a, a), x)
    (b,) = models = (Net(),)
    got = dfx.schedule(call, "branches")((b, b), x)
    same(got, want)
    same(nnx.to_pure_dict(nnx.state(b)), nnx.to_pure_dict(nnx.state(a)))
    assert models[0].seen is b.seen


def test_inspection_leaves_the_model_alone_and_verify_compares_it() -> None:
    model, optimizer = made()
    before = nnx.to_pure_dict(nnx.state((model, optimizer)))
    x, y = data(1)
    whole = dfx.schedule(nnx.jit(loss), "branches")
    bound = dfx.schedule(functools.partial(loss, model), "branches")
    for fast, args in ((whole, (model, x, y)), (bound, (x, y))):
        assert "strategy Branches()" in dfx.explain(fast, *args)
        assert dfx.plan(fast, *args).instructions
        assert dfx.simulate(fast, *args).total_ns > 0
        assert dfx.profile(fast, *args).total_ns > 0
        rows = {row[0] for row in dfx.verify(fast, *args).rows}
        assert "result" in rows
        assert {"argument[0]['norm']['mean']", "argument[0]['drop']['rngs']['count']"} <= rows
        assert not any("['rngs']['key']" in row for row in rows)  # nothing changes it
    same(nnx.to_pure_dict(nnx.state((model, optimizer))), before)


def test_verify_notices_a_lost_update() -> None:
    def update(model: Any, x: Any) -> Any:
        model.out.bias[...] = model.out.bias[...] + x.sum()
        return x

    fast = dfx.schedule(nnx.jit(update), "branches")
    other = dfx.schedule(nnx.jit(lambda model, x: x), "branches")
    x, model = jnp.arange(4.0), Net()
    assert any("['out']['bias']" in row[0] for row in dfx.verify(fast, model, x).rows)
    other.original = fast.original
    with pytest.raises(dfx.VerificationError, match=r"argument\[0\]\['out'\]\['bias'\]"):
        dfx.verify(other, model, x)


def test_nano_batches_beside_a_model() -> None:
    def rank(model: Any, x: Any) -> Any:
        return jnp.sort(model.out(x), axis=1)

    x, _ = data(5)
    model = Net()
    for fn in (rank, nnx.jit(rank)):
        fast = dfx.schedule(fn, dfx.NanoBatch(2), in_axes=(None, 0))
        same(fast(model, x), rank(model, x))
        assert "nano" in str(dfx.plan(fast, model, x)).lower()


def test_lowered_and_compiled_ahead() -> None:
    fast = dfx.schedule(nnx.jit(step), "branches")
    model, optimizer = made()
    compiled = fast.lower(model, optimizer, *data(0)).compile()
    losses = [compiled(model, optimizer, *data(seed)) for seed in range(2)]
    same(losses, trained(nnx.jit(step), 2)[0])
