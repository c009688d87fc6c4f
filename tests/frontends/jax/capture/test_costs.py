"""Costs of operators: what is handed out, and how often."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jaxprs import walked  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla import machine  # noqa: E402
from dynaflow_xla.frontends.jax.capture import costs  # noqa: E402
from dynaflow_xla.frontends.jax.capture.costs import Applied, estimates, in_their_readers  # noqa: E402
from dynaflow_xla.ir.work import spread_over  # noqa: E402

pytestmark = pytest.mark.usefixtures("assumed_numbers", "two_cores")

LARGE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def forks(f: Any, *shapes: Any) -> float:
    """Of the graph; cores save the same by it as by the function as a whole."""
    fast = dfx.schedule(jax.jit(f), dfx.Sequential(), backend="ffi")
    graph = dfx.graph(fast, *(jnp.zeros(s.shape, s.dtype) for s in shapes))
    spread = spread_over(region.spread for region in graph.regions)
    jaxpr = jax.make_jaxpr(f)(*shapes)
    whole = costs.original_ns(jaxpr, 1) - costs.original_ns(jaxpr, 2)
    assert whole == pytest.approx(spread.saved_ns(2), rel=1e-6)
    return spread.forks


def test_a_chain_of_loops_is_handed_out_once() -> None:
    assert forks(lambda x: jnp.tanh(x * 2 + 1) - x, LARGE) == 1
    assert forks(lambda x: (jnp.tanh(x), jnp.sin(x)), LARGE) == 2
    assert forks(lambda x: jnp.exp(x - 1).sum(-1), LARGE) == 1  # inside of the sum
    assert forks(lambda x: jnp.tanh(x) @ jnp.cos(x), LARGE) == 3  # the product reads memory
    assert forks(lambda x: jnp.sort(jnp.tanh(x) + 1), LARGE) == 1


def test_calls_are_looked_through() -> None:
    assert forks(lambda x: jax.nn.silu(x * 2) + 1, LARGE) == 1
    assert forks(lambda x: jax.nn.relu(jnp.clip(x * 3, 0, 1)) - 1, LARGE) == 1
    assert forks(lambda x: jax.nn.relu(jax.nn.relu(x) * 2) * jax.nn.relu(x), LARGE) == 1

    def steps(h: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda h, x: (jax.nn.relu(h * 2 + x), None), h, xs)[0]

    steps_of_loops = forks(steps, LARGE, jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32))
    assert steps_of_loops == pytest.approx(4 * 0.15)  # no products: handed out quickly


def test_a_chain_is_handed_out_if_any_part_of_it_would_be() -> None:
    mask = jax.ShapeDtypeStruct((110_000,), jnp.bool_)
    long = jax.ShapeDtypeStruct((110_000,), jnp.float32)
    assert forks(lambda x, m: (x > 0) & m, long, mask) == 1
    assert forks(lambda m: ~m, mask) == 0


def test_a_reshape_is_what_reads_it() -> None:
    assert forks(lambda x: jnp.tanh(x).reshape(-1) * 2, LARGE) == 1
    assert forks(lambda x: jnp.sort((jnp.tanh(x) * 2).reshape(-1)), LARGE) == 1
    steps = [
        Applied("tanh", "x", "a"),
        Applied("reshape", "a", "b"),
        Applied("dot_general", "b", "c"),
    ]
    assert in_their_readers(steps, "c") == set()
    steps[2] = Applied("mul", "b", "c")
    assert in_their_readers(steps, "c") == {0, 1}
    assert in_their_readers(steps, "ca") == {1}
    assert in_their_readers(steps, "cb") == set()


def test_a_value_with_two_readers_is_made_if_one_needs_it_in_memory() -> None:
    steps = [Applied("tanh", "x", "a"), Applied("mul", "ab", "c"), Applied("sort", "a", "d")]
    assert in_their_readers(steps, "cd") == set()
    steps[2] = Applied("reduce_max", "a", "d")
    assert in_their_readers(steps, "cd") == set()  # XLA would not compute tanh twice
    steps[0] = Applied("add", "x", "a")
    assert in_their_readers(steps, "cd") == {0}


def rotated(x: Any, c: Any, s: Any) -> Any:
    left, right = jnp.split(x, 2, -1)
    return x * c + jnp.concatenate([-right, left], -1) * s


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: [jnp.tanh(part) for part in jnp.split(x * 2, 2, -1)], 2),
        (lambda x: jnp.pad(x * 2, 1) * 3, 1),
        (lambda x: (x * 2)[::-1] * 3 + 1, 1),
        (lambda x: jnp.repeat(x * 2, 2, axis=1) + 1, 1),
        (lambda x: (x * 2)[jnp.arange(512) * 2] + 1, 1),
        (lambda x: jax.lax.dynamic_slice_in_dim(x * 2, 3, 512) + 1, 1),
        (lambda x: jax.lax.dynamic_update_slice_in_dim(x * 2, x[:100] * 3, 5, 0) + 1, 1),
        (lambda x: jnp.concatenate([x * 2, x + 1], 0), 1),
        (lambda x: jnp.concatenate([x * i for i in range(1, 10)], 0), 10),  # too many parts
        (lambda x: jnp.concatenate([x * 2] * 9, 0) + 1, 3),
        (lambda x: jnp.concatenate([jnp.sin(x), x * 2], -1) * 3, 4),  # rows are copied
        (lambda x: rotated(x, x, x), 4),
        (lambda x: rotated(x.reshape(-1, 64), x.reshape(-1, 64), x.reshape(-1, 64)), 1),
    ],
)
def test_loops_that_place_elements_are_parts_of_others(f: Any, expected: int) -> None:
    """As many as compiled programs of jaxlib 0.10.2 have."""
    assert forks(f, LARGE) == expected


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
    fast = dfx.schedule(jax.jit(f), dfx.Sequential(), backend="ffi")
    graph = dfx.graph(fast, *(jnp.ones(s.shape, s.dtype) for s in shapes))
    spread = spread_over(region.spread for region in graph.regions)
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


def spread_of(f: Any, *shapes: Any) -> Any:
    return estimates._inner(jax.make_jaxpr(f)(*shapes), estimates._spreading).spread


@pytest.mark.parametrize("step", [lambda x, n: x + n, lambda x, n: x * x])
def test_long_chains_take_no_time(step: Any) -> None:
    def late(q: Any, k: Any) -> Any:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        for n in range(1500):
            scores = step(scores, n)
        return scores.sum(-1)

    assert spread_of(late, HEADS, HEADS).tiles == 0


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
    few = jax.ShapeDtypeStruct(
        (1, 4, 128, 128), jnp.float32
    )  # loops of 512 KB are handed out, and these not
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


def test_a_conversion_is_a_loop() -> None:
    half = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    assert forks(lambda x, w: jnp.tanh(x).astype(w.dtype) @ w, LARGE, half) == 2


def test_functions_of_the_c_library_cost_what_they_take() -> None:
    def ns(f: Any) -> float:
        return costs.original_ns(jax.make_jaxpr(f)(LARGE), 1)

    assert ns(jnp.arccos) > 20 * ns(jnp.exp) and ns(jnp.sin) > 5 * ns(jnp.tanh)
    assert ns(jnp.sqrt) < ns(jnp.exp)


def one_core_ns(f: Any, *shape: int) -> float:
    return costs.original_ns(jax.make_jaxpr(f)(jax.ShapeDtypeStruct(shape, jnp.float32)), 1)


def test_decompositions_cost_what_is_asked_of_them() -> None:
    linalg = jax.lax.linalg
    both = one_core_ns(linalg.svd, 256, 256)
    assert one_core_ns(lambda x: linalg.svd(x, compute_uv=False), 256, 256) < 0.6 * both
    values = one_core_ns(
        lambda x: linalg.eig(
            x, compute_left_eigenvectors=False, compute_right_eigenvectors=False
        ),
        256, 256,
    )  # fmt: skip
    assert values < 0.8 * one_core_ns(linalg.eig, 256, 256)
    one, several = (one_core_ns(linalg.lu, *lead, 64, 64) for lead in ((), (8,)))
    assert 6 < several / one < 9
    # Few right-hand sides take much longer each, and many in proportion.
    few, many, more = (
        one_core_ns(lambda x, n=n: linalg.triangular_solve(x, x[:, :n], left_side=True), 512, 512)
        for n in (8, 256, 512)
    )
    assert 8 < many / few < 24 and 1.7 < more / many < 2.1


def test_several_decompositions_are_shared_out_by_xla() -> None:
    def shared(f: Any, *shape: int) -> float:
        jaxpr = jax.make_jaxpr(f)(jax.ShapeDtypeStruct(shape, jnp.float32))
        return costs.original_ns(jaxpr, 2) / costs.original_ns(jaxpr, 1)

    assert shared(jnp.linalg.svd, 8, 128, 128) < 0.75
    assert shared(jnp.linalg.svd, 128, 128) > 1.1  # OpenBLAS's threads make it longer
    assert (
        shared(lambda x: jax.lax.linalg.qr(x), 8, 128, 128) > 1.0
    )  # one call each, of such threads


def test_narrow_convolutions_may_be_shared_out_after_all() -> None:
    def conv(x: Any, k: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def spread(width: int, channels: int) -> Any:
        fast = dfx.schedule(jax.jit(conv), dfx.Sequential(), backend="ffi")
        args = jnp.zeros((8, width, width, channels)), jnp.zeros((3, 3, channels, channels))
        (region,) = dfx.graph(fast, *args).regions
        return region.spread

    narrow, wide = spread(32, 64), spread(16, 128)
    assert narrow.tiles > 0 == narrow.convolutions == narrow.forks
    assert wide.convolutions > 0 == wide.tiles and wide.forks == 1
    assert narrow.saved_ns(2) == 0 < narrow.unsure_ns(2)


@pytest.mark.parametrize(
    ("given", "shared"),
    [
        ({}, False),  # one tile a row
        ({"lhs_dilation": (2, 2)}, True),  # YNNPACK has none: left to Eigen
        ({"feature_group_count": 4}, False),
        ({"dtype": jnp.float16}, True),
        ({"channels": 16}, True),
        ({"channels": 128}, True),
        ({"spatial": 1}, True),
        ({"spatial": 3}, True),
    ],
)
def test_convolutions(given: dict[str, Any], shared: bool) -> None:
    given = dict(given)
    channels, spatial = given.pop("channels", 64), given.pop("spatial", 2)
    dtype = given.pop("dtype", jnp.float32)
    space = "DHW"[3 - spatial :]
    names = f"N{space}C", f"{space}IO", f"N{space}C"
    inner = channels // given.get("feature_group_count", 1)

    def conv(x: Any, k: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, k, (1,) * spatial, [(1, 1)] * spatial, dimension_numbers=names, **given
        )

    x = jax.ShapeDtypeStruct((8, *(32,) * spatial, channels), dtype)
    k = jax.ShapeDtypeStruct((*(3,) * spatial, inner, channels), dtype)
    (eqn,) = jax.make_jaxpr(conv)(x, k).eqns
    made = costs.estimate(eqn).spread
    assert (made.forks, made.tiles > 0) == ((1, False) if shared else (0, True))


@pytest.mark.parametrize("spatial", [1, 2])
def test_windows_are_collected_pixel_by_pixel_where_channels_are_few(spatial: int) -> None:
    """Eigen's convolutions: three channels of an image take two thirds of the time of sixteen."""
    # A row of a window lies side by side in memory.
    space = "HW"[:spatial]
    names = f"N{space}C", f"{space}IO", f"N{space}C"

    def cost(channels: int, window: int) -> float:
        def conv(x: Any, k: Any) -> Any:
            return jax.lax.conv_general_dilated(
                x, k, (1,) * spatial, "SAME", dimension_numbers=names
            )

        x = jax.ShapeDtypeStruct((4, *(64,) * spatial, channels), jnp.float32)
        k = jax.ShapeDtypeStruct((*(window,) * spatial, channels, 16), jnp.float32)
        (eqn,) = jax.make_jaxpr(conv)(x, k).eqns
        return costs.estimate(eqn).ns

    assert 0.4 < cost(3, 3) / cost(16, 3) < 0.8
    assert cost(1, 5) / cost(1, 3) == pytest.approx((5 / 3) ** (spatial - 1), rel=0.15)
    assert cost(32, 3) > cost(16, 3)


def test_loops_that_vectors_do_not_help_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the speed of vectors leaves the C library's functions, and the first largest, as they are."""

    def cost(f: Any, dtype: Any = jnp.float32) -> float:
        (eqn,) = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((1 << 17,), dtype)).eqns
        return costs.estimate(eqn).ns

    def speeds(**given: float) -> None:
        made = dataclasses.replace(
            machine.numbers(), speeds={f"jax {kind}": speed for kind, speed in given.items()}
        )
        monkeypatch.setattr(machine, "numbers", lambda: made)

    scalar = (jax.lax.atan, lambda x: jax.lax.rem(x, x), lambda x: jax.lax.argmax(x, 0, jnp.int32))
    speeds(elements=1.0, serial=1.0)
    before = [cost(f) for f in (*scalar, jax.lax.exp)]
    assert cost(jax.lax.exp, jnp.complex64) > 10 * before[-1]
    speeds(elements=2.0, serial=1.0)
    *same, faster = (cost(f) for f in (*scalar, jax.lax.exp))
    assert same == pytest.approx(before[:-1])
    assert faster == pytest.approx(before[-1] / 2)


def test_indices_of_elements_and_of_rows() -> None:
    x, i = jnp.zeros((512, 256)), jnp.zeros((512, 256), jnp.int32)

    def cost(f: Any) -> float:
        jaxpr = jax.make_jaxpr(f)(x, i)
        names = ("gather", "scatter-add")
        (eqn,) = [e for e in walked(jaxpr) if e.primitive.name in names]
        return costs.estimate(eqn).ns

    rows, elements = cost(lambda x, i: x[i[:, 0]]), cost(lambda x, i: jnp.take_along_axis(x, i, 1))
    assert 2 * rows < elements
    rows = cost(lambda x, i: x.at[i[:, 0]].add(x))
    assert rows < cost(lambda x, i: x.reshape(-1).at[i.reshape(-1)].add(x.reshape(-1)))


def test_the_largest_of_many_short_rows() -> None:
    def cost(rows: int, width: int, kept: int) -> float:
        x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
        (eqn,) = jax.make_jaxpr(lambda x: jax.lax.top_k(x, kept))(x).eqns
        return costs.estimate(eqn).ns

    assert cost(512, 256, 8) > 3 * cost(4, 32768, 8)
    assert cost(512, 256, 8) > 2 * cost(512, 256, 2)
    x = jax.ShapeDtypeStruct((32768, 4), jnp.float32)
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.top_k(x, 8, axis=0))(x).eqns
    assert costs.estimate(eqn).ns == pytest.approx(cost(4, 32768, 8))


@pytest.mark.parametrize(
    ("pattern", "x", "w", "dtype", "shared"),
    [
        ("mk,kn->mn", (64, 256), (256, 256), "float32", False),
        ("mk,kn->mn", (64, 256), (256, 256), "int32", True),  # not YNNPACK's: by operations
        ("mk,kn->mn", (256, 256), (256, 256), "bfloat16", True),
        ("mkl,kln->mn", (256, 16, 16), (16, 16, 256), "float32", True),  # summed over two axes
        ("mk,kn->mn", (0, 256), (256, 256), "float32", False),
        ("k,kn->n", (2048,), (2048, 2048), "float32", False),  # a vector waits for no thread
    ],
)
def test_products(pattern: str, x: Any, w: Any, dtype: str, shared: bool) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in (x, w)]
    jaxpr = jax.make_jaxpr(lambda x, w: jnp.einsum(pattern, x, w))(*shapes)
    found = [e for e in jaxpr.eqns if e.primitive.name in ("dot_general", "jit", "pjit")]
    assert sum(costs.estimate(eqn).spread.forks for eqn in found) == shared


@pytest.mark.parametrize(("pattern", "apart"), [
    ("bqhd,bkhd->bhqk", 2), ("bhqd,bkhd->bhqk", 1), ("bhqd,bhkd->bhqk", 0), ("bqd,bkd->bqk", 0),
    ("qbd,kbd->bqk", 2), ("qd,kd->qk", 0), ("dq,kd->qk", 0),
])  # fmt: skip
def test_factors_whose_matrices_do_not_lie_one_after_another_are_copied(
    pattern: str, apart: int
) -> None:
    sizes = {"b": 4, "h": 8, "q": 64, "k": 64, "d": 32}
    ins, _ = pattern.split("->")
    shapes = [tuple(sizes[c] for c in dims) for dims in ins.split(",")]
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    (product,) = [
        eqn
        for eqn in walked(jax.make_jaxpr(lambda x, y: jnp.einsum(pattern, x, y))(*given))
        if eqn.primitive.name == "dot_general"
    ]
    work = estimates._primitive(product, "dot_general", product.params)
    count = given[0].size
    plain = work.flops / estimates.GEMM_FLOPS_PER_NS + estimates.OP_OVERHEAD_NS
    assert work.ns - plain == pytest.approx(apart * count * estimates.GEMM_LAID_OUT_NS)


@pytest.mark.parametrize(("shape", "axes", "slow"), [
    ((65536, 8), (1,), True), ((8, 65536), (1,), False), ((2, 64, 64, 64), (0,), True),
    ((64, 64, 128), (0, 1), False), ((64, 128, 64), (1,), False),
])  # fmt: skip
def test_reductions_of_short_rows_and_across_large_planes_take_longer(
    shape: tuple[int, ...], axes: tuple[int, ...], slow: bool
) -> None:
    (eqn,) = jax.make_jaxpr(lambda x: x.sum(axes))(jax.ShapeDtypeStruct(shape, jnp.float32)).eqns
    made = estimates._primitive(eqn, eqn.primitive.name, eqn.params)
    plain = max(0.05 * eqn.invars[0].aval.size, made.bytes_moved / estimates.BYTES_PER_NS)
    assert (made.ns - estimates.OP_OVERHEAD_NS > 2 * plain) == slow
