"""Derivative rules of a function's own under ``jet``, and ``custom_vjp`` with ``optimize_remat``.

All rules here are wrong on purpose, so that a lost one shows in the values; in float64 rounding does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import jet

import dynaflow_xla as dfx

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@jax.custom_jvp
def bent(x: Any) -> Any:
    return jax.lax.tanh(x)


bent.defjvp(lambda xs, ts: (jax.lax.tanh(xs[0]), jnp.exp(-xs[0]) * ts[0] * 3))


@jax.custom_vjp
def turned(x: Any) -> Any:
    return jnp.sin(x)


turned.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.exp(-x) * 2,))


@jax.custom_vjp
def kept(x: Any) -> Any:
    """Whose residuals are made only where somebody needs them."""
    return jnp.sin(x)


kept.defvjp(lambda x: (jnp.sin(x), jnp.exp(-x)), lambda e, ct: (ct * e * 2,), optimize_remat=True)


@jax.custom_vjp
def normal(x: Any) -> Any:
    """Whose rule mixes rows."""
    return jnp.sin(x)


normal.defvjp(
    lambda x: (jnp.sin(x), x),
    lambda x, ct: (ct * jnp.cos(x) / jnp.sqrt(jnp.sum(ct**2) + 0.1),),
    optimize_remat=True,
)

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "branches": lambda f: dfx.schedule(f, dfx.Branches(), lanes=2),
    "split": lambda f: dfx.schedule(f, dfx.NanoBatch([5, 4, 3]), in_axes=(0, None)),
    "split_xla": lambda f: dfx.schedule(f, dfx.NanoBatch(2), in_axes=(0, None), backend="xla"),
}


def arguments() -> list[Any]:
    """Rows, weights, and directions of both: other ones in each run."""
    rng = np.random.default_rng()
    shapes = (12, 6), (6, 6), (12, 6), (6, 6)
    return [jnp.asarray(rng.standard_normal(s) / 3) for s in shapes]


def total(f: Any) -> Any:
    return lambda *args: jnp.sum(jnp.sin(f(*args)))


def around(g: Any) -> Any:
    """A function of rows and weights that calls one with a rule twice."""
    return lambda x, w: g(g(x @ w) @ w) + jnp.cos(x)


def assert_close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * float(np.max(np.abs(b))))


@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.parametrize(("g", "plain"), [(bent, jnp.tanh), (turned, jnp.sin)], ids=["jvp", "vjp"])
def test_series_of_a_gradient(g: Any, plain: Any, how: str) -> None:
    """A gradient follows the rule; its series are those of the operators that the rule is made of."""
    f, (x, w, _, dw) = around(g), arguments()

    def series(f: Any) -> Any:
        gradient = jax.grad(total(f), 1)
        return jet.jet(lambda v: gradient(x, v), (w,), ((dw, jnp.cos(dw)),))

    want = series(f)
    assert_close(series(SCHEDULES[how](f)), want)
    with pytest.raises(AssertionError):  # without its rule it has other ones
        assert_close(series(around(plain)), want)


REMAT: dict[str, Callable[[Any, list[Any]], Any]] = {
    "grad": lambda f, a: jax.value_and_grad(total(f), (0, 1))(*a[:2]),
    "checkpoint": lambda f, a: jax.jit(
        jax.value_and_grad(jax.checkpoint(total(f)), (0, 1))  # type: ignore[arg-type]
    )(*a[:2]),
    "scan": lambda f, a: jax.grad(
        lambda w: jnp.sum(
            jax.lax.scan(lambda x, _: (jax.checkpoint(f)(x, w), None), a[0], None, 2)[0]
        )
    )(a[1]),
}
"""In the last two a first pass needs no residuals: there JAX puts the function in the rule's place."""


@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.parametrize(
    ("g", "plain"), [(kept, jnp.sin), (normal, jnp.sin)], ids=["rows", "mixing"]
)
def test_rules_with_optimize_remat(g: Any, plain: Any, how: str) -> None:
    f, given = around(g), arguments()
    fast = SCHEDULES[how](f)
    for derivative in REMAT.values():
        want = derivative(f, given)
        assert_close(derivative(fast, given), want)
        with pytest.raises(AssertionError):
            assert_close(derivative(around(plain), given), want)
