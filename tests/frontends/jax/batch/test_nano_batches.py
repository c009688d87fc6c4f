"""Splitting the batch: axes, sizes, merges, sharing, what strategies may ask for."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.planning.instructions import Launch, Merge, Slice

pytestmark = pytest.mark.usefixtures("quick_to_compile")

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4)), jnp.float32)


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def split(fn: Any, sizes: Any = 2, *, in_axes: Any = 0, lanes: int = 1, **options: Any) -> Any:
    made = sizes if isinstance(sizes, dfx.Strategy) else dfx.NanoBatch(sizes)
    return dfx.schedule(fn, made, in_axes=in_axes, lanes=lanes, **options)


def launches(fast: Any, *args: Any, **kwargs: Any) -> list[str]:
    made = dfx.plan(fast, *args, **kwargs)
    return [i.name for i in made.instructions if isinstance(i, Launch)]


# -- axes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [2, [5, 1], [1, 2, 3], 6])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("out", [0, 1, -1])
def test_any_axis(axis: int, out: int, sizes: Any, assert_same: Any) -> None:
    """Neither need the batch lie in front, nor nano-batches be contiguous or aligned."""

    def f(x: Any, w: Any) -> Any:
        rows = jnp.moveaxis(x, axis, 0)
        return jnp.moveaxis(jnp.sin(rows) @ w, 0, out)

    x = jnp.moveaxis(jnp.sin(jnp.arange(6.0 * 5 * 3)).reshape(6, 5, 3), 0, axis)
    w = jnp.cos(jnp.arange(9.0)).reshape(3, 3)
    fast = split(f, sizes, in_axes=(axis, None), out_axes=out)
    assert_same(fast.original(x, w), fast(x, w))


@pytest.mark.parametrize("width", [16, 5])
def test_contiguous_rows_are_views_and_results_are_written_in_place(
    width: int, assert_same: Any
) -> None:
    """Rows of 64 bytes can be read where they are, others are cut by the region."""
    x = jnp.sin(jnp.arange(6.0 * width)).reshape(6, width)
    fast = split(lambda v: jnp.sort(v) * 2)
    made = dfx.plan(fast, x)
    assert sum(isinstance(i, Slice) for i in made.instructions) == (2 if width == 16 else 1)
    assert sum(isinstance(i, Merge) for i in made.instructions) == 1
    assert "merge" not in " ".join(launches(fast, x))
    assert ("cut inside" in dfx.explain(fast, x)) == (width != 16)
    assert_same(fast.original(x), fast(x))


def test_axes_as_for_vmap_with_trees_and_kwargs(assert_same: Any) -> None:
    def f(tree: Any, w: Any, *, more: Any, name: str = "a") -> Any:
        y = layer(tree["x"], w["w"]) + tree["y"][0].T
        return {"y": y, "more": (more[0] * 2, None), "w": w["w"] + 1, "name": more[1]}

    tree = {"x": X, "y": [X.T, None], "none": None}
    more = (X[:, 0], X)
    axes = {"x": 0, "y": [1, None], "none": None}
    out = {"y": 0, "more": 0, "w": None, "name": 0}
    fast = split(f, in_axes=(axes, None), out_axes=out)
    assert_same(fast.original(tree, {"w": W}, more=more), fast(tree, {"w": W}, more=more))
    prefix = split(f, [2, 4], in_axes=[axes, None], out_axes=out)
    assert_same(prefix.original(tree, {"w": W}, more=more), prefix(tree, {"w": W}, more=more))


def test_one_axis_for_all_arguments(assert_same: Any) -> None:
    fast = split(lambda a, b: (a["p"] * b, b), in_axes=1, out_axes=1)
    args = {"p": X.T}, X.T
    assert_same(fast.original(*args), fast(*args))


@pytest.mark.parametrize("how", ["argnums", "argnames", "keyword"])
def test_static_arguments(how: str, assert_same: Any) -> None:
    def f(x: Any, power: int, flip: bool = False) -> Any:
        return jnp.flip(x**power, 1) if flip else x**power

    if how == "argnums":
        fast = split(jax.jit(f, static_argnums=(1, 2)), in_axes=0)
        args, kwargs = (X, 2, True), {}
    elif how == "argnames":
        fast = split(jax.jit(f, static_argnames=("power", "flip")), in_axes=(0, None))
        args, kwargs = (X, 3), {"flip": True}
    else:
        fast = split(jax.jit(f, static_argnames=("power", "flip")), in_axes=(0,))
        args, kwargs = (X,), {"power": 3, "flip": True}
    assert_same(fast.original(*args, **kwargs), fast(*args, **kwargs))
    assert any(name.endswith("@1") for name in launches(fast, *args, **kwargs))


def test_donated(assert_same: Any) -> None:
    fast = split(jax.jit(layer, donate_argnums=0), in_axes=(0, None))
    want = layer(X, W)
    x = jnp.copy(X)
    assert_same(want, fast(x, W))


def test_numpy_and_scalars(assert_same: Any) -> None:
    fast = split(lambda x, s: x * s, in_axes=(0, None))
    assert_same(fast.original(np.asarray(X), 2.0), fast(np.asarray(X), 2.0))


def test_inside_shapes_only() -> None:
    fast = split(layer, in_axes=(0, None))
    spec = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    assert len(launches(fast, spec, W)) == 2
    assert jax.eval_shape(fast, spec, W).shape == (6, 4)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "sizes"), [(1, []), (2, [1, 1]), (3, [1, 1, 1]), (5, [2, 1, 1, 1])]
)
def test_a_batch_smaller_than_the_nano_batches(
    batch: int, sizes: list[int], assert_same: Any
) -> None:
    fast = split(layer, dfx.NanoBatch(4), in_axes=(0, None))
    x = X[:batch]
    assert_same(fast.original(x, W), fast(x, W))
    note = f"split into nano-batches of {sizes}"
    assert (note in dfx.explain(fast, x, W)) == bool(sizes)


def test_an_empty_batch(assert_same: Any) -> None:
    fast = split(layer, in_axes=(0, None))
    assert_same(fast.original(X[:0], W), fast(X[:0], W))


def test_dual_batch_of_one_row(assert_same: Any) -> None:
    fast = split(layer, dfx.DualBatch(), in_axes=(0, None))
    assert_same(fast.original(X[:1], W), fast(X[:1], W))


@pytest.mark.parametrize(
    ("weights", "count", "sizes"),
    [
        ([1, 1, 1, 1, 1, 1], 2, (3, 3)),
        ([9, 1, 1, 1, 1, 1], 2, (1, 5)),
        ([1, 1, 1, 1, 1, 9], 2, (5, 1)),
        ([0, 0, 6, 0, 0, 6], 2, (3, 3)),
        ([5, 5, 5, 1, 1, 1], 3, (1, 1, 4)),
        ([1, 2], 2, (1, 1)),
        ([100, 0, 0], 3, (1, 1, 1)),
        ([3.5], 1, (1,)),
    ],
)
def test_balanced(weights: list[float], count: int, sizes: tuple[int, ...]) -> None:
    assert dfx.Split.balanced(weights, count).sizes == sizes
    assert dfx.Split.balanced(np.asarray(weights), count).sizes == sizes


def test_balanced_by_the_users_context(assert_same: Any) -> None:
    tokens = np.array([7, 1, 1, 1, 1, 3])
    fast = split(
        layer, dfx.NanoBatch(2, weights="tokens"), in_axes=(0, None), context={"tokens": tokens}
    )
    assert "nano-batches of [1, 5]" in dfx.explain(fast, X, W)
    assert_same(fast.original(X, W), fast(X, W))


def test_context_with_what_has_no_hash(assert_same: Any) -> None:
    """The context is only handed on: it may hold anything."""
    seen = []

    class Looks(dfx.Strategy):
        def split(self, ctx: Any) -> Any:
            seen.append((ctx.user["tokens"]["a"], ctx.batch_size, ctx.lanes, ctx.platform))
            return dfx.Split.even(2)

        def schedule(self, s: Any) -> None:
            assert s.context.user["tokens"]["a"] == [1, 2]
            while ready := s.ready():
                s.execute(ready[0])

    user = {"tokens": {"a": [1, 2]}, "set": {3}, "array": np.arange(3)}
    fast = split(layer, Looks(), in_axes=(0, None), context=user)
    assert_same(fast.original(X, W), fast(X, W))
    assert seen == [([1, 2], 6, 1, "cpu")]


def test_a_strategy_that_looks_at_shapes_splits_derivatives_alike(assert_same: Any) -> None:
    """The passes of a derivative have other inputs; they are split as the function was."""

    class ByShape(dfx.Strategy):
        def split(self, ctx: Any) -> Any:
            return dfx.Split.of_sizes([2, 4] if ctx.shapes == ((6, 4), (4, 4)) else [1, 1, 4])

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                s.execute(ready[0])

    fast = split(layer, ByShape(), in_axes=(0, None))
    want = jax.grad(lambda x, w: layer(x, w).sum(), (0, 1))(X, W)
    assert_same(want, jax.grad(lambda x, w: fast(x, w).sum(), (0, 1))(X, W))


# -- results ---------------------------------------------------------------------------------------


def test_sums_and_means_are_weighted_by_size(assert_same: Any) -> None:
    def f(x: Any) -> Any:
        return x.sum(0), x.mean(0), (x**2).mean()

    fast = split(f, [1, 5], out_axes=(dfx.Sum(), dfx.Mean(), dfx.Mean()))
    assert_same(fast.original(X), fast(X))


@pytest.mark.parametrize(
    "dtype",
    [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64, jnp.int8, jnp.int32, jnp.uint32],
)
def test_sums_of_every_type(dtype: Any, assert_same: Any) -> None:
    x = (X * 3).astype(dtype)

    def f(v: Any) -> Any:
        return v.sum(0, dtype=v.dtype)

    for sizes in ([3, 3], [1, 5], 6):
        fast = split(f, sizes, out_axes=dfx.Sum())
        assert_same(fast.original(x), fast(x))
    if jnp.issubdtype(dtype, jnp.inexact):
        mean = split(lambda v: v.mean(0, dtype=v.dtype), [4, 2], out_axes=dfx.Mean())
        assert_same(mean.original(x), mean(x))


def test_many_bf16_parts_are_summed_wide() -> None:
    """32 parts of 1 and a little: added up in bf16, each sum would lose what is below 1/16."""
    x = jnp.full((32, 8), 1 + 1 / 64, jnp.bfloat16)
    fast = split(lambda v: v.sum(0), 32, out_axes=dfx.Sum())
    np.testing.assert_array_equal(np.asarray(fast(x), np.float32), 32.5)


def test_results_that_are_arguments_constants_or_repeated(assert_same: Any) -> None:
    def f(x: Any, w: Any, s: Any) -> Any:
        y = jnp.sin(x)
        return x, x, w, y, y, jnp.float32(2), jnp.arange(3), s, y.T

    fast = split(f, [4, 2], in_axes=(0, None, 0), out_axes=(0, 0, None, 0, 0, None, None, 0, 1))
    args = X, W, X[:, 0]
    assert_same(fast.original(*args), fast(*args))
    back = jax.grad(
        lambda *a: sum(jnp.sum(r * (n + 1.0)) for n, r in enumerate(fast(*a))), (0, 1, 2)
    )
    want = jax.grad(lambda *a: sum(jnp.sum(r * (n + 1.0)) for n, r in enumerate(f(*a))), (0, 1, 2))
    assert_same(want(*args), back(*args))


def test_what_does_not_depend_on_the_batch_runs_once() -> None:
    def f(x: Any, w: Any) -> Any:
        with dfx.mark("weights"):
            v = jnp.linalg.cholesky(w @ w.T + jnp.eye(4))
        with dfx.mark("rows"):
            return jnp.sort(x @ v), v

    fast = split(f, 3, in_axes=(0, None), out_axes=(0, None))
    names = launches(fast, X, W)
    assert [n for n in names if n.startswith("weights")] == ["weights@0"]
    assert sorted(n for n in names if n.startswith("rows")) == ["rows@0", "rows@1", "rows@2"]
    assert "run once for all" in dfx.explain(fast, X, W)
    dfx.verify(fast, X, W)


# -- closed-over values ----------------------------------------------------------------------------


def test_closed_over_arrays(assert_same: Any) -> None:
    table = jnp.cos(jnp.arange(8.0)).reshape(2, 4)
    fast = split(lambda x: x * table[0] + W[1], [2, 4])
    assert_same(fast.original(X), fast(X))


def test_closed_over_tracers(assert_same: Any) -> None:
    def outer(x: Any, w: Any) -> Any:
        fast = split(lambda v: jnp.tanh(v @ w), [2, 4])
        return fast(x)

    assert_same(layer(X, W), jax.jit(outer)(X, W))
    want = jax.grad(lambda w: layer(X, w).sum())(W)
    assert_same(want, jax.grad(lambda w: outer(X, w).sum())(W))
    assert_same(want, jax.jit(jax.grad(lambda w: outer(X, w).sum()))(W))


def test_a_traced_value_that_follows_the_batch_is_refused() -> None:
    def outer(x: Any, y: Any) -> Any:
        def f(v: Any) -> Any:
            return v * y[: v.shape[0]]

        return split(f)(x)

    with pytest.raises(dfx.SeparabilityError):
        jax.jit(outer)(X, X)


# -- several nano-batches as one region ------------------------------------------------------------


class Grouped(dfx.Strategy):
    """Splits into three; runs ``names`` of nano-batches 0 and 2 as one batch, the rest alone."""

    def __init__(self, *names: str, sizes: tuple[int, ...] = (1, 2, 3)) -> None:
        self.names, self.sizes = names, sizes

    def split(self, ctx: Any) -> Any:
        return dfx.Split.of_sizes(self.sizes)

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            op = ready[0]
            pair = [h for h in ready if h.name == op.name and h.nano in (0, 2)]
            if op.name in self.names and op.nano != 1:
                if len(pair) == 2:
                    s.execute(pair)
                    continue
                op = next(h for h in ready if h.name != op.name or h.nano == 1)
            s.execute(op)

    def __repr__(self) -> str:
        return f"Grouped({self.names})"


def three_steps(x: Any, w: Any) -> Any:
    with dfx.mark("first"):
        a = jnp.sin(x @ w)
    with dfx.mark("second"):
        b = jnp.sort(a, -1)
    with dfx.mark("third"):
        return jnp.cumsum(b, -1) * a, b.sum(0)


@pytest.mark.parametrize("names", [("first",), ("second",), ("first", "second", "third")])
def test_several_nano_batches_as_one_batch(names: Any, assert_same: Any) -> None:
    fast = split(three_steps, Grouped(*names), in_axes=(0, None), out_axes=(0, dfx.Sum()))
    found = launches(fast, X, W)
    for name in names:
        assert f"{name}@0+2" in found and f"{name}@1" in found
    assert_same(fast.original(X, W), fast(X, W))
    loss = lambda f: lambda *a: jnp.sum(f(*a)[0]) + jnp.sum(f(*a)[1] ** 2)  # noqa: E731
    want = jax.grad(loss(three_steps), (0, 1))(X, W)
    assert_same(want, jax.grad(loss(fast), (0, 1))(X, W))


def test_groups_along_another_axis(assert_same: Any) -> None:
    def f(x: Any) -> Any:
        with dfx.mark("first"):
            a = jnp.sin(x)
        with dfx.mark("second"):
            return jnp.sort(a, 0)

    fast = split(f, Grouped("first", "second"), in_axes=1, out_axes=1)
    assert "first@0+2" in launches(fast, X.T)
    assert_same(fast.original(X.T), fast(X.T))


def test_groups_of_flattened_rows_sums_and_means(assert_same: Any) -> None:
    """Several elements of a value belong to a row; totals are those of the rows that ran together."""

    def f(x: Any, w: Any) -> Any:
        with dfx.mark("first"):
            flat = jnp.sin(x).reshape(-1, 2)
        with dfx.mark("second"):
            y = jnp.sort(flat @ w[:2, :2], -1)
        with dfx.mark("third"):
            return y.reshape(-1, 4), y.sum(), y.mean(0), (y**2).sum(0) / x.shape[0]

    fast = split(
        f, Grouped("first", "second", "third"), in_axes=(0, None),
        out_axes=(0, dfx.Sum(), dfx.Mean(), dfx.Mean()),
    )  # fmt: skip
    assert {"first@0+2", "second@0+2", "third@0+2"} <= set(launches(fast, X, W))
    assert_same(fast.original(X, W), fast(X, W))


def test_a_total_read_by_a_group_is_refused() -> None:
    def f(x: Any) -> Any:
        with dfx.mark("first"):
            total = jnp.sort(x, -1).sum(0)
        with dfx.mark("second"):
            return total * 2

    fast = split(f, Grouped("second"), out_axes=dfx.Sum())
    with pytest.raises(dfx.PlanError, match="second@0.2.*must be proved.*additive"):
        dfx.plan(fast, X)


def test_group_with_a_replacement(assert_same: Any) -> None:
    shapes = []

    class Replaces(Grouped):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                pair = [h for h in ready if h.name == "second"]
                if len(pair) == 3:
                    s.execute(pair, replace=by_gather)
                else:
                    s.execute(next(h for h in ready if h.name != "second"))

    def by_gather(v: Any) -> Any:
        shapes.append(v.shape)
        return jnp.take_along_axis(v, jnp.argsort(v, -1), -1)

    fast = split(three_steps, Replaces(), in_axes=(0, None), out_axes=(0, dfx.Sum()))
    assert_same(fast.original(X, W), fast(X, W))
    assert set(shapes) == {(6, 4)}


def _with_a_schedule(script: Any) -> Any:
    class Scripted(Grouped):
        def schedule(self, s: Any) -> None:
            script(s)

    return split(three_steps, Scripted(), in_axes=(0, None), out_axes=(0, dfx.Sum()))


@pytest.mark.parametrize(
    "pick",
    [
        lambda s: (s.ready()[0], s.handles[-1]),
        lambda s: (s.ready()[0], s.ready()[0]),
        lambda s: (),
        lambda s: (s.ready()[0], "second"),
        lambda s: (s.ready()[0], [h for h in s.handles if h.name == "second"][0]),
    ],
    ids=["not ready", "twice", "none", "no handle", "another region"],
)
def test_bad_groups(pick: Any) -> None:
    with pytest.raises(dfx.PlanError):
        dfx.plan(_with_a_schedule(lambda s: s.execute(pick(s))), X, W)


def test_groups_need_a_proof(assert_same: Any) -> None:
    """Without the proof nobody knows along which axis a value holds the rows."""

    class Vouched(Grouped):
        def split(self, ctx: Any) -> Any:
            return dfx.Split.of_sizes((1, 2, 3), assume_separable=True)

    fast = split(three_steps, Vouched("second"), in_axes=(0, None), out_axes=(0, dfx.Sum()))
    with pytest.raises(dfx.PlanError, match="second.*must be proved; nothing"):
        dfx.plan(fast, X, W)


# -- with other features ---------------------------------------------------------------------------


def test_replacement_in_one_nano_batch(assert_same: Any) -> None:
    class One(dfx.Strategy):
        def split(self, ctx: Any) -> Any:
            return dfx.Split.even(2)

        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                for op in ready:
                    s.execute(op, replace=None if op.nano else functools.partial(swapped))

    def swapped(x: Any, w: Any) -> Any:
        return jnp.tanh((w.T @ x.T).T)

    fast = split(layer, One(), in_axes=(0, None))
    assert_same(fast.original(X, W), fast(X, W))


def test_profile_simulate_and_explain(lanes: int) -> None:
    fast = split(three_steps, 2, in_axes=(0, None), out_axes=(0, dfx.Sum()), lanes=lanes)
    text = dfx.explain(fast, X, W)
    assert "first@0" in text and "first@1" in text and "nano-batches of [3, 3]" in text
    assert dfx.simulate(fast, X, W).lanes == lanes
    assert dfx.profile(fast, X, W).lanes == lanes


def test_many_signatures(assert_same: Any) -> None:
    fast = split(layer, in_axes=(0, None))
    for rows in (6, 4, 2, 6, 3):
        assert_same(layer(X[:rows], W), fast(X[:rows], W))


@pytest.mark.parametrize("promotion", ["standard", "strict"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16", "float32", "complex64"])
@pytest.mark.parametrize("merge", [dfx.Sum(), dfx.Mean()])
def test_totals_of_every_type_under_every_promotion(promotion: Any, dtype: str, merge: Any) -> None:
    """JAX promotes no float of 8 bits, and nothing under "strict"."""
    x = (jnp.arange(24.0).reshape(6, 4) / 24).astype(dtype)
    reduced = jnp.sum if isinstance(merge, dfx.Sum) else jnp.mean
    with jax.numpy_dtype_promotion(promotion):
        fn = jax.jit(lambda x: reduced(x, axis=0))
        got = dfx.schedule(fn, dfx.NanoBatch(2), in_axes=0, out_axes=merge)(x)
        want = fn(x)
    assert got.dtype == want.dtype
    wide = jnp.complex64 if "complex" in dtype else jnp.float32
    np.testing.assert_allclose(
        got.astype(wide), want.astype(wide), rtol=0.25 if "8_" in dtype else 1e-2
    )
