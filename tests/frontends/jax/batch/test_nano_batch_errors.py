"""What a split does not take, says so: axes, sizes, merges, what is not proved."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(6, 4)), jnp.float32)


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def split(fn: Any, strategy: Any = None, **options: Any) -> Any:
    options.setdefault("in_axes", 0)
    return dfx.schedule(fn, strategy or dfx.NanoBatch(2), lanes=1, **options)


# -- requests that make no sense -------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [dfx.NanoBatch(2), dfx.NanoBatch([3, 3]), dfx.DualBatch()])
def test_a_split_without_axes(strategy: Any) -> None:
    fast = dfx.schedule(layer, strategy)
    for run in (fast, jax.jit(fast), lambda *a: dfx.plan(fast, *a)):
        with pytest.raises(dfx.PlanError, match="in_axes"):
            run(X, W)


@pytest.mark.parametrize("options", [{"out_axes": 1}, {"batch_size": 6}, {"out_axes": dfx.Sum()}])
def test_batch_options_without_axes(options: dict[str, Any]) -> None:
    with pytest.raises(dfx.PlanError, match="without in_axes"):
        dfx.schedule(layer, dfx.NanoBatch(2), **options)


@pytest.mark.parametrize(
    ("axes", "match"),
    [
        ((0,), "an entry for each of 2"),
        ((0, None, None), "an entry for each of 2"),
        ((2, None), r"argument 0 must be an axis of its shape \[6, 4\]; got 2"),
        ((-3, None), "must be an axis of its shape"),
        ((None, None), "names no argument with a batch"),
        (
            (0, 0),
            r"same number of rows; got 6 in argument 0 \[6, 4\] along axis 0; 4 in argument 1",
        ),
        (("rows", None), "integers and None; got 'rows'"),
        ((True, None), "integers and None; got True"),
        ((1.0, None), "integers and None; got 1.0"),
        ("rows", "must be an integer or a tuple"),
        (True, "must be an integer or a tuple"),
        ({"nowhere": 0}, "names 'nowhere'; the function has"),
        (((0, 0), None), "prefix of the argument"),
    ],
)
def test_bad_in_axes(axes: Any, match: str) -> None:
    fast = split(layer, in_axes=axes)
    for run in (fast, jax.jit(fast), lambda *a: dfx.plan(fast, *a)):
        with pytest.raises(dfx.PlanError, match=match):
            run(X, W)


@pytest.mark.parametrize("axes", [3, -3, "rows", True, (0, 0), {"a": 0}, 1.0])
def test_bad_out_axes(axes: Any) -> None:
    fast = split(layer, in_axes=(0, None), out_axes=axes)
    with pytest.raises(dfx.PlanError, match="out_axes"):
        fast(X, W)


def test_out_axes_of_a_tree_name_the_result() -> None:
    fast = split(lambda x: {"a": x, "b": x.sum()}, out_axes=0)
    with pytest.raises(dfx.PlanError, match=r"result\['b'\] must be an axis of its shape \[\]"):
        fast(X)


def test_scalar_argument_with_a_batch_axis() -> None:
    with pytest.raises(dfx.PlanError, match=r"argument 1 must be an axis of its shape \[\].*None"):
        split(lambda x, s: x * s)(X, 2.0)


def test_keyword_arguments_are_batched() -> None:
    fast = split(lambda x, *, w: x @ w)
    with pytest.raises(dfx.PlanError, match=r"4 in keyword argument \['w'\]"):
        fast(X, w=W)


def test_axis_of_a_static_argument() -> None:
    fast = split(jax.jit(lambda x, n: x**n, static_argnums=1), in_axes=(0, 0))
    with pytest.raises(dfx.PlanError, match="argument 1 is static"):
        fast(X, 2)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "6"])
def test_bad_batch_size(size: Any) -> None:
    with pytest.raises(dfx.PlanError, match="batch_size must be a positive integer"):
        split(layer, batch_size=size)


def test_another_batch_size_than_said() -> None:
    fast = split(layer, in_axes=(0, None), batch_size=8)
    with pytest.raises(dfx.PlanError, match="batch_size=8.*got 6 rows in argument 0"):
        fast(X, W)


@pytest.mark.parametrize("context", [3, "tokens", [1, 2], X])
def test_context_that_is_no_mapping(context: Any) -> None:
    with pytest.raises(dfx.PlanError, match="context must be a mapping"):
        split(layer, context=context)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[4, 3], [2, 2], [6, 1], [1] * 7])
def test_sizes_that_do_not_add_up(sizes: list[int]) -> None:
    fast = split(layer, dfx.NanoBatch(sizes), in_axes=(0, None))
    with pytest.raises(dfx.PlanError, match="the batch.* 6|batch has 6"):
        fast(X, W)


@pytest.mark.parametrize(
    "sizes", [0, -1, True, 2.5, None, "two", [], [0, 6], [-1, 7], [3.0, 3.0], [True, 5], ["3", "3"]]
)
def test_bad_sizes(sizes: Any) -> None:
    with pytest.raises(dfx.PlanError, match="count|sizes"):
        dfx.NanoBatch(sizes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dfx.Split(0),
        lambda: dfx.Split(-2),
        lambda: dfx.Split(2, (1, 2, 3)),
        lambda: dfx.Split(2, (0, 6)),
        lambda: dfx.Split.even(0),
        lambda: dfx.Split.even(2.0),  # type: ignore[arg-type]
        lambda: dfx.Split.of_sizes(6),  # type: ignore[arg-type]
        lambda: dfx.Split.of_sizes([]),
        lambda: dfx.Split.balanced([1, 2], 3),
        lambda: dfx.Split.balanced([1, 2], 0),
        lambda: dfx.Split.balanced([], 1),
        lambda: dfx.Split.balanced([1, -2], 2),
        lambda: dfx.Split.balanced([1, float("nan")], 2),
        lambda: dfx.Split.balanced([1, float("inf")], 2),
        lambda: dfx.Split.balanced(["a", "b"], 2),  # type: ignore[list-item]
        lambda: dfx.Split.balanced(3, 1),  # type: ignore[arg-type]
    ],
)
def test_bad_splits(make: Callable[[], Any]) -> None:
    with pytest.raises(dfx.PlanError):
        make()


def test_sizes_or_weights() -> None:
    with pytest.raises(dfx.PlanError, match="not both"):
        dfx.NanoBatch([3, 3], weights="tokens")


@pytest.mark.parametrize(
    ("context", "match"),
    [
        (None, r"context\['tokens'\]; the context has nothing"),
        ({"token": [1]}, r"has \['token'\]"),
        ({"tokens": [1, 2, 3]}, "each of 6 rows; got 3"),
        ({"tokens": 6}, "numbers"),
        ({"tokens": ["a"] * 6}, "numbers"),
        ({"tokens": [-1] * 6}, "not negative"),
    ],
)
def test_bad_weights(context: Any, match: str) -> None:
    fast = split(layer, dfx.NanoBatch(2, weights="tokens"), in_axes=(0, None), context=context)
    with pytest.raises(dfx.PlanError, match=match):
        fast(X, W)


@pytest.mark.parametrize("given", [None, 2, (3, 3), "even"])
def test_a_strategy_that_returns_no_split(given: Any) -> None:
    class Wrong(dfx.Sequential):
        def split(self, ctx: Any) -> Any:
            return given

    with pytest.raises(dfx.PlanError, match="split must return a dfx.Split"):
        split(layer, Wrong(), in_axes=(0, None))(X, W)


def test_more_nano_batches_than_rows() -> None:
    class Many(dfx.Sequential):
        def split(self, ctx: Any) -> Any:
            return dfx.Split.even(7)

    with pytest.raises(dfx.PlanError, match="7 nano-batches; the batch has 6 rows"):
        split(layer, Many(), in_axes=(0, None))(X, W)


# -- merges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "out", "match"),
    [
        (lambda x: x.sum(), dfx.Mean(), r"sum over the batch.*dfx\.Mean.*dfx\.Sum"),
        (lambda x: x.mean(), dfx.Sum(), r"mean over the batch.*dfx\.Sum.*dfx\.Mean"),
        (lambda x: x.sum() ** 2, dfx.Sum(), "integer_pow|square|mul"),
        (lambda x: x.max(), dfx.Sum(), "reduce_max"),
        (lambda x: x.sum(0), None, r"sum over the batch.*None"),
        (lambda x: jnp.sin(x), dfx.Sum(), r"one entry for each row.*out_axes=0"),
        (lambda x: jnp.sin(x), 1, r"one entry for each row.*out_axes=0"),
        (lambda x: jnp.sin(x), None, r"one entry for each row.*out_axes=0"),
        (lambda x: x[::-1], 0, "rev"),
        (lambda x: jnp.cumsum(x, 0), 0, "cumsum"),
        (lambda x: x.sum() / x.std(), dfx.Mean(), "sqrt|reduce_sum"),
        (lambda x: x[0], None, "slice|squeeze|dynamic_slice"),
        (lambda x: jnp.ones(()) * 3, dfx.Sum(), "does not depend on the batch"),
    ],
)
def test_wrong_merges(fn: Any, out: Any, match: str) -> None:
    fast = split(fn, dfx.NanoBatch(2, joins=False), out_axes=out)
    for run in (fast, jax.jit(fast), lambda *a: dfx.plan(fast, *a)):
        with pytest.raises(dfx.SeparabilityError) as error:
            run(X)
        text = " ".join(str(error.value).split())
        assert re.search(match, text), text


@pytest.mark.parametrize("assume", [False, True])
@pytest.mark.parametrize(
    ("fn", "out"),
    [
        (lambda x: (x * 3).astype(int).sum(), dfx.Mean()),
        (lambda x: (x > 0).any(), dfx.Sum()),
        (lambda x: (x > 0).any(), dfx.Mean()),
    ],
)
def test_merges_of_the_wrong_type(fn: Any, out: Any, assume: bool) -> None:
    fast = split(fn, dfx.NanoBatch(2, assume_separable=assume, joins=False), out_axes=out)
    with pytest.raises((dfx.PlanError, dfx.SeparabilityError)):
        fast(X)


def test_assumed_axis_that_is_not_there() -> None:
    """What the user vouches for must still have shapes that fit."""
    fast = split(lambda x: x.sum(0), dfx.NanoBatch([4, 2], assume_separable=True), out_axes=0)
    with pytest.raises(dfx.PlanError, match=r"result 0.*axis 0"):
        fast(X)


def test_an_argument_returned_along_another_axis() -> None:
    fast = split(lambda x: x, dfx.NanoBatch(2, assume_separable=True), out_axes=1)
    with pytest.raises(dfx.PlanError, match="result 0.*along axis 1"):
        fast(X)


# -- what is not proved ----------------------------------------------------------------------------


def by_size(x: Any) -> Any:
    """Another program for other sizes, with the same values."""
    return jnp.sin(x) * 2 if x.shape[0] > 3 else jnp.sin(x) + jnp.sin(x)


def other_by_size(x: Any) -> Any:
    """Another program for other sizes, with other values."""
    return jnp.sin(x) if x.shape[0] > 3 else jnp.cos(x)


def test_equal_on_the_first_call(assert_same: Any) -> None:
    fast = split(by_size)
    assert_same(by_size(X), fast(X))
    assert "the first call gave equal values" in dfx.explain(fast, X)
    assert_same(by_size(X + 1), jax.jit(fast)(X + 1))
    assert_same(jax.grad(lambda x: by_size(x).sum())(X), jax.grad(lambda x: fast(x).sum())(X))


def test_compared_again_for_another_signature() -> None:
    fast = split(by_size)
    fast(X)
    with pytest.raises(dfx.SeparabilityError, match="call it once outside"):
        jax.jit(fast)(X[:5])
    fast(X[:5])
    jax.jit(fast)(X[:5])


def test_unequal_on_the_first_call() -> None:
    fast = split(other_by_size)
    for _ in range(2):
        with pytest.raises(dfx.SeparabilityError, match="compared with the original") as error:
            fast(X)
    assert "assume_separable=True" in str(error.value)
    assert "other operators" in str(error.value)


def running(x: Any) -> Any:
    """A sum over the batch by a program that is another one for every size."""
    return jax.lax.associative_scan(jnp.add, x, axis=0)


@pytest.mark.parametrize(
    "first",
    [jnp.zeros_like(X), jnp.ones_like(X), X.at[:3].set(0.0), jnp.full_like(X, jnp.nan)],
    ids=["zeros", "ones", "padded", "nan"],
)
def test_rows_that_are_alike_decide_nothing(first: Any, assert_same: Any) -> None:
    """A call to warm up, whose rows cannot show that they were mixed, vouches for no later one."""
    fast = split(running)
    with pytest.warns(dfx.FallbackWarning, match="flat argument 0 are equal"):
        assert_same(running(first), fast(first))
    with pytest.raises(dfx.SeparabilityError, match="compared with the original"):
        fast(X)


def test_compared_at_the_first_call_that_decides(assert_same: Any) -> None:
    fast = split(lambda x, unread, label: by_size(x) * label[:, None])
    zeros, labels = jnp.zeros_like(X), jnp.ones(6, int)
    with pytest.warns(dfx.FallbackWarning, match="rows that differ"):
        fast(zeros, zeros, labels)
    assert_same(by_size(X), fast(X, zeros, labels))
    assert "the first call gave equal values" in dfx.explain(fast, X, zeros, labels)
    assert_same(by_size(X), jax.jit(fast)(X, zeros, labels))


def test_of_keys_and_integers_one_decides() -> None:
    fast = split(lambda keys, n: (jax.vmap(jax.random.bits)(keys), by_size(n * 1.0)))
    keys, zeros = jax.random.split(jax.random.key(0), 6), jnp.zeros(6, int)
    fast(keys, zeros)
    same = jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(keys)))
    fast = split(lambda keys, n: (jax.vmap(jax.random.bits)(keys), by_size(n * 1.0)))
    with pytest.warns(dfx.FallbackWarning, match="flat argument 0, 1 are equal"):
        fast(same, zeros)


@pytest.mark.parametrize(
    "run",
    [
        lambda fast: jax.jit(fast)(X),
        lambda fast: jax.grad(lambda x: fast(x).sum())(X),
        lambda fast: jax.vmap(fast)(jnp.stack([X, X])),
        lambda fast: fast.lower(X),
        lambda fast: fast.trace(X),
        lambda fast: jax.eval_shape(fast, X),
        lambda fast: jax.make_jaxpr(fast)(X),
        lambda fast: jax.jit(lambda y: fast(X) + y)(X),
        lambda fast: jax.lax.scan(lambda c, x: (c, fast(x)), 0, jnp.stack([X, X])),
    ],
    ids=[
        "jit",
        "grad",
        "vmap",
        "lower",
        "trace",
        "eval_shape",
        "make_jaxpr",
        "closed over",
        "scan",
    ],
)
def test_not_compared_while_traced(run: Any) -> None:
    with pytest.raises(dfx.SeparabilityError, match="call it once outside") as error:
        run(split(by_size))
    assert "assume_separable=True" in str(error.value)


def test_without_check() -> None:
    """check=False: the user does not want the comparison."""
    jax.jit(split(by_size, check=False))(X)


def test_donated_arguments_are_compared(assert_same: Any) -> None:
    fast = split(jax.jit(by_size, donate_argnums=0))
    want = by_size(X)
    assert_same(want, fast(jnp.copy(X)))


def test_assumed_is_neither_proved_nor_compared(assert_same: Any) -> None:
    fast = split(other_by_size, dfx.NanoBatch(2, assume_separable=True))
    assert_same(jnp.cos(X), fast(X))


# -- effects ---------------------------------------------------------------------------------------


def _printing(x: Any) -> Any:
    jax.debug.print("row {}", x[0, 0])
    return x * 2


def _calling(x: Any) -> Any:
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda v: np.sin(v), spec, x)


@pytest.mark.parametrize(("fn", "kind"), [(_printing, "debug"), (_calling, "callback")])
@pytest.mark.parametrize("assume", [False, True])
def test_effects_are_refused(fn: Any, kind: str, assume: bool) -> None:
    fast = split(fn, dfx.NanoBatch(2, assume_separable=assume))
    with pytest.raises((dfx.UnsupportedError, dfx.SeparabilityError), match=rf"{kind}.*\.py:\d+"):
        fast(X)


@pytest.mark.parametrize("strategy", [dfx.NanoBatch(2), dfx.DualBatch()])
def test_what_has_a_derivative_at_the_whole_batchs_size_only(strategy: Any) -> None:
    """JAX differentiates the singular vectors of square matrices, and of no others."""

    def f(x: Any, y: Any) -> Any:
        return jnp.sort(x, -1), jnp.linalg.svd(x @ y)[1]

    x, y = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    fast = dfx.schedule(f, strategy, in_axes=(0, None), out_axes=(0, None))
    for loss in (lambda fn, x: fn(x, y)[0].sum(), lambda fn, x: sum(o.sum() for o in fn(x, y))):
        got, want = (jax.grad(partial(loss, fn))(x) for fn in (fast, f))
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


# -- functions that differ from size to size -------------------------------------------------------


def _large(x: Any) -> bool:
    return x.shape[0] > 4


TYPED = [
    (lambda x: jnp.sort(x, -1).astype(jnp.int32 if _large(x) else jnp.float32), 0),
    (lambda x: jnp.sort(x, -1).astype(jnp.float16 if _large(x) else jnp.bfloat16), 0),
    (
        lambda x: jnp.sort(x, -1).astype(jnp.float32 if _large(x) else jnp.bfloat16).sum(0),
        dfx.Sum(),
    ),
    (lambda x: jnp.sin(jnp.ones(3, jnp.float32 if _large(x) else jnp.bfloat16)), None),
]


@pytest.mark.parametrize(("fn", "out_axes"), TYPED)
def test_results_of_another_type_from_fewer_rows(fn: Any, out_axes: Any) -> None:
    """Their memory would be read as the type of the whole."""
    fast = split(jax.jit(fn), dfx.NanoBatch(2, assume_separable=True), out_axes=out_axes)
    with pytest.raises(
        dfx.PlanError, match=r"result 0 is \w+ for all rows and \w+ for nano-batches"
    ):
        fast(X)


@pytest.mark.parametrize(("fn", "out_axes"), TYPED)
def test_results_of_another_type_that_are_to_be_proved(fn: Any, out_axes: Any) -> None:
    fast = split(jax.jit(fn), dfx.NanoBatch(2), out_axes=out_axes)
    try:
        got = fast(X)
    except (dfx.PlanError, dfx.SeparabilityError):
        return  # refused by what is compared first
    want = jax.jit(fn)(X)  # what does not depend on the rows runs once
    assert got.dtype == want.dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=1e-2)


def test_the_types_are_named() -> None:
    fast = split(
        lambda x: jnp.sort(x, -1).astype(jnp.int32 if _large(x) else jnp.float32),
        dfx.NanoBatch(2, assume_separable=True),
    )
    said = r"result 0 is int32 for all rows and float32 for nano-batches \(.* at .*errors\.py:\d+\)"
    with pytest.raises(dfx.PlanError, match=said):
        fast(X)


TABLES = {6: jnp.arange(4.0), 3: jnp.arange(4.0) + 1}


def test_arrays_that_only_some_sizes_use() -> None:
    def fn(x: Any) -> Any:
        return jnp.sort(x, -1) + (TABLES[6] if _large(x) else np.float32(2))

    with pytest.raises(
        dfx.SeparabilityError, match=r"closes over 1 arrays for 6 rows and 0 for nano"
    ):
        split(jax.jit(fn))(X)


def test_a_size_that_the_function_refuses_is_refused_at_its_line() -> None:
    def fn(x: Any) -> Any:
        if not _large(x):
            raise ValueError("the batch is too small")
        return jnp.sort(x)

    said = (
        r"cannot be traced with 3 instead of 6 rows \(the batch is too small, at .*errors\.py:\d+\)"
    )
    with pytest.raises(dfx.SeparabilityError, match=said):
        split(jax.jit(fn))(X)


def test_results_that_do_not_fit_together_are_refused_at_their_line() -> None:
    def fn(x: Any) -> Any:
        return jnp.sort(x, -1)[:, :: 1 if _large(x) else 2]

    said = r"shape \[6, 4\] cannot be put together.*\[3, 2\].*errors\.py:\d+\).*out_axes"
    with pytest.raises(dfx.PlanError, match=said):
        split(jax.jit(fn), dfx.NanoBatch(2, assume_separable=True))(X)
