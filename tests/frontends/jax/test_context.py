"""A scheduled function inside JAX programs, in each of their stages, and in each form of a function."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from two_branches import W, X, block

import dynaflow_xla as dfx

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.fixture(scope="module")
def fast(schedule: Any) -> Any:
    return schedule(block)


# -- inside programs -------------------------------------------------------------------------------


def test_inside_jit_with_code_around(
    fast: Any, strategy: str, schedule: Any, assert_same: Any
) -> None:
    def around(f: Any, w: Any, x: Any) -> Any:
        x = jnp.sin(x) * 2
        y = f(w, x)
        return {"y": y @ w, "x": x, "norm": jnp.linalg.norm(y)}

    scheduled = schedule(block, strategy)
    want = jax.jit(functools.partial(around, block))(W, X)
    assert_same(want, jax.jit(functools.partial(around, scheduled))(W, X))


def test_inside_nested_jits(fast: Any, assert_same: Any) -> None:
    want = jax.jit(lambda w, x: block(w, block(w, x)))(W, X)
    inner = jax.jit(lambda w, x: fast(w, x))
    assert_same(want, jax.jit(lambda w, x: inner(w, inner(w, x)))(W, X))


def test_inside_scan(fast: Any, assert_same: Any) -> None:
    def run(f: Any, w: Any, x: Any) -> Any:
        return lax.scan(lambda c, s: (f(w, c) * s, c.sum()), x, jnp.linspace(0.5, 1, 5))

    assert_same(
        jax.jit(functools.partial(run, block))(W, X), jax.jit(functools.partial(run, fast))(W, X)
    )
    assert_same(run(block, W, X), run(fast, W, X))


def test_inside_while_and_fori(fast: Any, assert_same: Any) -> None:
    def run(f: Any, n: Any, w: Any, x: Any) -> Any:
        a = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, f(w, c[1])), (0, x))
        return a, lax.fori_loop(0, n, lambda i, c: f(w, c), x)

    for n in (0, 1, 4):
        want = jax.jit(functools.partial(run, block))(n, W, X)
        assert_same(want, jax.jit(functools.partial(run, fast))(n, W, X))


def test_inside_cond_and_map(fast: Any, assert_same: Any) -> None:
    def run(f: Any, flag: Any, w: Any, x: Any) -> Any:
        y = lax.cond(flag, lambda: f(w, x), lambda: x)
        return y, lax.map(lambda row: f(w, row[None]), y)

    for flag in (True, False):
        want = jax.jit(functools.partial(run, block))(flag, W, X)
        assert_same(want, jax.jit(functools.partial(run, fast))(flag, W, X))


def test_two_calls_and_two_functions_in_one_program(
    fast: Any, schedule: Any, assert_same: Any
) -> None:
    other = schedule(lambda x: jnp.sort(jnp.exp(x), axis=0), "branches")

    def run(f: Any, g: Any, w: Any, x: Any) -> Any:
        return f(w, x) + f(w.T, x), g(f(w, g(x))), g(x)

    want = jax.jit(functools.partial(run, block, other.original))(W, X)
    assert_same(want, jax.jit(functools.partial(run, fast, other))(W, X))


def test_scheduled_inside_scheduled(
    fast: Any, strategy: str, schedule: Any, assert_same: Any
) -> None:
    def outer(f: Any, w: Any, x: Any) -> Any:
        return jnp.sort(f(w, x)) + f(w, jnp.sin(x))

    want = jax.jit(functools.partial(outer, block))(W, X)
    got = schedule(functools.partial(outer, fast), strategy)(W, X)
    assert_same(want, got)


def test_compiled_outer_program_is_used_again(fast: Any, assert_same: Any) -> None:
    outer = jax.jit(lambda w, x: fast(w, x) + 1)
    for seed in range(4):
        x = jnp.asarray(np.random.default_rng(seed).standard_normal((3, 4)), jnp.float32)
        assert_same(jax.jit(lambda w, x: block(w, x) + 1)(W, x), outer(W, x))
    assert outer._cache_size() == 1


# -- stages ----------------------------------------------------------------------------------------


def test_ahead_of_time(fast: Any, assert_same: Any) -> None:
    want = jax.jit(block)(W, X)
    assert_same(want, fast.lower(W, X).compile()(W, X))
    spec = jax.ShapeDtypeStruct
    compiled = fast.lower(spec((4, 4), jnp.float32), spec((3, 4), jnp.float32)).compile()
    assert_same(want, compiled(W, X))
    assert_same(want, fast.trace(W, X).lower().compile()(W, X))
    outer = jax.jit(lambda w, x: fast(w, x) * 2).lower(W, X).compile()
    assert_same(jax.jit(lambda w, x: block(w, x) * 2)(W, X), outer(W, X))
    with pytest.raises(TypeError):
        compiled(W, jnp.ones((5, 4)))


@pytest.mark.parametrize("backend", ["ffi", "xla"])
@pytest.mark.parametrize("setting", ["debug_nans", "debug_infs"])
def test_debugging_names_the_operator(schedule: Any, backend: str, setting: str) -> None:
    def f(x: Any) -> Any:
        return jnp.log(x) + jnp.sort(x)

    fast = schedule(jax.jit(f), dfx.Branches(), backend=backend)
    bad = {"debug_nans": -1.0, "debug_infs": 0.0}[setting]
    with getattr(jax, setting)(True):
        good = jnp.asarray([3.0, 2.0])
        assert (fast(good) == f(good)).all()
        for _ in range(2):
            with pytest.raises(FloatingPointError, match=r"encountered in log"):
                fast(jnp.asarray([bad, 2.0]))
        with pytest.raises(FloatingPointError, match=r"encountered in log"):
            jax.jit(lambda x: fast(x) * 2)(jnp.asarray([bad, 2.0]))
        with pytest.raises(FloatingPointError):
            jax.grad(lambda x: fast(x).sum())(jnp.asarray([bad, 2.0]))
    assert not jnp.isfinite(fast(jnp.asarray([bad, 2.0]))[0])


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.Auto(budget_s=0.02, min_cost_ns=0.0)])
def test_names_are_the_original_s(schedule: Any, strategy: Any) -> None:
    def my_model(x: Any, scale: Any = 1.0) -> Any:
        return jnp.sort(x) * scale

    fast = schedule(jax.jit(my_model), strategy)
    assert "@jit_my_model" in fast.lower(X).as_text()
    with pytest.raises(TypeError, match=r"my_model.*path x\['w'\]"):
        fast({"w": my_model})


def test_disable_jit(fast: Any, assert_same: Any) -> None:
    with jax.disable_jit():
        assert_same(block(W, X), fast(W, X))
    assert_same(jax.jit(block)(W, X), fast(W, X))


def test_eval_shape_and_make_jaxpr(fast: Any) -> None:
    want, got = jax.eval_shape(block, W, X), jax.eval_shape(fast, W, X)
    assert (want.shape, want.dtype) == (got.shape, got.dtype)
    assert "dfx_program" in str(jax.make_jaxpr(fast)(W, X))


def test_inspection_takes_shapes(fast: Any) -> None:
    spec = jax.ShapeDtypeStruct
    shapes = spec((4, 4), jnp.float32), spec((3, 4), jnp.float32)
    assert dfx.plan(fast, *shapes) == dfx.plan(fast, W, X)
    assert dfx.graph(fast, *shapes).to_json() == dfx.graph(fast, W, X).to_json()
    assert dfx.simulate(fast, *shapes).spans


def test_checks_of_jax_stay_on(fast: Any, assert_same: Any) -> None:
    with jax.debug_nans(True), jax.checking_leaks():
        assert_same(jax.jit(block)(W, X), fast(W, X))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        fast(W, X * jnp.nan)


# -- forms -----------------------------------------------------------------------------------------


def test_decorators(assert_same: Any) -> None:
    @dfx.schedule
    def plain(x: Any) -> Any:
        "Says so."
        return jnp.sort(x) * 2

    @dfx.schedule(strategy=dfx.Branches())
    @jax.jit
    def jitted(x: Any) -> Any:
        return jnp.sort(x) * 2

    @functools.partial(dfx.schedule, strategy="sequential")
    @functools.partial(jax.jit, static_argnames="n")
    def static(x: Any, n: int = 2) -> Any:
        return jnp.sort(x) * n

    x = jnp.asarray([2.0, 1.0])
    for f in (plain, jitted, static):
        assert_same(jnp.asarray([2.0, 4.0]), f(x))
        assert_same(f.original(x), f(x))
    assert plain.__name__ == "plain" and plain.__doc__ == "Says so."
    assert_same(jnp.asarray([3.0, 6.0]), static(x, n=3))
    assert "plain" in repr(plain)


def test_as_a_method(schedule: Any, assert_same: Any) -> None:
    @jax.tree_util.register_pytree_node_class
    class Model:
        def __init__(self, w: Any) -> None:
            self.w = w

        def tree_flatten(self) -> Any:
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _: Any, children: Any) -> Any:
            return cls(*children)

        @functools.partial(dfx.schedule, strategy=dfx.Branches())
        def __call__(self, x: Any) -> Any:
            return block(self.w, x)

    model = Model(W)
    assert_same(jax.jit(block)(W, X), model(X))
    got = jax.grad(lambda m: m(X).sum())(model)
    assert_same(jax.grad(lambda w: block(w, X).sum())(W), got.w)
    assert_same(jax.jit(block)(W, X), schedule(model.__call__)(X))


def test_function_object_kinds(schedule: Any, assert_same: Any) -> None:
    class Callable_:
        def __call__(self, x: Any) -> Any:
            return jnp.sort(x) + 1

    x = jnp.asarray([2.0, 1.0])
    want = jnp.asarray([2.0, 3.0])
    for fn in (
        Callable_(),
        functools.partial(lambda n, x: jnp.sort(x) + n, 1),
        lambda x: jnp.sort(x) + 1,
    ):
        assert_same(want, schedule(fn)(x))


def test_what_a_library_computes_has_no_line_of_ours(schedule: Any) -> None:
    fast, x = schedule(jax.vmap(jnp.cumsum)), jnp.ones((3, 30))
    sources = {op.source.file for op in dfx.graph(fast, x).graph.ops if op.source}
    assert sources <= {__file__}  # JAX does not know all lines


def test_a_generator_function_is_refused_as_jit_does(schedule: Any) -> None:
    def parts(x: Any) -> Any:
        yield jnp.sort(x)

    for given in (schedule, jax.jit):
        with pytest.raises(
            TypeError, match="Expected a function, got a generator function: <function"
        ):
            given(parts)(jnp.ones(3))


def picklable(x: Any, w: Any) -> Any:
    """A function that pickle finds by its name."""
    return jnp.sort(x) @ w + jnp.cos(x)


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.Auto(budget_s=0.02, min_cost_ns=0.0)])
def test_copies_and_caches(
    schedule: Any, assert_same: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = schedule(jax.jit(picklable), strategy)
    want = picklable(X, W)
    assert_same(want, fast(X, W))
    assert copy.deepcopy({"apply": fast})["apply"] is fast
    assert jax.tree.map(lambda s: s.shape, fast.eval_shape(X, W)) == want.shape
    # Tests are imported under names that pickle cannot import.
    monkeypatch.setitem(sys.modules, picklable.__module__, sys.modules[__name__])
    again = pickle.loads(pickle.dumps(fast))
    assert_same(want, again(X, W))
    assert repr(again) == repr(fast)
    fast.clear_cache()
    assert fast._jit._cache_size() == 0
    for _ in range(2):
        assert_same(want, fast(X, W))
