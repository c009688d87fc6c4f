"""What mixes rows runs once, on the rows put together again, and what follows is split again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dynaflow_xla as dfx

pytestmark = pytest.mark.usefixtures("quick_to_compile")

B, D = 12, 8


def data(seed: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed).standard_normal
    return jnp.asarray(draw((D, D)) / 3, jnp.float32), jnp.asarray(draw((B, D)), jnp.float32)


def softmax_over_the_batch(w: Any, x: Any) -> Any:
    return jax.nn.softmax(jnp.tanh(x @ w), axis=0) @ w


def contrastive(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    h = h / jnp.linalg.norm(h, axis=1, keepdims=True)
    logits = h @ h.T / 0.1
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits, axis=1)))


def batch_norm(w: Any, x: Any) -> Any:
    h = x @ w
    h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-3)
    return jnp.tanh(h) @ w


def runs_one_after_the_other(w: Any, x: Any) -> Any:
    return jnp.concatenate([x @ w, x])[: x.shape[0]][::-1]


def dropout(w: Any, x: Any) -> Any:
    keep = jax.random.bernoulli(jax.random.key(3), 0.7, x.shape)
    return jnp.where(keep, x / 0.7, 0.0) @ w


CASES: dict[Callable[..., Any], tuple[Any, str]] = {
    softmax_over_the_batch: (0, "reduce_max"),
    contrastive: (None, "dot_general"),
    batch_norm: (0, "total is completed"),
    runs_one_after_the_other: (0, "rev|slice|concatenate"),
    dropout: (0, "random_bits|threefry"),
}


@pytest.mark.parametrize(("backend", "sizes"), [("ffi", [5, 4, 3]), ("xla", 2)], ids=str)
@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
def test_equal_with_gradients(fn: Any, sizes: Any, backend: str) -> None:
    out_axes, reason = CASES[fn]
    strategy = dfx.NanoBatch(sizes)
    fast = dfx.schedule(fn, strategy, in_axes=(None, 0), out_axes=out_axes, backend=backend)
    w, x = data(1)
    close = dict(rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(fast(w, x), fn(w, x), **close)

    def loss(f: Any) -> Any:
        return jax.grad(lambda w, x: jnp.sum(jnp.sin(f(w, x))), argnums=(0, 1))(w, x)

    for got, want in zip(loss(fast), loss(fn), strict=True):
        np.testing.assert_allclose(got, want, **close)
    joined = [n for n in dfx.explain(fast, w, x).splitlines() if "joined: " in n]
    assert any(__file__ in n for n in joined), joined
    assert any(part in n for n in joined for part in reason.split("|")), joined


def test_no_joins() -> None:
    w, x = data(2)
    fast = dfx.schedule(batch_norm, dfx.NanoBatch(2, joins=False), in_axes=(None, 0), backend="ffi")
    with pytest.raises(dfx.SeparabilityError, match=r"reduce_sum at .*test_joins\.py"):
        fast(w, x)


def test_a_loop_whose_body_mixes_rows_is_refused() -> None:
    def f(w: Any, x: Any) -> Any:
        return lax.scan(lambda h, _: (h - h.mean(0), None), x @ w, None, length=3)[0]

    w, x = data(3)
    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=(None, 0))
    with pytest.raises(dfx.SeparabilityError, match="inside of the loop scan at .*not joined"):
        fast(w, x)


def test_a_loop_along_the_batch_runs_once() -> None:
    def f(w: Any, x: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            h = 0.5 * h + row
            return h, h

        return lax.scan(step, x[0], x @ w)[1] @ w

    w, x = data(4)
    fast = dfx.schedule(f, dfx.NanoBatch([7, 5]), in_axes=(None, 0))
    np.testing.assert_allclose(fast(w, x), f(w, x), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("joins", [True, False])
def test_equal_values_on_the_first_call_do_not_excuse_what_mixes_rows(joins: bool) -> None:
    """The program is another one at two rows, so that a walk of all sizes ends before the result."""

    def f(x: Any) -> Any:
        high = jnp.cumsum(jnp.where(x > 5, x, 0.0), 0)  # nothing of that in the first call
        if x.shape[0] == 2:
            return jnp.sin(high) + x
        return x + jnp.sin(high)

    fast = dfx.schedule(f, dfx.NanoBatch([4, 3, 2], joins=joins), in_axes=0)
    with pytest.raises(dfx.SeparabilityError, match="cumsum at .*accumulates along the batch"):
        fast(jnp.zeros((9, 4)))


def test_another_program_at_another_size_is_named() -> None:
    """``einsum`` of three operands contracts them in an order that their sizes decide."""

    def fn(w: Any, x: Any) -> Any:
        hot = jnp.cumsum(jnp.tanh(x), 0)[:, :, None] * jnp.ones(10)
        return x + jnp.einsum("nec,ecf,efd->nd", hot, jnp.ones((8, 10, 16)), w)

    args = jnp.ones((8, 16, 8)), jnp.ones((12, 8))
    fast = dfx.schedule(fn, dfx.NanoBatch([9, 3]), in_axes=(None, 0))
    with pytest.raises(
        dfx.SeparabilityError, match=r"cumsum at .* along the batch; it is not joined, be"
    ):
        dfx.plan(fast, *args)


def test_effects_are_not_joined() -> None:
    def f(x: Any) -> Any:
        jax.debug.print("{}", x.sum())
        return x - x.mean(0)

    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=0)
    with pytest.raises((dfx.UnsupportedError, dfx.SeparabilityError), match="debug"):
        fast(data(5)[1])


def layers(w: Any, x: Any) -> Any:
    with jax.named_scope("first"):
        x = jnp.tanh(x @ w)
    with jax.named_scope("experts"):
        x = x + jnp.sin(x @ w)
    return x @ w


def test_only_some_regions_are_split() -> None:
    w, x = data(6)
    strategy = dfx.NanoBatch(2, only=dfx.Scope("**experts"))
    fast = dfx.schedule(layers, strategy, in_axes=(None, 0), rules=[dfx.Op("dot_general")])
    np.testing.assert_allclose(fast(w, x), layers(w, x), rtol=2e-4, atol=2e-6)
    names = [r.name for r in dfx.graph(fast, w, x).regions if r.name.startswith("dot_general")]
    assert sorted("@" in name for name in names) == [False, False, True, True], names
    assert "only that is split" in dfx.explain(fast, w, x)


def test_some_regions_are_joined_on_purpose() -> None:
    w, x = data(7)
    strategy = dfx.NanoBatch([7, 5], join=dfx.Scope("**experts"))
    fast = dfx.schedule(layers, strategy, in_axes=(None, 0), rules=[dfx.Op("dot_general")])
    np.testing.assert_allclose(fast(w, x), layers(w, x), rtol=2e-4, atol=2e-6)
    names = [r.name for r in dfx.graph(fast, w, x).regions if r.name.startswith("dot_general")]
    assert sorted("@" in name for name in names) == [False, True, True, True, True], names
    grad = jax.grad(lambda w: jnp.sum(fast(w, x) ** 2))(w)
    want = jax.grad(lambda w: jnp.sum(layers(w, x) ** 2))(w)
    np.testing.assert_allclose(grad, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"joins": 1},
        {"joins": False, "join": dfx.Op("dot_general")},
        {"assume_separable": True, "only": dfx.Op("dot_general")},
        {"only": "experts"},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    for strategy in (dfx.NanoBatch, dfx.DualBatch):
        with pytest.raises((dfx.PlanError, dfx.RuleError)):
            strategy(**options)


def test_a_rule_that_matches_nothing() -> None:
    fast = dfx.schedule(layers, dfx.NanoBatch(2, only=dfx.Scope("nowhere")), in_axes=(None, 0))
    with pytest.raises(dfx.RuleError, match="matches nothing"):
        fast(*data(8))


W = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)), jnp.float32) / 2

# Steps from [B, 4] to [B, 4].
STEPS: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "product": lambda x: x @ W,
    "row softmax": lambda x: jax.nn.softmax(x, -1),
    "runs": lambda x: sum(jnp.split(jnp.cos(jnp.concatenate([x, x + 1])), 2)),
    "mean": lambda x: x - x.mean(0),
    "spread": lambda x: x / (1 + x.std(0)),
    "softmax": lambda x: jax.nn.softmax(x, 0),
    "size": lambda x: x * x.shape[0] / 5,
    "sum": lambda x: x + (x * 0.1).sum(),
    "neighbours": lambda x: x + jnp.roll(x, 1, 0),
    "gram": lambda x: jax.nn.softmax(x @ x.T, -1) @ x,
    "number": lambda x: x + jnp.arange(x.shape[0])[:, None] / 9,
    "first": lambda x: x + x[:1],
    "cumsum": lambda x: jnp.cumsum(x, 0) / 3,
    "sorted": lambda x: jnp.sort(x, 0),
    "maximum": lambda x: x / (1 + jnp.abs(x).max()),
    "noise": lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape),
}


def _equal(names: list[str], sizes: tuple[int, ...], grad: bool) -> None:
    def f(x: Any) -> Any:
        for name in names:
            x = STEPS[name](x)
        return x

    x = jnp.asarray(np.random.default_rng(len(names)).standard_normal((sum(sizes), 4)), jnp.float32)
    fast = dfx.schedule(f, dfx.NanoBatch(sizes), in_axes=0, check=False, lanes=2)
    np.testing.assert_allclose(fast(x), f(x), rtol=1e-3, atol=1e-4)
    if grad:
        weight = jnp.cos(jnp.arange(x.size)).reshape(x.shape)
        got, want = (jax.grad(lambda x, g=g: jnp.sum(g(x) * weight))(x) for g in (fast, f))
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


PROGRAMS = dict(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    sizes=st.sampled_from([(3, 2), (2, 4), (2, 3, 2)]),
    grad=st.booleans(),
)


@hypothesis.settings(max_examples=5, deadline=None, derandomize=True, database=None)
@hypothesis.given(**PROGRAMS)
def test_random_programs(names: list[str], sizes: tuple[int, ...], grad: bool) -> None:
    _equal(names, sizes, grad)


@pytest.mark.slow
@hypothesis.settings(max_examples=500, deadline=None, derandomize=True, database=None)
@hypothesis.given(**PROGRAMS)
def test_many_random_programs(names: list[str], sizes: tuple[int, ...], grad: bool) -> None:
    _equal(names, sizes, grad)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a: (jnp.sort(a, 1), a.sum((1, 2)) + 1),
        lambda a: jnp.concatenate([a, jnp.ones((a.shape[0], 2, 3))], 1),
        lambda a: a.reshape(0, a.shape[0], 3).sum(0),
        lambda a: a.reshape(3, a.shape[0], 0).sum((0, 2)),
        lambda a: jnp.cumsum(a, 0) - a.mean(0),
        lambda a: jnp.einsum("bij,cij->bc", a, a),
        lambda a: jax.lax.scan(
            lambda c, v: (c + v, c), jnp.ones((a.shape[0], 3)), a.swapaxes(0, 1)
        )[0],
        jax.grad(lambda a: (a * 2).sum()),
    ],
    ids=[
        "rows",
        "joined by features",
        "reshape",
        "reshape in front",
        "mixes",
        "gram",
        "scan",
        "grad",
    ],
)
@pytest.mark.parametrize("sizes", [[4, 3], [5, 2]])
def test_rows_without_elements(fn: Any, sizes: list[int], assert_same: Any) -> None:
    """A batch whose rows are empty is a batch: what is made of it need not be empty."""
    fast = dfx.schedule(fn, dfx.NanoBatch(sizes), in_axes=0, lanes=1)
    empty = jnp.zeros((7, 0, 3))
    assert_same(jax.jit(fn)(empty), fast(empty))
