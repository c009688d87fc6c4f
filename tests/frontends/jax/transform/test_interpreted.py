"""What takes a function apart operator by operator sees the original's, and what surrounds it is unharmed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, sparse
from round_robin import RoundRobin

import dynaflow_xla as dfx
from dynaflow_xla import FallbackWarning

pytestmark = pytest.mark.usefixtures("quick_to_compile")

X = jnp.array([1.0, -1.0, 2.0, 3.0])


def scheduled(fn: Callable[..., Any], strategy: Any = None) -> Any:
    return dfx.schedule(jax.jit(fn), strategy or RoundRobin(), lanes=2)


def logarithm(x: Any, index: int = 0) -> Any:
    return jnp.sin(jnp.log(x)).sum() + x[index]


WAYS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "values": lambda f: f,
    "jit": lambda f: jax.jit(f),
    "gradient": lambda f: jax.grad(f),
    "tangent": lambda f: lambda x, *i: jax.jvp(lambda y: f(y, *i), (x,), (x,)),
    "linear": lambda f: lambda x, *i: jax.linearize(lambda y: f(y, *i), x)[1](x),
    "vmap": lambda f: lambda x, *i: jax.vmap(lambda y: f(y, *i))(jnp.stack([x, x])),
}


@pytest.mark.filterwarnings("ignore::dynaflow_xla.FallbackWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", [RoundRobin(), dfx.Branches(), dfx.Sequential(), "auto"])
def test_checkify_finds_what_it_finds_in_the_original(strategy: Any, way: str) -> None:
    fast = scheduled(logarithm, strategy)
    for args in ((X,), (jnp.abs(X),), (jnp.abs(X), 9)):
        found = [
            checkify.checkify(WAYS[way](f), errors=checkify.all_checks)(*args)[0].get()
            for f in (jax.jit(logarithm), fast)
        ]
        assert found[0] == found[1]
        assert (found[0] is None) == (args[1:] == () and args[0] is not X)


def test_checks_of_the_users() -> None:
    def checked(x: Any) -> Any:
        checkify.check(x.sum() > 0, "the sum has to be positive, it is {s}", s=x.sum())
        return 2 * jnp.sort(x)

    fast = scheduled(checked)
    with pytest.warns(FallbackWarning, match="under checkify, which has to see every operator"):
        error, result = checkify.checkify(fast)(-X)
    assert "it is -5.0" in error.get()
    np.testing.assert_array_equal(result, 2 * np.sort(-X))
    # What checkify returns can be scheduled itself.
    error, _ = dfx.schedule(checkify.checkify(checked), RoundRobin(), lanes=2)(-X)
    assert "it is -5.0" in error.get()


def test_sparsify() -> None:
    def product(m: Any, v: Any) -> Any:
        return jnp.sin(m @ v) + jnp.sort(v)

    matrix = sparse.BCOO.fromdense(jnp.eye(4))
    with pytest.warns(FallbackWarning, match="under sparsify"):
        got = sparse.sparsify(scheduled(product))(matrix, X)
    np.testing.assert_allclose(got, product(jnp.eye(4), X), rtol=1e-6)


def test_what_an_operator_does_to_single_elements() -> None:
    """XLA ends the process where a reduction, or a fusion of a scatter, calls something."""

    def larger(a: Any, b: Any) -> Any:
        return jnp.maximum(a, b) * 1.0 + 0.0 * jnp.minimum(a, b)

    fast, x = scheduled(larger), jnp.arange(24.0).reshape(4, 6)
    with pytest.warns(FallbackWarning, match="scalars alone"):
        got = lax.reduce(x, jnp.float32(-1e9), fast, (1,))
    np.testing.assert_array_equal(got, x.max(1))
    wave = scheduled(lambda v: jnp.cos(v) + v)
    with pytest.warns(FallbackWarning, match="scalars alone"):
        got = jnp.zeros(5).at[jnp.array([1, 2])].apply(wave)
    np.testing.assert_array_equal(got, [0, 1, 1, 0, 0])
    with pytest.warns(FallbackWarning, match="scalars alone"):
        assert scheduled(larger)(1.0, 2.0) == 2.0


class Scales:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @functools.partial(jax.jit, static_argnums=0)
    def times(self, x: Any) -> Any:
        return jnp.sort(x) * self.factor


def test_a_bound_method_of_a_jitted_function() -> None:
    for factor in (2.0, 3.0):
        fast = dfx.schedule(Scales(factor).times, RoundRobin(), lanes=2)
        np.testing.assert_array_equal(fast(X), np.sort(X) * factor)


@jax.tree_util.register_pytree_node_class
class Computes:
    """Its leaves are others whenever it is flattened."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.value * 1,), None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Any) -> Computes:
        return cls(*leaves)


def test_leaves_that_flattening_computes() -> None:
    fast = dfx.schedule(lambda c: jnp.sort(c.value), RoundRobin(), lanes=2)
    np.testing.assert_array_equal(fast(Computes(X)), np.sort(X))


def test_a_guard_against_transfers() -> None:
    """It is about the user's: lanes look at memory that is there."""
    weights = jnp.ones((4, 4))
    fast = scheduled(lambda x: jnp.sin(x @ weights) + jnp.sort(x))
    with jax.transfer_guard("disallow"):
        got = fast(X)
    np.testing.assert_allclose(got, jnp.sin(X @ weights) + jnp.sort(X), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:backend and device argument")
def test_a_device_of_jit_is_refused() -> None:
    device = jax.devices("cpu")[0]
    with pytest.raises(dfx.UnsupportedError, match="put the arguments there"):
        dfx.schedule(jax.jit(jnp.sort, device=device))
