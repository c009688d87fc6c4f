"""A scheduled function inside JAX programs: jit, scan, vmap, grad, AOT, effects, shard_map."""

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
from jax.experimental import io_callback
from unhurried import unhurried

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax.tuning import auto as jax_auto

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def block(w: Any, x: Any) -> Any:
    """Two branches that meet: a sort and a matmul; differentiable in both arguments."""
    a = jnp.tanh(x @ w)
    b = jnp.sort(x * 0.5, axis=-1)
    return a + jnp.cos(b @ w.T)


W = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).standard_normal((3, 4)), jnp.float32)


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


# -- transformations -------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0), (2, 1)])
def test_vmap(axes: Any, fast: Any, assert_same: Any) -> None:
    ws = jnp.stack([W, W * 2, W - 1], axis=axes[0]) if axes[0] is not None else W
    xs = jnp.stack([X, X * 2, X - 1], axis=axes[1]) if axes[1] is not None else X
    want = jax.jit(jax.vmap(block, axes))(ws, xs)
    assert_same(want, jax.vmap(fast, axes)(ws, xs))
    assert_same(want, jax.jit(jax.vmap(fast, axes))(ws, xs))


def test_vmap_of_vmap(fast: Any, assert_same: Any) -> None:
    xs = jnp.stack([jnp.stack([X, X + 1])] * 3)
    want = jax.vmap(jax.vmap(block, (None, 0)), (None, 0))(W, xs)
    assert_same(want, jax.vmap(jax.vmap(fast, (None, 0)), (None, 0))(W, xs))


def test_vmap_with_keys_and_out_axes(schedule: Any, assert_same: Any) -> None:
    def f(k: Any, x: Any) -> Any:
        a, b = jax.random.split(k)
        return jax.random.normal(a, x.shape) + jnp.sort(x), b

    keys = jax.random.split(jax.random.key(0), 3)
    xs = jnp.arange(12.0).reshape(3, 4)
    fast = schedule(f)
    assert_same(jax.vmap(f)(keys, xs), jax.vmap(fast)(keys, xs))
    assert_same(
        jax.vmap(f, (None, 1), (1, None))(keys[0], xs.T)[0],
        jax.vmap(fast, (None, 1), (1, None))(keys[0], xs.T)[0],
    )


def test_vmap_over_nothing_is_mapped(fast: Any, assert_same: Any) -> None:
    got = jax.vmap(lambda i: fast(W, X) * i)(jnp.arange(3.0))
    assert_same(jax.vmap(lambda i: block(W, X) * i)(jnp.arange(3.0)), got)


def loss(f: Any, w: Any, x: Any) -> Any:
    return jnp.mean(f(w, x) ** 2)


def test_grad(strategy: str, schedule: Any, assert_same: Any) -> None:
    scheduled = schedule(block, strategy)
    original, fast = functools.partial(loss, block), functools.partial(loss, scheduled)
    assert_same(jax.grad(original)(W, X), jax.grad(fast)(W, X))
    want = jax.jit(jax.value_and_grad(original, (0, 1)))(W, X)
    assert_same(want, jax.jit(jax.value_and_grad(fast, (0, 1)))(W, X))


def test_grad_of_a_scheduled_loss(schedule: Any, assert_same: Any) -> None:
    fast = schedule(functools.partial(loss, block))
    assert_same(
        jax.value_and_grad(functools.partial(loss, block))(W, X), jax.value_and_grad(fast)(W, X)
    )


def test_scheduled_gradient(strategy: str, schedule: Any, assert_same: Any) -> None:
    step = jax.value_and_grad(functools.partial(loss, block), (0, 1))
    assert_same(jax.jit(step)(W, X), schedule(step, strategy)(W, X))


def test_vjp_jacrev_and_has_aux(fast: Any, assert_same: Any) -> None:
    want, pull = jax.vjp(block, W, X)
    got, fast_pull = jax.vjp(fast, W, X)
    assert_same(want, got)
    assert_same(pull(jnp.ones_like(want)), fast_pull(jnp.ones_like(got)))
    assert_same(jax.jacrev(block)(W, X), jax.jacrev(fast)(W, X))

    def aux(f: Any, w: Any) -> Any:
        y = f(w, X)
        return y.sum(), {"y": y}

    assert_same(
        jax.grad(functools.partial(aux, block), has_aux=True)(W),
        jax.grad(functools.partial(aux, fast), has_aux=True)(W),
    )


def test_grad_with_ints_keys_and_none(schedule: Any, assert_same: Any) -> None:
    """Inputs and outputs without a derivative beside ones that have one."""

    def f(p: Any, n: Any, k: Any) -> Any:
        noise = jax.random.normal(k, p["w"].shape)
        return jnp.sort(p["w"] * n) + noise, n + 1, k, p["none"]

    params = {"w": jnp.arange(4.0), "none": None}
    args = jnp.int32(3), jax.random.key(0)
    fast = schedule(f)

    def total(g: Any, p: Any) -> Any:
        y, n, k, _ = g(p, *args)
        return (y * n).sum() + jax.random.normal(k)

    assert_same(
        jax.grad(functools.partial(total, f))(params),
        jax.grad(functools.partial(total, fast))(params),
    )


def test_grad_through_scan_with_custom_rules_and_remat(fast: Any, assert_same: Any) -> None:
    @jax.custom_vjp
    def halved(x: Any) -> Any:
        return x

    halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))

    def run(f: Any, w: Any, x: Any) -> Any:
        body = jax.checkpoint(lambda c, _: (halved(f(w, c)), None))
        return lax.scan(body, x, None, length=3)[0].sum()

    want = jax.jit(jax.grad(functools.partial(run, block)))(W, X)
    assert_same(want, jax.jit(jax.grad(functools.partial(run, fast)))(W, X))


def test_custom_derivative_inside_is_respected(schedule: Any, assert_same: Any) -> None:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return jnp.sort(x) * 2

    f.defvjp(lambda x: (f(x), None), lambda _, g: (g * 100,))
    whole = lambda x: f(x) + jnp.cos(x)  # noqa: E731
    x = jnp.arange(3.0)
    want = jax.grad(lambda x: whole(x).sum())(x)
    assert_same(want, jax.grad(lambda x: schedule(whole)(x).sum())(x))


def test_vmap_of_grad_and_grad_of_vmap(fast: Any, assert_same: Any) -> None:
    xs = jnp.stack([X, X * 2])
    per_example = lambda f: jax.vmap(jax.grad(functools.partial(loss, f)), (None, 0))(W, xs)  # noqa: E731
    assert_same(per_example(block), per_example(fast))
    batched = lambda f: jax.grad(lambda w: jax.vmap(lambda x: loss(f, w, x))(xs).sum())(W)  # noqa: E731
    assert_same(batched(block), batched(fast))


def test_second_reverse_derivative(fast: Any, assert_same: Any) -> None:
    """Reverse over reverse: the backward pass is the original's, hence differentiable."""
    twice = lambda f: jax.grad(lambda w: (jax.grad(loss, 1)(f, w, X) ** 2).sum())(W)  # noqa: E731
    assert_same(twice(block), twice(fast))


def test_training_loop(schedule: Any) -> None:
    def step(f: Any, w: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(functools.partial(loss, f))(w, x)
        return w - 0.1 * g, value

    slow = jax.jit(functools.partial(step, block), donate_argnums=0)
    fast = jax.jit(functools.partial(step, schedule(block)), donate_argnums=0)
    a, b = W.copy(), W.copy()
    for _ in range(50):
        a, want = slow(a, X)
        b, got = fast(b, X)
    np.testing.assert_allclose(got, want, rtol=1e-3)
    np.testing.assert_allclose(b, a, rtol=1e-2, atol=1e-4)


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


# -- effects ---------------------------------------------------------------------------------------


def test_ordered_callbacks_keep_order(strategy: str, schedule: Any, assert_same: Any) -> None:
    seen: list[Any] = []

    def f(log: Any, x: Any) -> Any:
        log(0, x)
        y = jnp.sort(x)
        log(1, y)
        z = jnp.cos(x)
        log(2, y + z)
        log(3, z)
        return y * z

    def ordered(i: int, value: Any) -> None:
        jax.debug.callback(lambda v: seen.append((i, np.array(v))), value, ordered=True)

    program = functools.partial(f, ordered)
    x = jnp.asarray([3.0, 1.0, 2.0])
    want = jax.jit(program)(x)
    jax.effects_barrier()
    expected, seen = seen, []
    fast = schedule(program, strategy)
    for _ in range(3):
        seen.clear()
        assert_same(want, fast(x))
        jax.effects_barrier()
        assert [i for i, _ in seen] == [0, 1, 2, 3]
        for (_, a), (_, b) in zip(expected, seen, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-6)
    seen.clear()
    jax.jit(lambda x: (ordered(8, x), fast(x), ordered(9, x))[1])(x)
    jax.effects_barrier()
    assert [i for i, _ in seen] == [8, 0, 1, 2, 3, 9]
    assert "outer" in dfx.explain(fast, x)


def test_debug_print(schedule: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: Any) -> Any:
        jax.debug.print("before {}", x.sum(), ordered=True)
        y = jnp.sort(x) + jnp.cos(x)
        jax.debug.print("after", ordered=True)
        return y

    fast = schedule(f)
    for _ in range(2):
        fast(jnp.zeros(4)).block_until_ready()
        jax.effects_barrier()
    lines = [line for line in capfd.readouterr().out.splitlines() if line]
    assert lines == ["before 0.0", "after"] * 2


def test_pure_callback(strategy: str, schedule: Any, assert_same: Any) -> None:
    def f(x: Any) -> Any:
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
        a = jax.pure_callback(lambda v: np.asarray(v) * 2, spec, jnp.sort(x))
        b = jax.pure_callback(lambda v: np.asarray(v) + 1, spec, jnp.cos(x))
        return a @ b + jnp.sort(b).sum()

    x = jnp.asarray([3.0, 1.0, 2.0])
    fast = schedule(f, strategy)
    for _ in range(3):
        assert_same(jax.jit(f)(x), fast(x))


def test_io_callback_with_results_and_state(schedule: Any) -> None:
    counter = iter(range(100))

    def f(x: Any) -> Any:
        draw = functools.partial(
            io_callback, lambda: np.int32(next(counter)), jax.ShapeDtypeStruct((), jnp.int32),
            ordered=True,
        )  # fmt: skip
        a = draw()
        y = jnp.sort(x) * a
        b = draw()
        return y, jnp.cos(x) * b, a, b

    fast = schedule(f)
    for call in range(3):
        _, _, a, b = fast(jnp.arange(3.0))
        assert (int(a), int(b)) == (2 * call, 2 * call + 1)


def test_effect_inside_control_flow(schedule: Any) -> None:
    seen: list[int] = []

    def f(x: Any) -> Any:
        def body(c: Any, i: Any) -> Any:
            jax.debug.callback(lambda v: seen.append(int(v)), i, ordered=True)
            return jnp.cos(c), c.sum()

        c, s = lax.scan(body, jnp.sort(x), jnp.arange(4))
        return jnp.sort(c) + s.sum()

    x = jnp.asarray([3.0, 1.0])
    got = schedule(f)(x)
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3]
    np.testing.assert_allclose(got, jax.jit(f)(x), rtol=1e-6)


def test_effects_are_not_run_by_inspection(schedule: Any) -> None:
    seen: list[int] = []

    def f(x: Any) -> Any:
        jax.debug.callback(lambda: seen.append(1))
        return jnp.sort(x)

    fast = schedule(f)
    for inspect in (dfx.graph, dfx.plan, dfx.explain, dfx.simulate):
        inspect(fast, jnp.arange(3.0))
    jax.effects_barrier()
    assert seen == []


def test_grad_with_effects(schedule: Any, assert_same: Any) -> None:
    """Works as the original, or is refused by name; never a wrong derivative."""

    def f(x: Any) -> Any:
        y = jnp.sort(x) * x
        jax.debug.callback(lambda v: None, y)
        return (y * jnp.cos(x)).sum()

    x = jnp.asarray([3.0, 1.0, 2.0])
    try:
        got = jax.grad(schedule(f))(x)
    except dfx.UnsupportedError as error:
        assert "original" in str(error)
        return
    assert_same(jax.grad(f)(x), got)


def test_auto_never_measures_effects(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    seen: list[int] = []

    def f(x: Any) -> Any:
        jax.debug.callback(lambda: seen.append(1), ordered=True)
        return jnp.sort(x) + jnp.sort(-x)

    fast = dfx.schedule(f, dfx.Auto(min_cost_ns=0.0))
    for _ in range(3):
        fast(jnp.arange(3.0))
    jax.effects_barrier()
    assert seen == [1, 1, 1]


def test_auto_runs_what_was_decided(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    """For each signature, donated and static arguments included; another decision replaces it."""
    unhurried(monkeypatch)
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))

    @functools.partial(jax.jit, static_argnames="power", donate_argnums=0)
    def f(x: Any, power: int = 1) -> Any:
        return {"sort": jnp.sort(x) ** power, "rank": jnp.argsort(x)}

    fast = dfx.schedule(f, dfx.Auto(budget_s=5.0, margin=0.0, min_cost_ns=0.0))
    ran: list[str] = []
    branches = fast.with_strategy(dfx.Branches())
    traced = branches._traced
    branches._traced = lambda *a, **k: (ran.append("branches"), traced(*a, **k))[1]
    sizes = {3: branches, 4: None, 5: branches}
    for size, child in sizes.items():
        choice = jax_auto.Choice(child, "so that each is tried")
        fast.decide(fast._signature((jnp.arange(float(size)),), {"power": 2}), choice)
    for size in [*sizes, *sizes]:
        x = jnp.cos(jnp.arange(float(size)))
        assert_same(f(x.copy(), power=2), fast(x, power=2))
        assert x.is_deleted()
    assert ran == ["branches"] * 2, "traced once a signature"
    x = jnp.cos(jnp.arange(3.0))
    assert_same(f(x.copy(), power=2), jax.jit(lambda x: fast(x, power=2))(x))
    loss = lambda g, x: g(x.copy(), power=2)["sort"].sum()  # noqa: E731
    assert_same(jax.grad(functools.partial(loss, f))(x), jax.grad(functools.partial(loss, fast))(x))
    choice = dfx.tune(fast, x, power=2, budget_s=5.0)
    assert choice.costs is not None and choice.costs.region_ns
    ran.clear()
    assert_same(f(x.copy(), power=2), fast(x.copy(), power=2))
    assert len(ran) == (choice.child is branches)
    again = dfx.schedule(f, fast._options.strategy)
    assert again(x.copy(), power=2).keys() == {"sort", "rank"}
    assert again.decision((x,), {"power": 2}).costs == choice.costs, "kept on disk"
    assert "from measured costs" in dfx.explain(again, x, power=2)
    regions = dfx.simulate(again, x, power=2).region_ns()
    known = {r.id: r.name for r in dfx.graph(again, x, power=2).regions}
    assert {known[r]: ns for r, ns in regions.items()} == {
        name: round(ns) for name, ns in choice.costs.region_ns.items()
    }


# -- several devices -------------------------------------------------------------------------------

_MESH = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
assert len(jax.devices()) == 8
mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 8)), jnp.float32)
xs = jax.device_put(x, NamedSharding(mesh, P("d")))
"""


def test_inside_shard_map(run_program: Any) -> None:
    out = run_program(
        _MESH
        + """
def local(x):
    return jnp.sort(x, axis=-1) @ jnp.cos(x).T + jnp.sort(-x, axis=0) @ x.T

def mapped(f):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d")))

fast = spread(local)
want = jax.block_until_ready(mapped(local)(xs))
run = mapped(lambda x: fast(x) * 1.0)
for _ in range(20):
    got = jax.block_until_ready(run(xs))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
print("same", len(got.sharding.device_set))
""",
        devices=8,
    )
    assert out.split() == ["same", "8"]


def test_inside_shard_map_over_some_axes_only(run_program: Any) -> None:
    """Along the others XLA partitions the program, which it cannot do with lanes."""
    out = run_program(
        """
from jax.sharding import PartitionSpec as P
from dynaflow_xla.errors import UnsupportedError
mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 8)), jnp.float32)

def local(x):
    return jnp.sort(x, axis=-1) @ jnp.cos(x).T + jnp.sort(-x, axis=0) @ x.T

def mapped(f, axes):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis_names=axes))

fast, want = spread(local), mapped(local, {"d"})(x)
try:
    print(np.allclose(mapped(fast, {"d"})(x), want, atol=1e-5))
except UnsupportedError as error:
    print("refused", "over all axes" in str(error))
np.testing.assert_allclose(mapped(fast, {"d", "m"})(x), want, rtol=1e-5, atol=1e-5)
print("same")
""",
        devices=8,
    )
    assert out.splitlines() == ["refused True", "same"]


def test_collective_inside_a_scheduled_function(run_program: Any) -> None:
    out = run_program(
        _MESH
        + """
def local(x):
    y = jnp.sort(x, axis=-1) + jnp.cos(x)
    total = jax.lax.psum(y, "d")
    return jnp.sort(total, axis=0) + y * jax.lax.axis_index("d")

def mapped(f):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d")))

fast = spread(local)
want = jax.block_until_ready(mapped(local)(xs))
run = mapped(fast)
for _ in range(10):
    got = jax.block_until_ready(run(xs))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
print("same")
""",
        devices=8,
    )
    assert out.split() == ["same"]


def test_grad_inside_shard_map(run_program: Any) -> None:
    out = run_program(
        _MESH
        + """
w = jnp.asarray(np.random.default_rng(1).standard_normal((8, 8)), jnp.float32)

def loss(f):
    def local(w, x):
        g = jax.grad(lambda w: (f(w, x) ** 2).sum())(w)
        return jax.lax.psum(g, "d")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(),
                                 check_vma=False))

model = lambda w, x: jnp.tanh(x @ w) + jnp.sort(x, axis=-1) @ w
want = jax.block_until_ready(loss(model)(w, xs))
run = loss(spread(model))
for _ in range(5):
    got = jax.block_until_ready(run(w, xs))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
print("same")
""",
        devices=8,
    )
    assert out.split() == ["same"]


def test_several_devices_outside_shard_map_are_refused(run_program: Any) -> None:
    out = run_program(
        _MESH
        + """
fast = spread(two_sorts)
for call in (fast, jax.jit(fast)):
    try:
        jax.block_until_ready(call(xs))
    except dfx.UnsupportedError as error:
        assert "shard_map" in str(error), error
        print("refused")
np.testing.assert_allclose(fast(x), two_sorts(x), rtol=1e-5, atol=1e-5)
other = jax.device_put(x, jax.devices()[3])
got = fast(other)
np.testing.assert_allclose(got, two_sorts(x), rtol=1e-5, atol=1e-5)
print(got.devices() == {jax.devices()[3]})
""",
        devices=8,
    )
    assert out.split() == ["refused", "refused", "True"]


def test_auto_on_several_devices_is_the_original(run_program: Any) -> None:
    """Whatever it decided on one: lanes belong to one device."""
    out = run_program(
        _MESH
        + """
import warnings
from jax.sharding import PartitionSpec
from dynaflow_xla.tuning import autotune

def measure(runs, *_, **__):
    for run in runs.values():
        run()
    return autotune.Medians({n: [2.0 if n.startswith("original") else 1.0] * 12 for n in runs})

autotune.measure = measure
f = jax.jit(lambda x: jnp.sort(jnp.sin(x)) + jnp.sort(jnp.cos(x)))
x = jnp.linspace(-9.0, 9.0, 40_000)
xs = jax.device_put(x, NamedSharding(mesh, P("d")))
want = f(x)
grad = jax.grad(lambda g, x: (g(x) ** 2).sum(), 1)
for inside in (False, True):
    fast = dfx.schedule(f, dfx.Auto(min_cost_ns=0.0, budget_s=100.0), lanes=2)
    if not inside:
        np.testing.assert_allclose(fast(x), want, rtol=1e-5, atol=1e-5)
        assert "Branches" in dfx.explain(fast, x).splitlines()[0], dfx.explain(fast, x)
    with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as told:
        # What was not decided is not: it would hold for one device, too.
        warnings.simplefilter("always")
        for call in (fast, fast, jax.jit(fast)):
            np.testing.assert_allclose(call(x), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(grad(fast, x), grad(f, x), rtol=1e-5, atol=1e-5)
        dfx.verify(fast, x)
    undecided = "nothing is decided yet for" in dfx.explain(fast, x)
    print(any("several devices" in str(w.message) for w in told), undecided)
    np.testing.assert_allclose(jax.jit(fast)(xs), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fast(xs), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fast(x), want, rtol=1e-5, atol=1e-5)
    assert "Branches" in dfx.explain(fast, x).splitlines()[0], dfx.explain(fast, x)
    with jax.set_mesh(mesh):
        try:
            dfx.tune(fast, x, budget_s=1.0)
        except dfx.UnsupportedError as error:
            print("one device" in str(error))

def placed(x):
    return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("d"))) + jnp.sort(x)

fast = dfx.schedule(jax.jit(placed))
np.testing.assert_allclose(fast(x), jax.jit(placed)(x), rtol=1e-5, atol=1e-5)
print("values on 8 devices" in dfx.explain(fast, x))
""",
        devices=8,
    )
    assert out.split() == ["True", "False", "True", "False", "True", "True", "True"]


@pytest.mark.parametrize("backend", ["ffi", "xla"])
def test_vmap_over_a_named_axis(schedule: Any, assert_same: Any, backend: str) -> None:
    def f(x: Any, w: Any) -> Any:
        mean = jax.lax.pmean(jnp.sort(x), "b")
        return mean @ w, jnp.cos(x) + jax.lax.axis_index("b"), jnp.sin(w)

    fast = schedule(jax.jit(f), dfx.Branches(), backend=backend)
    for axes in ((0, None), (1, 0)):
        w = jnp.stack([W] * len(X)) if axes[1] == 0 else W
        x = X.T if axes[0] == 1 else X
        out_axes = (None if axes[1] is None else 0, 0, None if axes[1] is None else 0)
        how = {"in_axes": axes, "out_axes": out_axes, "axis_name": "b"}
        assert_same(jax.vmap(f, **how)(x, w), jax.vmap(fast, **how)(x, w))

        def loss(g: Any, x: Any, w: Any, how: Any = how) -> Any:
            return sum((out**2).sum() for out in jax.vmap(g, **how)(x, w))

        assert_same(jax.grad(loss, (1, 2))(f, x, w), jax.grad(loss, (1, 2))(fast, x, w))

    def row(g: Any, x: Any) -> Any:
        return jax.grad(lambda x: g(x, W)[0].sum())(x)

    assert_same(
        jax.vmap(lambda x: row(f, x), axis_name="b")(X),
        jax.vmap(lambda x: row(fast, x), axis_name="b")(X),
    )


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
