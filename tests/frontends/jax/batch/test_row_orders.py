"""Rows in an order that data gives: programs that sort, gather, multiply by groups and put rows back.

What the proof accepts is run on nano-batches and compared; what looks like it and mixes rows is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cheap
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dynaflow_xla as dfx
from dynaflow_xla.batch import states
from dynaflow_xla.batch.row_orders import bounds
from dynaflow_xla.frontends.jax.batch import separability
from dynaflow_xla.frontends.jax.capture import capture

pytestmark = pytest.mark.usefixtures("quick_to_compile")

BATCH, SIZES = 9, (5, 4)
K, EXPERTS, D = 2, 4, 5
RNG = np.random.default_rng(3)
ROUTER = jnp.asarray(RNG.normal(size=(D, EXPERTS)))
WEIGHTS = jnp.asarray(RNG.normal(size=(EXPERTS, D, D)))
X = jnp.asarray(RNG.normal(size=(BATCH, D)))


def route(x: Any) -> tuple[Any, Any, Any]:
    """(weights, experts, the order that sorts tokens by expert), ``[B * K]`` each."""
    weights, experts = lax.top_k(jax.nn.softmax(x @ ROUTER), K)
    flat = experts.reshape(-1)
    return weights.reshape(-1), flat, jnp.argsort(flat)


def sizes(experts: Any) -> Any:
    return jnp.bincount(experts, length=EXPERTS)


def back(y: Any, order: Any, x: Any) -> Any:
    return jnp.zeros((x.shape[0], y.shape[1])).at[order // K].add(y)


def sorted_moe(x: Any) -> Any:
    w, e, order = route(x)
    y = lax.ragged_dot(x[order // K], WEIGHTS, sizes(e))
    return back(y * w[order][:, None], order, x)


def by_sorted_pairs(x: Any) -> Any:
    w, e, _ = route(x)
    e, order = lax.sort_key_val(e, jnp.arange(e.shape[0]))
    y = lax.ragged_dot(x[order // K], WEIGHTS, sizes(e))
    return back(y * w[order][:, None], order, x)


def by_repeated_tokens(x: Any) -> Any:
    w, e, order = route(x)
    tokens = jnp.repeat(jnp.arange(x.shape[0]), K)
    return back(lax.ragged_dot(x[tokens[order]], WEIGHTS, sizes(e)) * w[order][:, None], order, x)


def repeated_rows(x: Any) -> Any:
    w, e, order = route(x)
    y = lax.ragged_dot(jnp.repeat(x, K, 0)[order], WEIGHTS, sizes(e))
    return back(y * w[order][:, None], order, x)


def with_bias(x: Any) -> Any:
    w, e, order = route(x)
    y = lax.ragged_dot(x[order // K], WEIGHTS, sizes(e)) + WEIGHTS[:, 0][e[order]]
    return back(jax.nn.gelu(y) * w[order][:, None], order, x)


def by_scattered_inverse(x: Any) -> Any:
    w, e, order = route(x)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]))
    y = lax.ragged_dot(x[order // K], WEIGHTS, sizes(e))
    return (y[inverse].reshape(-1, K, D) * w.reshape(-1, K, 1)).sum(1)


def by_sorted_inverse(x: Any) -> Any:
    w, e, order = route(x)
    inverse = jnp.argsort(order).reshape(-1, K)
    y = lax.ragged_dot(x[order // K], WEIGHTS, sizes(e))
    return jnp.einsum("nkf,nk->nf", y[inverse], w.reshape(-1, K))


def by_scatter(x: Any) -> Any:
    w, e, order = route(x)
    y = lax.ragged_dot(x[order // K], WEIGHTS, sizes(e))
    y = jnp.zeros_like(y).at[order].set(y)
    return jnp.einsum("nkf,nk->nf", y.reshape(-1, K, D), w.reshape(-1, K))


def by_segments(x: Any) -> Any:
    w, e, order = route(x)
    y = lax.ragged_dot(jnp.take(x, order // K, axis=0), WEIGHTS, sizes(e))
    return jax.ops.segment_sum(y * jnp.take(w, order)[:, None], order // K, x.shape[0])


def one_expert(x: Any) -> Any:
    e = jnp.argmax(x @ ROUTER, -1)
    order = jnp.argsort(e)
    y = lax.ragged_dot(x[order], WEIGHTS, sizes(e))
    return jnp.zeros_like(y).at[order].set(y)


def layers(x: Any) -> Any:
    return lax.scan(lambda c, _: (c + sorted_moe(c), None), x, None, length=2)[0]


def recomputed(x: Any) -> Any:
    return jax.checkpoint(sorted_moe)(x)


def gradient(x: Any) -> Any:
    return jax.grad(lambda x: (sorted_moe(x) ** 2).sum())(x)


def with_sizes(x: Any, counted: Callable[[Any, Any], Any]) -> Any:
    """``counted``: of the experts and the order, the sizes of groups."""
    w, e, order = route(x)
    y = lax.ragged_dot(x[order // K], WEIGHTS, counted(e, order))
    return back(y * w[order][:, None], order, x)


def searched(x: Any) -> Any:
    ends = lambda e: jnp.searchsorted(jnp.sort(e), jnp.arange(EXPERTS), side="right")  # noqa: E731
    return with_sizes(x, lambda e, o: jnp.diff(ends(e), prepend=0))


def searched_from_both_sides(x: Any) -> Any:
    def counted(e: Any, order: Any) -> Any:
        at = [jnp.searchsorted(e[order], jnp.arange(EXPERTS), side=s) for s in ("left", "right")]
        return at[1] - at[0]

    return with_sizes(x, counted)


def searched_for_all_ends(x: Any) -> Any:
    bounds = np.arange(EXPERTS + 1)
    return with_sizes(x, lambda e, o: jnp.diff(jnp.searchsorted(e[o], bounds)))


def searched_from_one(x: Any) -> Any:
    ends = lambda e: jnp.searchsorted(jnp.sort(e), jnp.arange(EXPERTS) + 1)  # noqa: E731
    return with_sizes(x, lambda e, o: jnp.diff(ends(e), prepend=0).astype(jnp.int32))


def searched_pairs(x: Any) -> Any:
    w, e, _ = route(x)
    e, order = lax.sort_key_val(e, jnp.arange(e.shape[0]))
    ends = jnp.searchsorted(e, jnp.arange(EXPERTS), side="right")
    sizes_ = ends - jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    y = lax.ragged_dot(x[order // K], WEIGHTS, sizes_)
    return back(y * w[order][:, None], order, x)


def searched_two_experts_in_one(x: Any) -> Any:
    """Groups of several experts each, and experts that are in none."""
    ends = lambda e: jnp.searchsorted(jnp.sort(e), np.array([1, 1, 2, 3]))  # noqa: E731
    return with_sizes(x, lambda e, o: jnp.diff(ends(e), prepend=0))


def searched_layers(x: Any) -> Any:
    return lax.scan(lambda c, _: (c + searched(c), None), x, None, length=2)[0]


def searched_gradient(x: Any) -> Any:
    return jax.grad(lambda x: (searched_for_all_ends(x) ** 2).sum())(x)


def sums_by_group(x: Any) -> Any:
    """A total over the batch, which may be in any order."""
    _, e, order = route(x)
    return lax.ragged_dot(x[order // K], WEIGHTS, sizes(e)).sum(0)


ACCEPTED: list[Callable[[Any], Any]] = [
    sorted_moe, by_sorted_pairs, by_repeated_tokens, repeated_rows, with_bias, by_scattered_inverse,
    by_sorted_inverse, by_scatter, by_segments, one_expert, layers, recomputed, gradient,
    searched, searched_from_both_sides, searched_for_all_ends, searched_from_one, searched_pairs,
    searched_two_experts_in_one, searched_layers, searched_gradient,
]  # fmt: skip


def prove(fn: Callable[[Any], Any], out: Any = 0) -> Any:
    def traced(x: Any) -> Any:
        closed = jax.make_jaxpr(fn)(x)
        return capture.capture(closed, 0, fn.__name__), closed.consts

    whole, consts = traced(X)
    parts = {n: traced(X[:n]) for n in SIZES}
    return separability.prove(
        whole, {n: c for n, (c, _) in parts.items()}, batch=BATCH, in_axes=[0],
        out_axes=[out] * len(whole.outputs), consts=[consts, *(c for _, c in parts.values())],
    )  # fmt: skip


def evaluated(fn: Callable[[Any], Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The function of the whole batch, and of each nano-batch, compiled at once and in a hurry."""
    cuts = [slice(None), slice(0, SIZES[0]), slice(SIZES[0], BATCH)]
    run = jax.jit(lambda x: [fn(x[cut]) for cut in cuts], compiler_options=cheap.options())
    whole, *parts = map(np.asarray, run(X))
    return whole, parts


@pytest.mark.parametrize("fn", ACCEPTED, ids=lambda f: f.__name__)
def test_rows_that_come_back(fn: Callable[[Any], Any]) -> None:
    proof = prove(fn)
    assert proof.status == "separable", str(proof)
    whole, parts = evaluated(fn)
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-5)


def test_a_sum_over_items() -> None:
    proof = prove(sums_by_group, dfx.Sum())
    assert proof.status == "separable", str(proof)
    whole, parts = evaluated(sums_by_group)
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", [[4, 3, 2]], ids=str)
def test_scheduled_with_gradients(parts: Any) -> None:
    def loss(fn: Any, *args: Any) -> Any:
        return (fn(*args) ** 2).sum()

    def moe(x: Any, router: Any, weights: Any) -> Any:
        w, e = lax.top_k(jax.nn.softmax(x @ router), K)
        order = jnp.argsort(e.reshape(-1))
        y = lax.ragged_dot(x[order // K], weights, sizes(e.reshape(-1)))
        return back(y * w.reshape(-1)[order][:, None], order, x)

    split = dfx.schedule(moe, dfx.NanoBatch(parts), in_axes=(0, None, None))
    args = (X, ROUTER, WEIGHTS)
    np.testing.assert_allclose(split(*args), moe(*args), rtol=1e-5, atol=1e-5)
    got = jax.grad(lambda *a: loss(split, *a), (0, 1, 2))(*args)
    want = jax.grad(lambda *a: loss(moe, *a), (0, 1, 2))(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def _refused() -> dict[str, Callable[[Any], Any]]:
    def f(body: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda x: body(x, *route(x))

    def product(x: Any, order: Any, groups: Any) -> Any:
        return back(lax.ragged_dot(x[order // K], WEIGHTS, groups), order, x)

    def shifted(x: Any) -> Any:
        e = jnp.argmax(x @ ROUTER, -1) - 1
        order = jnp.argsort(e)
        counts = jax.nn.one_hot(e, EXPERTS, dtype=jnp.int32).sum(0)
        y = lax.ragged_dot(x[order], WEIGHTS, counts)
        return jnp.zeros_like(y).at[order].set(y)

    def wrapped(x: Any) -> Any:
        e = (
            jnp.argmax(x @ ROUTER, -1) - 1
        )  # -1 is counted as the last expert, and sorted to the front
        order = jnp.argsort(e)
        y = lax.ragged_dot(x[order], WEIGHTS, jnp.zeros(EXPERTS, int).at[e].add(1))
        return jnp.zeros_like(y).at[order].set(y)

    def orders_of_a_loop(x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            order = jnp.argsort(jnp.argmax(c @ ROUTER, -1))
            return jnp.roll(c, 1, 1) - 1, (order, c[order])

        orders, rows = lax.scan(body, x, None, length=2)[1]
        return jnp.zeros_like(x).at[orders[0]].set(rows[1])

    def sorted_carry(x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            return c[jnp.argsort(jnp.argmax(c @ ROUTER, -1))], None

        return lax.scan(body, x, None, length=2)[0]

    def capacity(x: Any, w: Any, e: Any, o: Any) -> Any:
        hot = jax.nn.one_hot(e, EXPERTS)
        kept = ((jnp.cumsum(hot, 0) * hot).sum(1) <= 2).astype(x.dtype)
        return (x[:, None] * (w * kept).reshape(-1, K, 1)).sum(1)

    def found(e: Any) -> Any:
        """Sizes of groups, if ``e`` is sorted."""
        return jnp.diff(jnp.searchsorted(e, jnp.arange(EXPERTS), side="right"), prepend=0)

    def swapped(x: Any, w: Any, e: Any, order: Any) -> Any:
        """Of each row the other expert, in the order of the one."""
        return product(x, order, found(e[order + 1 - 2 * (order % 2)]))

    def by_batch(e: Any) -> Any:
        ends = jnp.searchsorted(jnp.sort(e), jnp.arange(EXPERTS) + e.shape[0] // (2 * K) - 4)
        return jnp.diff(ends, prepend=0)

    return {
        "searched without an order": f(lambda x, w, e, o: product(x, o, found(e))),
        "searched in another order": lambda x: swapped(-x, *route(-x)),
        "searched in the order of columns": f(
            lambda x, w, e, o: product(x, o, found(e.reshape(-1, K).T.reshape(-1)[o]))
        ),
        "searched in another choice": f(
            lambda x, w, e, o: product(x, o, found(jnp.sort(EXPERTS - 1 - e)))
        ),
        "searched for what depends on the batch size": f(
            lambda x, w, e, o: product(x, o, by_batch(e))
        ),
        "rows returned as sorted": f(lambda x, w, e, o: x[o // K]),
        "order returned": f(lambda x, w, e, o: o),
        "inverse returned": f(lambda x, w, e, o: jnp.argsort(o)),
        "place in the order as a value": f(
            lambda x, w, e, o: x * jnp.argsort(o).reshape(-1, K)[:, :1]
        ),
        "number of the place as a factor": f(
            lambda x, w, e, o: back(x[o // K] * jnp.arange(o.shape[0])[:, None], o, x)
        ),
        "number of the row as a factor": f(lambda x, w, e, o: back(x[o // K] * o[:, None], o, x)),
        "sizes of other groups": f(lambda x, w, e, o: product(x, o, sizes((e + 1) % EXPERTS))),
        "sizes of another choice": f(
            lambda x, w, e, o: product(x, o, sizes(jnp.argmin(x @ ROUTER, -1)) * K)
        ),
        "sizes in another order": f(lambda x, w, e, o: product(x, o, sizes(e)[::-1])),
        "groups of rows that are not sorted": f(
            lambda x, w, e, o: lax.ragged_dot(x, WEIGHTS, sizes(e[::K]))
        ),
        "experts below 0, not counted": shifted,
        "experts below 0, counted elsewhere": wrapped,
        "the first places only": f(
            lambda x, w, e, o: back(
                jnp.where((jnp.arange(o.shape[0]) < 4)[:, None], x[o // K], 0), o, x
            )
        ),
        "capacity": f(capacity),
        "rows in order plus rows as they were": f(
            lambda x, w, e, o: back(x[o // K] + jnp.repeat(x, K, 0), o, x)
        ),
        "back by another order": f(lambda x, w, e, o: back(x[o // K], jnp.argsort(-e), x)),
        "the order twice": f(lambda x, w, e, o: x[o // K][o].reshape(-1, K, D).sum(1)),
        "regrouped while sorted": f(lambda x, w, e, o: x[o // K].reshape(-1, K, D).sum(1)),
        "accumulated while sorted": f(lambda x, w, e, o: back(jnp.cumsum(x[o // K], 0), o, x)),
        "rolled while sorted": f(lambda x, w, e, o: back(jnp.roll(x[o // K], 1, 0), o, x)),
        "softmax while sorted": f(lambda x, w, e, o: back(jax.nn.softmax(x[o // K], 0), o, x)),
        "a number off": f(lambda x, w, e, o: back(x[(o + 1) // K % BATCH], o, x)),
        "rows of half the number": f(lambda x, w, e, o: back(x[o // (2 * K)], o, x)),
        "the first of the order": f(lambda x, w, e, o: x + x[o // K][0]),
        "orders of two rounds": orders_of_a_loop,
        "a carry in order": sorted_carry,
    }


@pytest.mark.parametrize("name", _refused())
def test_rows_that_do_not_come_back(name: str) -> None:
    fn = _refused()[name]
    fn.__name__ = "mixes"
    try:
        whole, parts = evaluated(fn)
        got = np.concatenate(parts)
        same = got.shape == whole.shape and np.allclose(got, whole, rtol=1e-5, atol=1e-5)
    except ValueError:
        same = False
    assert not same, "this would be equal: no example of what mixes"
    proof = prove(fn)
    assert proof.status == "mixed", str(proof)


@pytest.mark.parametrize("fn", [searched_for_all_ends, sorted_moe], ids=lambda f: f.__name__)
def test_a_total_behind_them_joins_nothing_else(fn: Callable[[Any], Any]) -> None:
    """``x[order]`` in JAX adds the number of items to what is below 0: never, but in the program."""

    def centred(x: Any) -> Any:
        y = fn(x)
        return jnp.tanh(y - y.mean(0))

    fast = dfx.schedule(centred, dfx.NanoBatch([4, 3, 2]), in_axes=0)
    np.testing.assert_allclose(fast(X), centred(X), rtol=1e-4, atol=1e-5)
    joined = [line for line in dfx.explain(fast, X).splitlines() if "joined:" in line]
    assert joined and all("its total is completed" in line for line in joined), joined


def test_groups_by_bounds() -> None:
    """Sizes that are taken for those of groups give each item a group that follows from its own integer."""
    random = np.random.default_rng(5)
    taken = 0
    for _ in range(3000):
        low, high = sorted(random.integers(-2, 5, 2).tolist())
        key = states.Key(*(n if random.random() < 0.7 else None for n in (low, high)))
        origin = states.SummedBy("scan", None)
        items = states.InOrder(
            states.Permutation(1, 1, origin, key), states.Rows(0), key, rising=True
        )
        wanted = random.integers(-3, 6, 4).tolist()
        if random.random() < 0.7:
            wanted.sort()
        after = bool(random.random() < 0.5)
        ends = bounds.searched(items, wanted, origin, after=after)
        assert ends is not None
        start = bounds.joined([states.Same(0, 0), ends], [1, 4])
        assert start is not None
        made = bounds.added(
            [bounds.taken(start, slice(1, None)), bounds.taken(start, slice(0, -1))], (1, -1), 4
        )
        if made is None or not bounds.divides(made):
            continue
        taken += 1
        group: dict[int, int] = {}
        for _ in range(6):
            e = np.sort(random.integers(low, high + 1, random.integers(1, 9)))
            side = "right" if after else "left"
            sizes_ = np.diff(np.searchsorted(e, wanted, side=side), prepend=0)
            assert (sizes_ >= 0).all()
            for place, integer in enumerate(e.tolist()):
                mine = int((np.cumsum(sizes_) <= place).sum())
                assert group.setdefault(integer, mine) == mine
    assert taken > 1000


def test_the_message_names_the_sort() -> None:
    def returned(x: Any) -> Any:
        return x[jnp.argsort(x[:, 0])]

    with pytest.raises(dfx.SeparabilityError, match=r"sort at .*test_row_orders.*sorts the batch"):
        dfx.plan(dfx.schedule(returned, dfx.NanoBatch(2, joins=False), in_axes=0), X)
