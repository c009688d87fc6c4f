"""What takes a function apart operator by operator sees the original's, and what surrounds it is unharmed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, jet, sparse
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import jaxpr_as_fun
from round_robin import RoundRobin

import dynaflow_xla as dfx
from dynaflow_xla import FallbackWarning
from dynaflow_xla.frontends.jax.regions import on_caller

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


class RowAfterRow(dfx.Strategy):
    """Each operator is a region, on the other lane than the one before."""

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("*")]

    def schedule(self, s: Any) -> None:
        lane = 0
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=lane % s.lanes)
                lane += 1


def test_a_call_while_another_function_is_traced_that_is_evaluated_at_once() -> None:
    """Lanes are compiled there for the first time: JAX would run their gates as it traces them."""
    fast = dfx.schedule(lambda x: 2 * jnp.sort(x), RowAfterRow(), lanes=2)

    @jax.jit
    def outer(x: Any) -> Any:
        with jax.ensure_compile_time_eval():
            known = fast(-X)
        return x + known[0]

    assert outer(1.0) == -5.0


SERIES = ((jnp.ones(4), jnp.zeros(4)),)
TAYLOR: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "values": lambda f: f,
    "tangents": lambda f: lambda x: jax.jvp(f, (x,), (2 * x,))[1],
    "linear": lambda f: jax.linearize(f, X)[1],
    "gradient": lambda f: jax.grad(lambda x: f(x).sum()),
    "product with the Hessian": lambda f: (
        lambda x: jax.jvp(jax.grad(lambda y: f(y).sum()), (x,), (x,))[1]
    ),
}


@pytest.mark.parametrize("way", TAYLOR)
@pytest.mark.parametrize("strategy", [RoundRobin(), dfx.Branches()], ids=str)
def test_taylor_series_of_derivatives(strategy: Any, way: str) -> None:
    def wave(x: Any) -> Any:
        return jnp.sin(x) * jnp.exp(x / 4) * x

    got, want = (
        jet.jet(TAYLOR[way](f), (X,), SERIES) for f in (scheduled(wave, strategy), jax.jit(wave))
    )
    jax.tree_util.tree_map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want
    )


def test_an_operator_that_asks_for_devices() -> None:
    @custom_partitioning
    def sorted_rows(x: Any) -> Any:
        return jnp.sort(x)

    sorted_rows.def_partition(
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        partition=lambda mesh, args, result: (
            mesh, lambda x: jnp.sort(x), result.sharding, (args[0].sharding,),
        ),
        sharding_rule="i j -> i j",
    )  # fmt: skip
    x = -jnp.arange(12.0).reshape(3, 4)
    for strategy in (dfx.Branches(), RoundRobin()):
        fast = scheduled(lambda x: sorted_rows(x) + jnp.cos(x), strategy)
        want = np.sort(x) + np.cos(x)
        np.testing.assert_allclose(fast(x), want, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(lambda x, f=fast: f(x) + 1)(x), want + 1, rtol=1e-6)


def test_an_argument_named_self() -> None:
    def scaled(x: Any, self: Any) -> Any:
        return jnp.sort(x) * self

    fast = scheduled(scaled)
    np.testing.assert_array_equal(fast(X, self=2.0), np.sort(X) * 2)
    assert fast.eval_shape(X, self=2.0).shape == (4,)
    assert "dfx" in fast.lower(X, self=2.0).as_text()


def test_rules_of_the_mark_for_the_callers_thread() -> None:
    def marked(x: Any) -> Any:
        return on_caller.marked(jnp.sin(x), ())

    closed = jax.make_jaxpr(marked)(X)
    run = jaxpr_as_fun(closed)
    np.testing.assert_allclose(jax.grad(lambda x: run(x)[0].sum())(X), jnp.cos(X), rtol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(lambda x: run(x)[0])(jnp.stack([X, 2 * X]))[1], jnp.sin(2 * X)
    )


def _split(key: Any) -> Any:
    one, other = jax.random.split(key)
    return one, other, jnp.sort(jnp.arange(8.0))


def _folded(key: Any) -> Any:
    return jnp.sort(jax.random.normal(jax.random.fold_in(key, 1), (8,)))


def _passed_on(key: Any) -> Any:
    return key, jnp.sort(jnp.arange(8.0))


def _drawn(key: Any) -> Any:
    return jnp.sort(jax.random.normal(key, (8,)))


def _drawn_twice(key: Any) -> Any:
    return jax.random.normal(key, (8,)), jnp.sort(jax.random.uniform(key, (8,)))


def _noisy(w: Any, key: Any) -> Any:
    return jnp.sum(jax.random.normal(key, (8,)) * jnp.sort(w))


def _twice(f: Any) -> None:
    key = jax.random.key(0)
    f(key), f(key)


KEYS: dict[str, tuple[Any, Callable[[Any], Any], bool]] = {
    "splits are used": (_split, lambda f: jax.random.bits(f(jax.random.key(0))[0]), True),
    "split twice": (_split, _twice, False),
    "folded": (_folded, _twice, True),
    "passed on": (_passed_on, lambda f: jax.random.bits(f(jax.random.key(0))[0]), True),
    "passed on twice": (_passed_on, _twice, True),
    "drawn twice": (_drawn, _twice, False),
    "drawn twice inside": (_drawn_twice, lambda f: f(jax.random.key(0)), False),
    "gradient": (_noisy, lambda f: jax.grad(f)(jnp.ones(8), jax.random.key(0)), True),
    "tangent": (
        _noisy,
        lambda f: jax.jvp(lambda w: f(w, jax.random.key(0)), (X.repeat(2),), (X.repeat(2),)),
        True,
    ),
    "vmap": (_split, lambda f: jax.vmap(f)(jax.random.split(jax.random.key(0), 3)), True),
}


@pytest.mark.parametrize("case", KEYS)
@pytest.mark.parametrize("strategy", [RoundRobin(), dfx.Branches(wide=False), "auto"])
def test_keys_are_used_up_as_by_the_original(strategy: Any, case: str) -> None:
    fn, use, fine = KEYS[case]
    for f in (jax.jit(fn), scheduled(fn, strategy)):
        with jax.debug_key_reuse(True):
            if fine:
                use(f)
                continue
            with pytest.raises(jax.errors.KeyReuseError):
                use(f)


def test_the_warning_names_the_users_line() -> None:
    fast = scheduled(logarithm)
    with pytest.warns(FallbackWarning) as caught:
        checkify.checkify(fast)(X)
        checkify.checkify(jax.jit(fast))(X)
    assert {warning.filename for warning in caught} == {__file__}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _WithAnArrayForAField:
    rows: Any
    size: Any = dataclasses.field(metadata={"static": True})


@pytest.mark.parametrize("original_first", [False, True])
def test_arrays_among_static_fields(original_first: bool) -> None:
    """JAX compares them with those it knows, which in a trace would be a tracer."""

    @jax.jit
    def f(given: Any) -> Any:
        return jnp.sort(given.rows) * jnp.sort(-given.rows)

    def given() -> Any:
        return _WithAnArrayForAField(jnp.arange(300.0), jnp.float32(0.5) * 1)

    want = jnp.sort(given().rows) * jnp.sort(-given().rows)
    if original_first:
        f(given())
    fast = dfx.schedule(f, dfx.Branches(wide=False, margin=-1.0))
    for _ in range(2):
        assert (fast(given()) == want).all()
