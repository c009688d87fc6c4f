"""What more cores share of operators as parts of their program."""

from __future__ import annotations

import functools
import os
import platform
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import jaxlib  # noqa: E402
import numpy as np  # noqa: E402
from spreads import (  # noqa: E402
    forks,
    loops_handed_out,
    products_with_reductions,
    spread_of,
    spread_of_graph,
)

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.frontends.jax.capture.costs import estimates, library  # noqa: E402

pytestmark = pytest.mark.usefixtures("assumed_numbers", "two_cores")

LARGE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
CORES = len(os.sched_getaffinity(0))  # before anything stands in for them


def rotated(x: Any, c: Any, s: Any) -> Any:
    left, right = jnp.split(x, 2, -1)
    return x * c + jnp.concatenate([-right, left], -1) * s


PLACED: list[tuple[Any, int]] = [
    (lambda x: [jnp.tanh(part) for part in jnp.split(x * 2, 2, -1)], 2),
    (lambda x: jnp.pad(x * 2, 1) * 3, 1),
    (lambda x: (x * 2)[::-1] * 3 + 1, 1),
    (lambda x: jnp.repeat(x * 2, 2, axis=1) + 1, 1),
    (lambda x: (x * 2)[jnp.arange(512) * 2] + 1, 1),
    (lambda x: jax.lax.dynamic_slice_in_dim(x * 2, 3, 512) + 1, 1),
    (lambda x: jax.lax.dynamic_update_slice_in_dim(x * 2, x[:100] * 3, 5, 0) + 1, 1),
    (lambda x: jnp.concatenate([x * 2, x + 1], 0), 1),
    (lambda x: jnp.concatenate([x * i for i in range(2, 11)], 0), 10),  # too many parts
    (lambda x: jnp.concatenate([x * 2] * 9, 0) + 1, 3),
    (lambda x: jnp.concatenate([jnp.sin(x), x * 2], -1) * 3, 4),  # rows are copied
    (lambda x: rotated(x, x, x), 4),
    (lambda x: rotated(x.reshape(-1, 64), x.reshape(-1, 64), x.reshape(-1, 64)), 1),
]
"""Functions of a large array, and how many loops over elements are handed out."""


@pytest.mark.parametrize(("f", "expected"), PLACED)
def test_loops_that_place_elements_are_parts_of_others(f: Any, expected: int) -> None:
    assert forks(f, LARGE) == expected


AS_COMPILED = pytest.mark.skipif(
    CORES < 2
    or "NPROC" in os.environ
    or jaxlib.__version__ != "0.10.2"
    or platform.machine() != "x86_64",
    reason="read off jaxlib 0.10.2 on x86; one thread is handed nothing",
)


@AS_COMPILED
@pytest.mark.parametrize(("f", "expected"), PLACED)
def test_compiled_programs_hand_out_as_many(f: Any, expected: int) -> None:
    assert loops_handed_out(f, LARGE) == expected


def test_products_of_one_value_are_handed_out_side_by_side() -> None:
    def projections(x: Any, ws: Any) -> Any:
        return [x @ w for w in ws]

    def chain(x: Any, ws: Any) -> Any:
        for w in ws:
            x = x @ w
        return x

    assert forks(lambda x: projections(x, [x + 1, x + 2, x + 3]), LARGE) == 1 + 3
    assert forks(lambda x: chain(x, [x + 1, x + 2, x + 3]), LARGE) == 3 + 3
    # They read one value, but the second one needs the first, or has to wait for something else.
    assert forks(lambda x: x @ (x @ x), LARGE) == 2
    assert forks(lambda x: (x @ x, jnp.sort(x) @ x), LARGE) == 2


HEADS = jax.ShapeDtypeStruct((4, 8, 128, 32), jnp.float32)


def attention(q: Any, k: Any, v: Any, *, choose: bool = False, softmax: bool = True) -> Any:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * 0.2
    if choose:
        scores = jnp.where(scores > 0, scores, -1e9)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores) if softmax else scores, v)


def shared_products(f: Any, *shapes: Any) -> tuple[float, float]:
    """Nanoseconds of products on one core that two share, and of those that they do not."""
    spread = spread_of_graph(f, *shapes)
    return spread.products, spread.tiles


def test_an_attention_is_shared_out_as_a_whole() -> None:
    def of(**how: bool) -> tuple[float, float]:
        return shared_products(lambda q, k, v: attention(q, k, v, **how), HEADS, HEADS, HEADS)

    shared, alone = of()
    assert shared > 0 == alone
    assert of(softmax=False) == (0.0, pytest.approx(shared))
    # The library does not choose: the product before is by itself.
    behind, before = of(choose=True)
    assert 0 < behind < shared and behind + before == pytest.approx(shared)


def test_what_else_reads_the_scores_keeps_them_apart() -> None:
    def both(q: Any, k: Any) -> Any:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        return jax.nn.softmax(scores), scores

    def total(q: Any, k: Any) -> Any:
        return jnp.tanh(jnp.einsum("bhqd,bhkd->bhqk", q, k)).sum(-1)

    assert shared_products(both, HEADS, HEADS)[0] == 0
    assert shared_products(total, HEADS, HEADS)[1] == 0


@pytest.mark.parametrize("step", [lambda x, n: x + n, lambda x, n: x * x])
def test_long_chains_take_no_time(step: Any) -> None:
    def late(q: Any, k: Any) -> Any:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        for n in range(1500):
            scores = step(scores, n)
        return scores.sum(-1)

    assert spread_of(late, HEADS, HEADS).tiles == 0


def heads(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def softmax_of_columns(p: Any, v: Any) -> Any:
    return jnp.einsum("bqhk,bhkd->bqhd", jax.nn.softmax(p), v)


TOGETHER: dict[str, tuple[Any, tuple[Any, ...], int]] = {
    "an attention": (attention, (HEADS, HEADS, HEADS), 2),
    "a smaller one": (attention, (heads(1, 8, 128, 32),) * 3, 1),
    "just as many rows": (attention, (heads(2, 32, 64, 32),) * 3, 2),
    "a choice": (functools.partial(attention, choose=True), (HEADS, HEADS, HEADS), 1),
    "no softmax": (functools.partial(attention, softmax=False), (HEADS, HEADS, HEADS), 0),
    "copied probabilities": (softmax_of_columns, (heads(4, 128, 8, 128), HEADS), 0),
    "JAX's own": (jax.nn.dot_product_attention, (heads(4, 128, 8, 32),) * 3, 1),
    "a sum": (lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k).sum(-1), (HEADS, HEADS), 1),
    "its logarithm": (
        lambda q, k: jax.nn.logsumexp(jnp.einsum("bhqd,bhkd->bhqk", q, k), -1), (HEADS, HEADS), 0,
    ),
}  # fmt: skip
"""Functions, what they take, and how many of their products become parts of a reduction's call."""


@pytest.mark.parametrize("what", TOGETHER)
def test_products_in_a_reductions_call(what: str) -> None:
    f, shapes, expected = TOGETHER[what]
    jaxpr = jax.make_jaxpr(f)(*shapes).jaxpr
    found, results = estimates._steps(jaxpr, jaxpr.invars)
    assert len(library.with_reductions([step for _, step in found], results)) == expected


@AS_COMPILED
@pytest.mark.parametrize("what", TOGETHER)
def test_compiled_programs_have_as_many_there(what: str) -> None:
    f, shapes, expected = TOGETHER[what]
    assert products_with_reductions(f, *shapes) == expected


def test_what_the_library_does_not_take_stays_apart() -> None:
    def reduced(how: Any, q: Any, k: Any) -> Any:
        return how(jnp.einsum("bhqd,bhkd->bhqk", q, k), axis=-1)

    for how, together in ((jnp.sum, True), (jnp.max, True), (jnp.prod, False)):
        spread = spread_of(functools.partial(reduced, how), HEADS, HEADS)
        assert (spread.products > 0, spread.tiles > 0) == (together, not together)
    half = jax.ShapeDtypeStruct(HEADS.shape, jnp.float16)  # Eigen's
    assert spread_of(functools.partial(reduced, jnp.sum), half, half).products == 0
    # One head: its product with the values is a matrix by itself.
    rows = jax.ShapeDtypeStruct((128, 512), jnp.float32)
    alone = spread_of(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, rows, rows, rows)
    assert alone.products > 0 and alone.tiles > 0


@pytest.mark.parametrize(
    ("pattern", "shape", "joined"),
    [
        ("bhqk,bhkd->bhqd", (4, 8, 128, 32), True),
        ("bhqk,bkhd->bqhd", (4, 128, 8, 32), True),  # copied first, and so turned
        ("bhqk,bhdk->bhqd", (4, 8, 32, 128), True),
        ("bhkq,bhkd->bhqd", (4, 8, 128, 32), False),  # along the probabilities' columns: Eigen's
    ],
)
def test_products_with_a_softmax(pattern: str, shape: tuple[int, ...], joined: bool) -> None:
    """As in programs of jaxlib 0.10.2."""
    scores = jax.ShapeDtypeStruct((4, 8, 128, 128), jnp.float32)
    values = jax.ShapeDtypeStruct(shape, jnp.float32)
    spread = spread_of(lambda p, v: jnp.einsum(pattern, jax.nn.softmax(p), v), scores, values)
    assert (spread.products > 0, spread.tiles > 0) == (joined, not joined)


def test_the_scores_may_be_transposed_before_the_softmax() -> None:
    q = jax.ShapeDtypeStruct((4, 128, 8, 32), jnp.float32)
    spread = spread_of(lambda q, k, v: jax.nn.dot_product_attention(q, k, v), q, q, q)
    assert spread.products > 0 and spread.tiles > 0  # jaxlib 0.10.2 copies before the second one


def test_a_call_of_the_library_is_handed_out_once_at_least() -> None:
    few = heads(1, 4, 128, 128)  # loops of 512 KB are handed out, and these not
    spread = spread_of(lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k).sum(-1), few, few)
    assert spread.products > 0 == spread.tiles and spread.forks == 1


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x, x.max()),
        lambda x: x + jnp.sum(3.0),
        lambda x: x + jnp.max(np.float32(3)),
        lambda x: (x.max(), x.max() - x),
        lambda x: jnp.exp(x - x.max()),
        lambda x: jax.nn.softmax(x * 0 + 1),
        lambda x: x[:0].sum(),
    ],
)
def test_reductions_of_anything(f: Any) -> None:
    fast = dfx.schedule(jax.jit(f), dfx.Branches())
    x = jnp.linspace(-1.0, 1.0, 300_000)
    for got, want in zip(jax.tree.leaves(fast(x)), jax.tree.leaves(f(x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "each"), [(8, 0.3), (32, 0.3), (64, 1.0)])
def test_small_products_of_steps_are_handed_out_quickly(rows: int, each: float) -> None:
    def steps(h: Any, w: Any) -> Any:
        return jax.lax.scan(lambda h, _: ((h @ w)[:, :256], None), h, None, length=10)[0]

    h = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
    w = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    assert forks(steps, h, w) == pytest.approx(10 * each)
    assert spread_of(steps, h, w).products > 0  # each of them is short

    def often(h: Any, w: Any) -> Any:
        return jax.lax.scan(lambda h, _: (steps(h, w), None), h, None, length=5)[0]

    assert forks(often, h, w) == pytest.approx(50 * each)
