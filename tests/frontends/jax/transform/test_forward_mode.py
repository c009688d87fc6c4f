"""Forward mode of scheduled functions: tangents by themselves, over and under reverse mode, in loops.

Each derivative is that of the original, on fresh random inputs, and what computes it is scheduled.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet
from jaxprs import walked

import dynaflow_xla as dfx

ROWS, WIDTH = 4, 3

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def layer(x: Any, w: Any) -> tuple[Any, Any]:
    """Rows by themselves, and what does not depend on them."""
    return (jnp.tanh(x @ w) * (jnp.sin(x) @ w.T)).sum(-1, keepdims=True) * x, jnp.sum(w * w)


@pytest.fixture
def given() -> tuple[Any, ...]:
    rng = np.random.default_rng()
    shapes = (ROWS, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH)
    return tuple(jnp.asarray(rng.uniform(-1, 1, shape), jnp.float32) for shape in shapes)


def whole(fn: Any = layer) -> Any:
    return dfx.schedule(fn, "branches", lanes=1)


def split(fn: Any = layer) -> Any:
    return dfx.schedule(fn, dfx.NanoBatch(2), lanes=1, in_axes=(0, None), out_axes=(0, None))


def assert_close(want: Any, got: Any) -> None:
    wanted, tree = jax.tree_util.tree_flatten(want)
    found, tree_found = jax.tree_util.tree_flatten(got)
    assert tree == tree_found
    for w, g in zip(wanted, found, strict=True):
        assert (w.dtype, w.shape) == (g.dtype, g.shape)
        if w.dtype != jax.dtypes.float0:
            scale = float(np.max(np.abs(w), initial=1e-3))
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4 * scale)


def loss(f: Any, w: Any) -> Any:
    def of_x(x: Any) -> Any:
        rows, same = f(x, w)
        return jnp.sum(rows**2) + same

    return of_x


def scanned(f: Any, w: Any) -> Any:
    return lambda x: lax.scan(lambda c, _: (jnp.tanh(f(c, w)[0]), c.sum()), x, None, 2)


def repeated(f: Any, w: Any) -> Any:
    """A loop that has a forward mode only."""

    def run(x: Any) -> Any:
        return lax.while_loop(
            lambda c: c[0] < 2 + (x[0, 0] > 0), lambda c: (c[0] + 1, f(c[1], w)[0]), (0, x)
        )[1]

    return run


def total(f: Any) -> Any:
    return lambda *a: sum(jnp.sum(x) for x in jax.tree_util.tree_leaves(f(*a)))


SAVED = jax.checkpoint_policies.everything_saveable

DERIVATIVES = {
    "jvp": lambda f, x, w, t: jax.jvp(f, (x, w), (t, w)),
    "jacfwd": lambda f, x, w, t: jax.jacfwd(f, argnums=(0, 1))(x, w),
    "linearize": lambda f, x, w, t: jax.linearize(f, x, w)[1](t, w),
    "vmap of linear": lambda f, x, w, t: jax.vmap(jax.linearize(f, x, w)[1], (0, None))(
        jnp.stack([t, x]), w
    ),
    "transposed vmap of linear": lambda f, x, w, t: jax.linear_transpose(
        jax.vmap(jax.linearize(lambda z: f(z, w)[0], x)[1]), jnp.stack([x, x])
    )(jnp.stack([t, x])),
    "vmap of jvp": lambda f, x, w, t: jax.vmap(lambda d: jax.jvp(f, (x, w), (d, w)))(
        jnp.stack([t, x])
    ),
    "jvp of vmap": lambda f, x, w, t: jax.jvp(
        lambda z: jax.vmap(f, (0, None))(z, w), (jnp.stack([x, t]),), (jnp.stack([t, x]),)
    ),
    "hessian": lambda f, x, w, t: jax.hessian(loss(f, w))(x),
    "vmap of hessian": lambda f, x, w, t: jax.vmap(jax.hessian(loss(f, w)))(jnp.stack([x, t])),
    "forward over forward": lambda f, x, w, t: jax.jacfwd(jax.jacfwd(loss(f, w)))(x),
    "reverse over forward": lambda f, x, w, t: jax.jacrev(jax.jacfwd(loss(f, w)))(x),
    "jvp of grad": lambda f, x, w, t: jax.jvp(jax.grad(loss(f, w)), (x,), (t,)),
    "transposed second derivative": lambda f, x, w, t: jax.linear_transpose(
        lambda d: jax.jvp(lambda z: jax.jvp(loss(f, w), (z,), (d,))[1], (x,), (t,))[1], x
    )(jnp.float32(0.5)),
    "hessian of scan": lambda f, x, w, t: jax.hessian(total(scanned(f, w)))(x),
    "linearized scan": lambda f, x, w, t: jax.linearize(scanned(f, w), x)[1](t),
    "grad of jvp of scan": lambda f, x, w, t: jax.grad(
        lambda z: total(lambda y: jax.jvp(scanned(f, w), (y,), (t,)))(z)
    )(x),
    "while": lambda f, x, w, t: jax.jvp(repeated(f, w), (x,), (t,)),
    "while with batched predicates": lambda f, x, w, t: jax.jvp(
        jax.vmap(repeated(f, w)), (jnp.stack([x, -x]),), (jnp.stack([t, t]),)
    ),
    "checkpoint": lambda f, x, w, t: jax.hessian(jax.checkpoint(loss(f, w)))(x),
    "checkpoint that saves": lambda f, x, w, t: jax.hessian(
        jax.checkpoint(loss(f, w), policy=SAVED)
    )(x),
    "scan of checkpoint": lambda f, x, w, t: jax.grad(
        lambda z: jnp.sum(
            lax.scan(jax.checkpoint(lambda c, _: (f(c, w)[0], None)), z, None, 2)[0] * t
        )
    )(x),
    "scan of checkpoint that saves": lambda f, x, w, t: jax.jacfwd(
        lambda z: lax.scan(
            jax.checkpoint(lambda c, _: (f(c, w)[0], None), policy=SAVED), z, None, 2
        )[0]
    )(x),
    "jet": lambda f, x, w, t: jet.jet(lambda z: f(jnp.sin(z), w)[0], (x,), ((t, x),)),
}


# A split's passes are split in the same way whatever asks for them.
ALSO = ("vmap of hessian", "forward over forward", "scan of checkpoint that saves")
OF_A_SPLIT = ("jvp", "linearize", "vmap of linear", "hessian", "jvp of grad", "checkpoint")


@pytest.mark.parametrize(
    ("made", "name"),
    [
        pytest.param(whole, name, marks=pytest.mark.slow if name in ALSO else ())
        for name in DERIVATIVES
    ]
    + [
        pytest.param(split, name, marks=() if name in OF_A_SPLIT else pytest.mark.slow)
        for name in DERIVATIVES
    ],
)
def test_forward_mode_is_that_of_the_original(made: Any, name: str, given: Any) -> None:
    fast, run = made(), DERIVATIVES[name]
    x, w, t = given
    want = jax.jit(lambda *a: run(layer, *a))(x, w, t)
    assert_close(want, jax.jit(lambda *a: run(fast, *a))(x, w, t))


@pytest.mark.parametrize("backend", ["ffi", "xla"])
@pytest.mark.parametrize("name", ["jvp", "hessian", "linearize", "jet", "checkpoint"])
def test_forward_mode_of_each_backend_outside_of_jit(backend: str, name: str, given: Any) -> None:
    fast, run = dfx.schedule(layer, "branches", lanes=1, backend=backend), DERIVATIVES[name]
    assert_close(run(jax.jit(layer), *given), run(fast, *given))


def primitives(fn: Any, *args: Any) -> list[str]:
    jaxpr = jax.make_jaxpr(lambda *a: jax.jit(fn)(*a))(*args)
    names = [eqn.primitive.name for eqn in walked(jaxpr)]
    return [name for name in names if name.startswith("dfx")]


def test_a_jvp_is_one_program_with_results_and_tangents(given: Any) -> None:
    """No residuals go through memory; where nobody wants tangents, the function itself is left."""
    x, w, t = given
    fast = whole()
    assert primitives(lambda x, t: jax.jvp(lambda z: fast(z, w), (x,), (t,)), x, t) == ["dfx_jvp"]
    lowered = jax.jit(lambda x, t: jax.jvp(lambda z: fast(z, w), (x,), (t,))).lower(x, t).as_text()
    assert lowered.count("custom_call @dfx") == 1
    value_alone = jax.jit(lambda x, t: jax.jvp(lambda z: fast(z, w), (x,), (t,))[0])
    want, got = jax.jit(lambda x: layer(x, w))(x), value_alone(x, t)
    assert_close(want, got)


def test_linearizing_parts_known_from_unknown(given: Any) -> None:
    x, w, t = given
    fast = whole()
    linear = jax.linearize(lambda z: fast(z, w), x)[1]
    assert primitives(linear, t) == ["dfx_linear"]
    # Known inputs decide known outputs: the sum over w is no part of what is linear.
    found = jax.linear_transpose(linear, x)((t, jnp.float32(1)))
    want = jax.linear_transpose(jax.linearize(lambda z: layer(z, w), x)[1], x)((t, jnp.float32(1)))
    assert_close(want, found)


def test_a_linear_function_is_transposed(given: Any) -> None:
    x, w, t = given

    def linear(x: Any, w: Any) -> tuple[Any, Any]:
        return jnp.sin(w) @ x.T, w.sum() * 2

    fast = whole(linear)
    want = jax.linear_transpose(lambda z: linear(z, w)[0], x)(t.T)
    assert_close(want, jax.linear_transpose(lambda z: fast(z, w)[0], x)(t.T))
    with pytest.raises(Exception, match=r"sin|linear|Transpose"):  # it is not linear in w
        jax.linear_transpose(lambda z: fast(x, z)[0], w)(t.T)


def test_integers_and_what_does_not_move(given: Any) -> None:
    """Tangents of integers are of type float0; what is not reached has no tangent at all."""
    x, w, t = given

    def mixed(n: Any, x: Any, w: Any) -> dict[str, Any]:
        return {"n": n * 2, "row": x[n], "first": jnp.argmax(x), "w": jnp.sin(w), "x": x}

    fast = whole(mixed)
    n = jnp.asarray([2, 0])
    nothing = np.zeros(2, jax.dtypes.float0)
    want = jax.jvp(mixed, (n, x, w), (nothing, t, w))
    assert_close(want, jax.jvp(fast, (n, x, w), (nothing, t, w)))

    # A function without forward mode is no obstacle where no tangent reaches it.
    @jax.custom_vjp
    def reverse_only(w: Any) -> Any:
        return jnp.sin(w)

    reverse_only.defvjp(lambda w: (jnp.sin(w), w), lambda w, ct: (ct * 2,))
    beside = whole(lambda x, w: (jnp.cos(x), reverse_only(w)))
    want = jax.jvp(lambda z: (jnp.cos(z), reverse_only(w)), (x,), (t,))
    assert_close(want, jax.jvp(lambda z: beside(z, w), (x,), (t,)))
    with pytest.raises(TypeError, match="custom_vjp"):  # JAX's own error
        jax.jvp(beside, (x, w), (t, w))
    assert_close(2 * jnp.ones_like(w), jax.grad(lambda w: beside(x, w)[1].sum())(w))


def test_closed_over_tracers_static_arguments_and_aux(given: Any) -> None:
    x, w, t = given

    def run(schedule: Any) -> Any:
        def of(x: Any, w: Any) -> Any:
            inner = schedule(lambda z, power: (jnp.sin(z @ w) ** power, {"w": w.sum()}))
            return inner(x, 2)

        def jitted(x: Any, w: Any) -> Any:
            return jax.jvp(lambda x, w: of(x, w)[0], (x, w), (t, w))

        value, tangent, aux = jax.jvp(lambda z: of(z, w), (x,), (t,), has_aux=True)
        return jitted(x, w), jax.jit(jitted)(x, w), value, tangent, aux

    def schedule(fn: Any) -> Any:
        return dfx.schedule(jax.jit(fn, static_argnums=1), "branches", lanes=1)

    assert_close(run(lambda fn: jax.jit(fn, static_argnums=1)), run(schedule))


def test_rules_of_its_own(given: Any) -> None:
    """``custom_jvp`` and the fast form of ``jax.checkpoint`` inside hold in every mode."""
    x, w, t = given

    @jax.custom_jvp
    def softened(x: Any) -> Any:
        return jnp.abs(x)

    @softened.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        return jnp.abs(primals[0]), 3 * jnp.tanh(primals[0]) * tangents[0]

    inside = jax.checkpoint(lambda x: jnp.sin(softened(x)))

    def fn(x: Any, w: Any) -> tuple[Any, Any]:
        return inside(x @ w), jnp.sum(inside(w))

    for backend in ("ffi", "xla"):
        fast = dfx.schedule(fn, "branches", lanes=1, backend=backend)
        for run in ("jvp", "hessian", "linearize"):
            assert_close(DERIVATIVES[run](fn, x, w, t), DERIVATIVES[run](fast, x, w, t))


def test_a_matrix_vector_product_by_forward_over_reverse_serves_a_solver(given: Any) -> None:
    """Differentiating a solver transposes what it solves with."""
    x, w, t = given

    def solve(f: Any) -> Any:
        def of(x: Any) -> Any:
            def product(v: Any) -> Any:
                return jax.jvp(jax.grad(lambda z: jnp.sum(f(z, w)[0])), (x,), (v,))[1] + 9 * v

            return jax.scipy.sparse.linalg.cg(product, t, tol=1e-6)[0].sum()

        return of

    def bowl(x: Any, w: Any) -> tuple[Any, Any]:
        return jnp.cosh(x) + (x @ w) ** 2, w.sum()

    fast = whole(bowl)
    assert_close(jax.jit(jax.value_and_grad(solve(bowl)))(x), jax.value_and_grad(solve(fast))(x))


def test_forward_over_integers_alone() -> None:
    """No tangent reaches the function: there is nothing to differentiate."""
    fast = dfx.schedule(lambda n: n * 2, dfx.NanoBatch(2), lanes=1, in_axes=0)
    n = jnp.arange(6)
    given = (n,), (np.zeros(6, jax.dtypes.float0),)
    assert_close(jax.jvp(fast.original, *given), jax.jvp(fast, *given))


@pytest.mark.parametrize("loop", ["scan", "while", "cond"])
def test_results_of_loops_are_not_mapped_with_their_tangents(loop: str) -> None:
    """One loop makes results and tangents; ``jacfwd`` maps over the tangents only."""

    def f(w: Any) -> Any:
        if loop == "scan":
            return lax.scan(lambda c, x: (jnp.tanh(x + c), jnp.sort(c)), w[0], w)
        if loop == "while":
            return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, w))[
                1
            ]
        return lax.cond(w[0, 0] > 0, jnp.cos, jnp.sin, w)

    w = jax.random.normal(jax.random.key(3), (4, 3))
    fast = dfx.schedule(jax.jit(f), dfx.Sequential(), lanes=1)
    assert_close(jax.jacfwd(f)(w), jax.jacfwd(fast)(w))
    assert_close(jax.jit(jax.jacfwd(f))(w), jax.jit(jax.jacfwd(fast))(w))


@pytest.mark.parametrize("backend", ["ffi", "xla"])
def test_second_derivatives_in_nano_batches_do_not_lose_rules(backend: str) -> None:
    """A rule that calls its own function leaves it in the first derivative."""

    @jax.custom_jvp
    def ruled(x: Any) -> Any:
        return jnp.tanh(x)

    ruled.defjvp(lambda primals, tangents: (ruled(primals[0]), ruled(primals[0]) * tangents[0] * 7))

    def f(x: Any) -> Any:
        return ruled(x) * 2

    x = jax.random.normal(jax.random.key(3), (6, 5))
    fast = dfx.schedule(f, dfx.NanoBatch(2), in_axes=0, backend=backend)

    def directional(g: Any) -> Any:
        return lambda y: jax.jvp(g, (y,), (x,))[1]

    twice, mapped = directional(directional(fast)), jax.vmap(directional(fast))
    np.testing.assert_allclose(directional(fast)(x), directional(f)(x), rtol=1e-5)
    np.testing.assert_allclose(twice(x), directional(directional(f))(x), rtol=1e-5)
    np.testing.assert_allclose(
        jax.jvp(mapped, (x[None],), (x[None],))[1],
        jax.jvp(jax.vmap(directional(f)), (x[None],), (x[None],))[1],
        rtol=1e-5,
    )
