"""Equal operators are computed once, and only those that are equal for certain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax.capture import capture
from dynaflow_xla.ir.partition import live

X = jnp.asarray(np.random.default_rng(0).standard_normal((200, 200)), jnp.float32)
LANES = dfx.Branches(wide=False, margin=-0.9)


def kinds(f: Any, *args: Any) -> Counter[str]:
    """How many operators of each kind a plan has."""
    graph = capture.capture(jax.make_jaxpr(f)(*args), 0, "f", merge=True).graph
    return Counter(graph.ops[i].kind for i in live(graph))


def check(f: Any, *args: Any) -> Any:
    """The function on lanes; its values are those of jit but for the order of sums."""
    fast = dfx.schedule(jax.jit(f), LANES)
    for want, got in zip(
        jax.tree.leaves(jax.jit(f)(*args)), jax.tree.leaves(fast(*args)), strict=True
    ):
        assert want.dtype == got.dtype
        np.testing.assert_allclose(np.asarray(want), np.asarray(got), rtol=2e-3, atol=2e-3)
    return fast


def distances(x: Any) -> Any:
    return ((x[:, None] - x[None]) ** 2).sum(-1)


def kernels(x: Any, y: Any) -> list[Any]:
    def one(scale: float) -> Any:
        k = jnp.exp(-distances(x) / scale) + 0.1 * jnp.eye(len(x))
        return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(k), True), y)

    return [one(scale) for scale in (0.5, 1.0, 2.0)]


def test_what_three_kernels_share_is_computed_once() -> None:
    x, y = X[:, :3], X[:, 4]
    assert kinds(kernels, x, y)["reduce_sum"] == 1
    fast = check(kernels, x, y)
    assert "operators that others repeat run once: 2 were left out" in dfx.explain(fast, x, y)


def test_the_forward_pass_of_two_losses_runs_once() -> None:
    x = jnp.tile(X, (1, 20))
    w = [jnp.tile(X[:, :128], (20, 1)) / 400, X[:128, :100] / 10]

    def first(w: Any, x: Any) -> Any:
        return (jax.nn.relu(x @ w[0]) @ w[1]).mean()

    def second(w: Any, x: Any) -> Any:
        return ((jax.nn.relu(x @ w[0]) @ w[1]) ** 2).mean()

    def both(w: Any, x: Any) -> Any:
        return jax.grad(first)(w, x), jax.grad(second)(w, x)

    alone = [kinds(jax.grad(loss), w, x)["dot_general"] for loss in (first, second)]
    assert kinds(both, w, x)["dot_general"] == sum(alone) - 1
    check(both, w, x)


def test_results_that_are_the_same_value() -> None:
    check(lambda x: (jnp.sort(x), jnp.sort(x), jnp.sort(x) + 1), X)
    assert kinds(lambda x: (jnp.sort(x), jnp.sort(x)), X)["sort"] == 1


def test_one_call_of_a_function_on_equal_values() -> None:
    """What calls are given is the same only after what was computed for it is: numbers go through calls."""

    @jax.jit
    def block(x: Any) -> Any:
        return jnp.linalg.cholesky(x @ x.T + 300 * jnp.eye(len(x)))

    def f(x: Any) -> Any:
        return block(x * 2) + block(x * 2).T

    x = jnp.tile(
        X, (2, 2)
    )  # worth it on every machine, next to what handing the results over takes
    assert kinds(f, x)["cholesky"] == 1
    check(f, x)


def turns(x: Any, step: Any = jnp.tanh) -> Any:
    return jax.lax.scan(lambda c, row: (step(c @ x / 14), row.sum()), x, x)


EQUAL = {
    "scan": turns,
    "while": lambda x: jax.lax.while_loop(
        lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] @ x / 14), (0, x)
    ),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, jnp.linalg.inv, lambda y: y @ y, x),
    "grad": lambda x: jax.grad(lambda y: turns(y)[0].sum())(x),
    "jit": jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda i, y: jnp.sort(y.T) + i, x)),
}


@pytest.mark.parametrize("what", EQUAL)
def test_loops_that_compute_the_same(what: str) -> None:
    """Each call traces its function anew; XLA compares what they compute, too."""
    f = EQUAL[what]
    loops = ("scan", "while", "cond")
    single, twice = kinds(f, X), kinds(lambda x: (f(x), jax.tree.map(lambda y: y + 1, f(x))), X)
    assert sum(single[k] for k in loops) == sum(twice[k] for k in loops) > 0
    check(lambda x: (f(x), jax.tree.map(lambda y: y + 1, f(x))), X)


def test_what_is_cheap_is_repeated() -> None:
    """To read it from another lane takes longer."""
    small = X[0, :16]
    assert kinds(lambda x: (jnp.sort(x), jnp.sort(x)), small)["sort"] == 2


def test_many_cheap_ones_in_a_row_are_not() -> None:
    def chain(x: Any) -> Any:
        for _ in range(40):
            x = jnp.sin(x)
        return x

    single = kinds(chain, X)["sin"]
    assert kinds(lambda x: (chain(x) + 1, chain(x) * 2), X)["sin"] < 2 * single
    check(lambda x: (chain(x) + 1, chain(x) * 2), X)


DIFFERENT = {
    "a parameter": lambda x: (jnp.cumsum(x, 0), jax.lax.cumsum(x, 0, reverse=True)),
    "a dimension": lambda x: (jnp.sort(x, axis=0), jnp.sort(x, axis=1)),
    "an operand": lambda x: (jnp.sort(x), jnp.sort(x.T)),
    "the precision": lambda x: (x @ x, jnp.dot(x, x, precision="highest")),
    "their order": lambda x: (x @ x.T, x.T @ x),
    "a number": lambda x: (jnp.sort(x * 2), jnp.sort(x * 3)),
    "a zero's sign": lambda x: (jnp.sort(1 / (x * 0.0)), jnp.sort(1 / (x * -0.0))),
    "a type": lambda x: (jnp.sort(x), jnp.sort(x.astype(jnp.bfloat16))),
    "a result's type": lambda x: (
        jax.lax.dot(*[x.astype(jnp.bfloat16)] * 2),
        jax.lax.dot(*[x.astype(jnp.bfloat16)] * 2, preferred_element_type=jnp.float32),
    ),
    "a loop's function": lambda x: (
        jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 9)[0],
        jax.lax.scan(lambda c, _: (jnp.cos(c), None), x, None, 9)[0],
    ),
    "a loop's constant": lambda x: (
        jax.lax.scan(lambda c, _: (jnp.sin(c) + X, None), x, None, 9)[0],
        jax.lax.scan(lambda c, _: (jnp.sin(c) + X * 2, None), x, None, 9)[0],
    ),
    "a loop's number": lambda x: (
        jax.lax.scan(lambda c, _: (c * 0.0, None), x, None, 9)[0],
        jax.lax.scan(lambda c, _: (c * -0.0, None), x, None, 9)[0],
    ),
    "a loop's length": lambda x: (
        jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 9)[0],
        jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 8)[0],
    ),
    "the order of a loop's results": lambda x: (
        jax.lax.scan(lambda c, _: ((jnp.sin(c[1]), c[0]), None), (x, x + 1), None, 9)[0],
        jax.lax.scan(lambda c, _: ((c[1], jnp.sin(c[0])), None), (x, x + 1), None, 9)[0],
    ),
    "a constant": lambda x: (jnp.sort(x + np.ones(200, np.float32)), jnp.sort(x + np.zeros(200))),
    "a key": lambda x: (
        jax.random.normal(jax.random.key(0), x.shape),
        jax.random.normal(jax.random.key(1), x.shape),
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("x64", [False, True])
def test_what_differs_is_kept_apart(what: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        fast = check(DIFFERENT[what], X)
        assert fast.planned((X,), {}).captured.merged == 0


def test_a_key_that_is_used_twice_gives_equal_numbers() -> None:
    def f(key: Any) -> Any:
        return jax.random.normal(key, (300, 300)), jax.random.normal(key, (300, 300))

    first, second = check(f, jax.random.key(3))(jax.random.key(3))
    np.testing.assert_array_equal(first, second)


def test_barriers_keep_what_is_recomputed() -> None:
    """``jax.checkpoint`` computes again to save memory."""

    @jax.checkpoint
    def block(w: Any, x: Any) -> Any:
        return jnp.sin(jnp.linalg.cholesky(x @ x.T + 300 * jnp.eye(len(x))) @ w)

    def f(w: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda w: block(w, x).sum())(w)

    assert kinds(f, X, X)["cholesky"] == 2
    check(f, X, X)


def test_marks_are_kept_apart() -> None:
    def f(x: Any) -> Any:
        with dfx.mark("one"):
            a = jnp.sort(x)
        with dfx.mark("two"):
            b = jnp.sort(x)
        return a, b

    names = [r.name for r in dfx.graph(dfx.schedule(f, "branches"), X).regions]
    assert {"one", "two"} <= set(names)


def test_what_acts_acts_as_often_as_it_is_written() -> None:
    calls: list[int] = []

    def f(x: Any) -> Any:
        for _ in range(2):
            jax.debug.callback(lambda: calls.append(1))
        return jnp.sort(x) + jnp.sort(x)

    fast = dfx.schedule(jax.jit(f), LANES)
    jax.block_until_ready(fast(X))
    jax.effects_barrier()
    assert len(calls) == 2


def test_derivatives_and_batches_of_them() -> None:
    def loss(x: Any) -> Any:
        return (jnp.linalg.inv(x @ x.T + 300 * jnp.eye(len(x))) @ jnp.sort(x)).sum() + (
            jnp.linalg.inv(x @ x.T + 300 * jnp.eye(len(x))) * jnp.sort(x)
        ).mean()

    fast = dfx.schedule(jax.jit(loss), LANES)
    np.testing.assert_allclose(jax.grad(fast)(X), jax.grad(jax.jit(loss))(X), rtol=2e-3, atol=2e-4)
    stack = jnp.stack([X, X + 1])
    np.testing.assert_allclose(
        jax.vmap(fast)(stack), jax.vmap(jax.jit(loss))(stack), rtol=2e-3, atol=1e-2
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int) -> None:
    """Programs of a few operators on a few values, so that many are written twice."""

    def program(x: Any) -> list[Any]:
        rng = np.random.default_rng(seed)
        values = [x, x.T]
        steps: list[Any] = [
            jnp.sort, jnp.sin, lambda v: v @ v / 200, lambda v: v @ x / 200, lambda v: v * 0.5,
            lambda v: jnp.cumsum(v, 0) / 200, lambda v: jnp.where(v > 0, v, 0.0), jnp.transpose,
            lambda v: jnp.fft.fft(v).real / 20, lambda v: v + jnp.argsort(v) / 200.0,
        ]  # fmt: skip
        for _ in range(30):
            step = steps[rng.integers(len(steps))]
            values.append(step(values[rng.integers(min(6, len(values)))]))
        return values

    assert sum(kinds(program, X).values()) < len(jax.make_jaxpr(program)(X).eqns) * 4
    fast = check(program, X)
    assert fast.planned((X,), {}).captured.merged > 0


# -- where operators are named or counted nothing is merged ---------------------------------------------


def twice(x: Any) -> Any:
    with jax.named_scope("a"):
        first = jnp.sort(x)
    with jax.named_scope("b"):
        return first, jnp.sort(x)


@pytest.mark.parametrize(
    ("rules", "count"),
    [([dfx.Scope("a"), dfx.Scope("b")], 2), ([dfx.Op("sort")], 2), (None, 1)],
)
def test_rules_find_every_operator(rules: Any, count: int) -> None:
    fast = dfx.schedule(jax.jit(twice), "branches", rules=rules)
    assert len(dfx.graph(fast, X).regions) == count
    check(twice, X)


def test_strategies_of_ones_own_find_every_operator() -> None:
    class Named(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    s.execute(op, lane=1 if op.name == "sort_1" else 0)

    fast = dfx.schedule(jax.jit(twice), Named())
    assert len(dfx.graph(fast, X).regions) == 2
    np.testing.assert_array_equal(fast(X)[1], jnp.sort(X))


@pytest.mark.parametrize("sizes", [2, [32, 96], [150, 10], [64, 128]])
@pytest.mark.parametrize("mixes", [False, True])
def test_nano_batches_are_proved_at_every_size(sizes: Any, mixes: bool) -> None:
    """What an operator costs differs with size: at some it would be merged, at others not."""
    rows = 128 if sizes == 2 else sum(sizes)

    def f(x: Any, w: Any) -> Any:
        y = jnp.sort(jnp.tanh(x @ w)) + jnp.tanh(x @ w) * 2 + x @ w * float(len(x)) / len(x)
        return y - y.mean(0) if mixes else y

    fast = dfx.schedule(jax.jit(f), dfx.NanoBatch(sizes), in_axes=(0, None))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, 200)), jnp.float32)
    np.testing.assert_allclose(fast(x, X / 14), jax.jit(f)(x, X / 14), rtol=2e-4, atol=2e-4)


KEY = jax.random.key(0)


@pytest.mark.parametrize("typed", [True, False])
def test_keys_and_scalars_that_a_function_closes_over(typed: bool) -> None:
    key = KEY if typed else jax.random.PRNGKey(0)
    scale = jnp.float32(3.0)

    @jax.jit
    def noisy(y: Any) -> Any:
        return y * scale + jax.random.normal(key, y.shape)

    def f(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda i, y: noisy(y), x), noisy(x), noisy(x) + 1

    check(f, X)
    fast = dfx.schedule(jax.jit(lambda x: f(x)[0].sum()), LANES)
    want = jax.grad(lambda x: f(x)[0].sum())(X)
    np.testing.assert_allclose(jax.grad(fast)(X), want, rtol=1e-5)


def test_bodies_with_barriers_of_their_own() -> None:
    """Also where JAX has one object for the function of both loops."""
    step = jax.checkpoint(lambda c, _: (jnp.sin(c) @ X / 14, None))

    def f(w: Any) -> Any:
        def loss(w: Any) -> Any:
            return jax.lax.scan(step, w, None, 5)[0].sum()

        return jax.grad(loss)(w), jax.grad(loss)(w) * 2

    check(f, X)
