"""Derivative rules of a function's own, ``custom_jvp`` and ``custom_vjp``, in nano-batches.

All rules here are wrong on purpose, so that a lost one shows in the values. They are compared in float64:
second derivatives multiply rounding, by random factors for random inputs, which in float32 looked like a lost
rule now and then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax.batch.own_rules import OwnRules

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@jax.custom_jvp
def again(x: Any) -> Any:
    """Its rule calls it, and what that calls has a rule."""
    return jnp.tanh(x)


again.defjvp(lambda xs, ts: (again(xs[0]), again(xs[0] * 0.5) * ts[0] * 3))


@jax.custom_vjp
def through(x: Any) -> Any:
    """Straight through, with a bend."""
    return jnp.round(x * 4) / 4


through.defvjp(lambda x: (through(x), x), lambda x, ct: (ct * again(x) * 2,))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    """The gradient of each row has length 1."""
    return x


clipped.defvjp(
    lambda x: (x, None),
    lambda _, ct: (ct / jnp.sqrt(jnp.sum(ct**2, axis=-1, keepdims=True) + 0.1),),
)


@jax.custom_vjp
def counted(x: Any, n: Any) -> Any:
    """Integers as operand and residual."""
    return x * n[:, None]


counted.defvjp(
    lambda x, n: (counted(x, n), (n, jnp.argmax(x, axis=-1))),
    lambda res, ct: (ct * (res[0] + res[1])[:, None] * jnp.sin(ct), None),
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def applied(f: Any, x: Any) -> Any:
    return f(x)


applied.defjvp(lambda f, xs, ts: (f(xs[0]), f(xs[0]) * 5 * ts[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x: Any, by: float) -> Any:
    return x * by


scaled.defvjp(
    lambda x, by: (x * by, jnp.cos(x)),
    lambda by, res, ct: (ct * res * (by + 1),),
)


@jax.custom_jvp
def zeros_seen(x: Any, w: Any) -> Any:
    return x * w


@functools.partial(zeros_seen.defjvp, symbolic_zeros=True)
def _zeros_seen_jvp(xs: Any, ts: Any) -> Any:
    still = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in ts]
    times = 2.0 if any(still) else 3.0
    t = sum(jnp.sin(x) * t for x, t, zero in zip(xs, ts, still, strict=True) if not zero)
    return zeros_seen(*xs), times * t * jnp.ones_like(xs[0])


def over(x: Any, steps: int, body: Callable[[Any], Any]) -> Any:
    return jax.lax.scan(lambda c, _: (body(c), None), x, length=steps)[0]


def root(x: Any) -> Any:
    """The square root, each row for itself."""
    return jax.lax.custom_root(
        lambda y: y * y - x,
        jnp.ones_like(x),
        lambda f, y: jax.lax.fori_loop(0, 12, lambda _, z: (z + (z * z - f(z)) / z) / 2, y),
        lambda g, y: y / g(jnp.ones_like(y)),
    )


def solved(x: Any, w: Any) -> Any:
    """Diagonal systems."""
    return jax.lax.custom_linear_solve(
        lambda v: (w[0] ** 2 + 1) * v, x, lambda _, b: b / (w[0] ** 2 + 1), symmetric=True
    )


N = jnp.arange(12) % 3 + 1

CASES: dict[str, Callable[..., Any]] = {
    "jvp": lambda x, w: again(x @ w) * 2,
    "vjp": lambda x, w: through(x @ w) * x,
    "clip": lambda x, w: jnp.sin(clipped(x @ w)),
    "weights": lambda x, w: jnp.sin(x @ again(w)),
    "nn": lambda x, w: jax.nn.softmax(jax.nn.silu(jax.nn.relu(x @ w) + jax.nn.relu6(x))),
    "logsumexp": lambda x, w: jax.nn.logsumexp(x @ w, axis=-1) + jnp.logaddexp(x, x @ w).sum(-1),
    "integers": lambda x, w: counted(x @ w, (x[:, 0] > 0).astype(jnp.int32) + 1),
    "nondiff_jvp": lambda x, w: applied(jnp.sin, x @ w),
    "nondiff_vjp": lambda x, w: scaled(x @ w, 3.0) * x,
    "zeros_seen": lambda x, w: zeros_seen(jnp.sin(x), x @ w) + zeros_seen(x, jnp.ones_like(x)),
    "scan": lambda x, w: over(x, 3, lambda c: again(c @ w) + c),
    "scan_vjp": lambda x, w: over(x, 2, lambda c: through(c @ w) + c),
    "checkpoint": lambda x, w: jax.checkpoint(lambda v: jnp.sin(again(v @ w)))(x),
    "cond": lambda x, w: jax.lax.cond(w[0, 0] > 0, again, lambda v: again(v) * 2, x @ w),
    "while": lambda x, w: jax.lax.fori_loop(0, 3, lambda _, c: again(c @ w) + c, x),
    "root": lambda x, w: again(root(x**2 + 1)),
    "solve": lambda x, w: again(solved(x @ w, w)),
}


def arguments() -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng()
    x, dx = (jnp.asarray(rng.normal(size=(12, 4))) for _ in range(2))
    w, dw = (jnp.asarray(rng.normal(size=(4, 4)) / 2) for _ in range(2))
    return x, w, dx, dw


def total(f: Any) -> Any:
    return lambda x, w: jnp.sum(jnp.sin(f(x, w)))


Derivative = Callable[[Any, Any, Any, Any, Any], Any]


def hvp(f: Any, x: Any, w: Any, dx: Any, dw: Any) -> Any:
    return jax.jvp(jax.grad(total(f), (0, 1)), (x, w), (dx, dw))[1]


def rows_of(f: Any, x: Any, w: Any, dx: Any, dw: Any) -> Any:
    moved = jnp.stack([dw, jnp.cos(dw)])
    return jax.vmap(lambda d: jax.jvp(lambda v: jax.grad(total(f))(x, v), (w,), (d,))[1])(moved)


DERIVATIVES: dict[str, Derivative] = {
    "jvp": lambda f, x, w, dx, dw: jax.jvp(f, (x, w), (dx, dw)),
    "grad": lambda f, x, w, dx, dw: jax.grad(total(f), (0, 1))(x, w),
    "jvp_jvp": lambda f, x, w, dx, dw: jax.jvp(lambda v: jax.jvp(f, (x, v), (dx, dw)), (w,), (dw,)),
    "jvp_grad": hvp,
    "grad_grad": lambda f, x, w, dx, dw: jax.grad(
        lambda x, w: jnp.sum(jnp.sin(jax.grad(total(f), 1)(x, w))), (0, 1)
    )(x, w),
    "grad_jvp": lambda f, x, w, dx, dw: jax.grad(
        lambda w: jnp.sum(jnp.sin(jax.jvp(lambda v: f(v, w), (x,), (dx,))[1]))
    )(w),
    "grad_vjp": lambda f, x, w, dx, dw: jax.grad(
        lambda ct: jnp.sum(jnp.sin(jax.vjp(lambda v: f(v, w), x)[1](ct)[0]))
    )(jnp.ones_like(jax.eval_shape(f, x, w))),
    "linearize_grad": lambda f, x, w, dx, dw: jax.linearize(
        lambda v: jax.grad(total(f), (0, 1))(v, w), x
    )[1](dx),
    "vmap_jvp_grad": rows_of,
    "jit_checkpoint": lambda f, x, w, dx, dw: jax.jit(
        lambda x, w: hvp(jax.checkpoint(f), x, w, dx, dw)
    )(x, w),
    "third": lambda f, x, w, dx, dw: jax.jvp(lambda v: hvp(f, x, v, dx, dw), (w,), (dw,))[1],
}


def assert_equal(how: Derivative, f: Any, fast: Any, given: Any, where: str) -> None:
    """Equal, or JAX has no such derivative and says the same of both."""
    try:
        wanted = how(f, *given)
    except (TypeError, ValueError, KeyError, NotImplementedError) as error:
        with pytest.raises((type(error), NotImplementedError)):
            how(fast, *given)
        return
    got = how(fast, *given)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        scale = float(np.max(np.abs(a)))
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-4 * scale, err_msg=where)


SPLITS = {"even": lambda: dfx.NanoBatch(2), "uneven": lambda: dfx.NanoBatch([5, 4, 3])}


def chosen() -> list[tuple[str, str, str]]:
    """Every function on both backends and in both splits, in half of the four combinations."""
    pairs = [("xla", "uneven"), ("ffi", "even")], [("ffi", "uneven"), ("xla", "even")]
    return [(name, *pair) for number, name in enumerate(CASES) for pair in pairs[number % 2]]


@pytest.mark.parametrize(("name", "backend", "split"), chosen())
def test_derivatives_follow_rules(name: str, backend: str, split: str) -> None:
    f = CASES[name]
    fast = dfx.schedule(f, SPLITS[split](), in_axes=(0, None), backend=backend)
    given = arguments()
    np.testing.assert_allclose(fast(*given[:2]), f(*given[:2]), rtol=1e-4, atol=1e-4)
    for what in DERIVATIVES if split == "uneven" else ("jvp_grad", "grad_grad"):
        assert_equal(DERIVATIVES[what], f, fast, given, f"{name}: {what}")


@pytest.mark.parametrize("strategy", ["branches", "auto"])
@pytest.mark.parametrize("name", ["jvp", "loss", "same"])
def test_strategies_without_a_split_follow_rules(name: str, strategy: str) -> None:
    f = {**CASES, **MIXING}[name]
    fast = dfx.schedule(f, strategy)
    given = arguments()
    for what in ("grad", "jvp_grad", "grad_grad", "third"):
        assert_equal(DERIVATIVES[what], f, fast, given, what)


# -- rules that mix rows, though their functions do not --------------------------------------------


@jax.custom_vjp
def clip_all(x: Any) -> Any:
    """The whole gradient has length 1."""
    return x


clip_all.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.sqrt(jnp.sum(ct**2) + 0.1),))


@jax.custom_jvp
def normed(x: Any) -> Any:
    return x


normed.defjvp(lambda xs, ts: (xs[0], ts[0] / (1 + jnp.sum(xs[0] ** 2))))


@jax.custom_jvp
def late(x: Any) -> Any:
    """Only what its rule calls mixes rows: the second derivative."""
    return jnp.sin(x)


late.defjvp(lambda xs, ts: (late(xs[0]), ts[0] * normed(jnp.cos(xs[0]))))


@jax.custom_jvp
def ones(x: Any) -> Any:
    """The same for all rows, and its derivative is not."""
    return jnp.ones(x.shape[1:])


ones.defjvp(lambda xs, ts: (ones(xs[0]), jnp.sum(ts[0] * xs[0], axis=0)))


@jax.custom_jvp
def if_still(x: Any, w: Any) -> Any:
    return x * w


@functools.partial(if_still.defjvp, symbolic_zeros=True)
def _if_still_jvp(xs: Any, ts: Any) -> Any:
    if isinstance(ts[1], jax.custom_derivatives.SymbolicZero):
        return if_still(*xs), ts[0] / (1 + jnp.sum(xs[0] ** 2))
    return if_still(*xs), ts[1] * xs[0] + ts[0]


@jax.custom_vjp
def with_loss(x: Any, loss: Any) -> Any:
    """The loss is added backwards only."""
    return x


with_loss.defvjp(lambda x, loss: (x, None), lambda _, ct: (ct, jnp.float32(1)))

MIXING: dict[str, Callable[..., Any]] = {
    "rows": lambda x, w: jnp.sin(clip_all(x @ w)),
    "weights": lambda x, w: jnp.sin(x @ clip_all(w)),
    "jvp": lambda x, w: normed(x @ w) * x,
    "same": lambda x, w: x @ w * ones(x),
    "zeros": lambda x, w: if_still(jnp.sin(x), jnp.ones_like(x)) + x @ w,
    "scan": lambda x, w: over(x, 2, lambda c: normed(c @ w) + c),
    "cond": lambda x, w: jax.lax.cond(w[0, 0] > 0, normed, lambda v: normed(v) * 2, x @ w),
    "loss": lambda x, w: with_loss(x * 2, jnp.mean((x @ w) ** 2)),
    "vjp_in_scan": lambda x, w: over(x, 2, lambda c: clip_all(c @ w) + c),
}


@pytest.mark.parametrize("backend", ["ffi", "xla"])
@pytest.mark.parametrize("name", MIXING)
def test_rules_that_mix_rows_are_not_split(name: str, backend: str) -> None:
    f = MIXING[name]
    fast = dfx.schedule(f, SPLITS["uneven"](), in_axes=(0, None), backend=backend)
    given = arguments()
    for what in ("jvp", "grad", "jvp_grad", "grad_grad"):
        assert_equal(DERIVATIVES[what], f, fast, given, f"{name}: {what}")


@pytest.mark.parametrize("backend", ["ffi", "xla"])
def test_rules_that_mix_rows_in_a_second_derivative(backend: str) -> None:
    """Equal, or refused with the rule's name."""

    def f(x: Any, w: Any) -> Any:
        return late(x @ w) * 2

    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=(0, None), backend=backend)
    given = arguments()
    for what in ("jvp", "grad", "jvp_jvp"):
        assert_equal(DERIVATIVES[what], f, fast, given, what)
    for what in ("jvp_grad", "grad_grad"):
        with pytest.raises(dfx.UnsupportedError, match=r"rule of 'normed' at .*combines rows"):
            DERIVATIVES[what](fast, *given)


@jax.custom_vjp
def whole_norm(x: Any) -> Any:
    """The gradient of the whole has length 1."""
    return x


whole_norm.defvjp(lambda x: (x, None), lambda _, ct: (ct / jnp.sqrt(jnp.sum(ct**2) + 0.1),))


def test_rules_of_rows_leave_derivatives_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary training is as it was: residuals stay with their nano-batch."""
    looked, found = OwnRules.mixing, []
    monkeypatch.setattr(OwnRules, "mixing", lambda *args: found.append(looked(*args)) or found[-1])

    def net(x: Any, w: Any) -> Any:
        return jax.nn.softmax(jax.nn.relu(x @ w) @ w)

    x, w, _, _ = arguments()
    for f, apart in ((net, True), (lambda x, w: whole_norm(net(x, w)), False)):
        found.clear()
        fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=(0, None))
        jax.grad(total(fast), (0, 1))(x, w)
        assert found and (set(found) == {""}) is apart


def _solved(x: Any, w: Any, **rules: Any) -> Any:
    diagonal = x[:, :1] ** 2 + 1
    given = {"matvec": lambda v: diagonal * v, "transpose_solve": lambda _, ct: ct / diagonal}
    given |= {name: rule(diagonal) for name, rule in rules.items()}
    matvec = given.pop("matvec")
    return jax.lax.custom_linear_solve(matvec, x @ w, lambda _, b: b / diagonal, **given)


def _linear(transpose: Any) -> Any:
    call = jax.custom_derivatives.linear_call
    return lambda x, w: call(lambda _, v: v * 2, transpose, (), x @ w)


def _of_length_1(ct: Any) -> Any:
    return ct / jnp.sqrt(jnp.sum(ct**2) + 0.1)


def _newton(f: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 30, lambda _, x: x - 0.3 * f(x), x)


def _root(x: Any, w: Any) -> Any:
    b = x @ w
    return jax.lax.custom_root(
        lambda v: v + 0.1 * jnp.tanh(v) - b,
        jnp.zeros_like(b),
        _newton,
        lambda _, y: y - jnp.mean(y, axis=0),
    )


SOLVED = {
    "rows": _solved,
    "root": _root,
    "transpose": lambda x, w: _solved(
        x, w, transpose_solve=lambda a: lambda _, ct: _of_length_1(ct / a)
    ),
    "matvec": lambda x, w: _solved(
        x, w, matvec=lambda a: lambda v: a * v + jnp.sum(a * v, axis=0) / 10
    ),
    "linear_call": _linear(lambda _, ct: _of_length_1(ct * 2)),
}


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("name", SOLVED)
def test_solutions_and_linear_calls(name: str, called_before: bool, assert_same: Any) -> None:
    """Their derivatives follow programs of the user's, of which values say nothing."""
    f, (x, w, _, _) = SOLVED[name], arguments()
    fast = dfx.schedule(f, dfx.NanoBatch([5, 4, 3]), in_axes=(0, None))
    if called_before:
        assert_same(f(x, w), fast(x, w))
    wanted = jax.value_and_grad(total(f), (0, 1))(x, w)
    assert_same(wanted, jax.value_and_grad(total(fast), (0, 1))(x, w))
    if name == "rows":
        assert "joined" not in dfx.explain(fast, x, w)


@jax.custom_vjp
def one(x: Any) -> Any:
    """Known to be 1, which its rule denies."""
    return jnp.ones_like(x)


one.defvjp(lambda x: (jnp.ones_like(x), x), lambda x, ct: (ct * x * 3,))


def test_a_rule_that_denies_what_is_known_of_a_value(assert_same: Any) -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.sum(x @ w) / jnp.sum(one(x)[:, 0])

    x, w, _, _ = arguments()
    fast = dfx.schedule(f, dfx.NanoBatch([5, 4, 3]), in_axes=(0, None), out_axes=dfx.Mean())
    wanted = jax.value_and_grad(total(f), (0, 1))(x, w)
    assert_same(wanted, jax.value_and_grad(total(fast), (0, 1))(x, w))


TWICE = np.asarray([2.0], np.float32)


@jax.custom_vjp
def other(x: Any) -> Any:
    """Its rule makes another result, with an array that it closes over."""
    return x


other.defvjp(lambda x: (x * TWICE, None), lambda _, ct: (ct * TWICE,))


@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.NanoBatch([5, 4, 3])])
def test_arrays_of_rules_under_checkpoint(strategy: Any, assert_same: Any) -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.sin(other(x @ w))

    def of(g: Any) -> Any:
        return jax.jit(jax.value_and_grad(jax.checkpoint(total(g)), (0, 1)))

    x, w, _, _ = arguments()
    axes = {} if isinstance(strategy, dfx.Branches) else {"in_axes": (0, None)}
    assert_same(of(f)(x, w), of(dfx.schedule(f, strategy, **axes))(x, w))


@jax.custom_jvp
def elsewhere(x: Any) -> Any:
    """The same for forward mode."""
    return x


elsewhere.defjvp(lambda xs, ts: (xs[0] * TWICE, ts[0] * TWICE))


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.NanoBatch([5, 4, 3])])
def test_arrays_of_rules_where_nobody_reads_tangents(
    strategy: Any, repeated: bool, assert_same: Any
) -> None:
    x, w, dx, dw = arguments()

    def f(x: Any, w: Any) -> Any:
        return jnp.sin(elsewhere(x @ w))

    def of(g: Any) -> Any:
        def value(x: Any, w: Any) -> Any:
            return jax.jvp(g, (x, w), (dx, dw))[0]

        def values(x: Any, w: Any) -> Any:
            return jax.lax.scan(lambda x, _: (value(x, w), None), x, None, length=2)[0]

        return jax.jit(values if repeated else value)

    axes = {} if isinstance(strategy, dfx.Branches) else {"in_axes": (0, None)}
    assert_same(of(f)(x, w), of(dfx.schedule(f, strategy, **axes))(x, w))


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)], ids=str)
def test_rules_that_cannot_be_followed_in_what_they_close_over(
    wanted: Any, assert_same: Any
) -> None:
    """``odeint`` mapped over rows: its rule raises for the times, which nobody asks for here."""
    f = jax.vmap(
        lambda x, w: odeint(lambda y, t: -y * t * w, x, jnp.linspace(0, 1, 3)), in_axes=(0, None)
    )
    fast = dfx.schedule(f, dfx.NanoBatch([2, 1]), in_axes=(0, None))
    x, w = jnp.arange(9.0).reshape(3, 3), jnp.asarray(0.7)
    for _ in range(2):
        got = jax.grad(total(fast), wanted)(x, w)
        want = jax.grad(total(f), wanted)(x, w)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), want, got)
