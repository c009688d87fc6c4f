"""What operators cost in the steps of loops, and what is written or read in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.frontends.jax.capture.costs import estimate, steps  # noqa: E402

pytestmark = pytest.mark.usefixtures("assumed_numbers")

STEPS = 1000


def ns(f: Callable[..., Any], *args: Any) -> float:
    """Of the longest operator, a step."""
    return max(estimate(eqn).ns for eqn in jax.make_jaxpr(f)(*args).eqns) / STEPS


def loop(body: Callable[..., Any], carried: Any) -> float:
    """Nanoseconds of a step of ``body``."""
    return ns(lambda c: lax.fori_loop(0, STEPS, body, c), carried)


def is_small(body: Callable[..., Any], carried: Any) -> bool:
    jaxpr = jax.make_jaxpr(lambda c: lax.fori_loop(0, STEPS, body, c))(carried)
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return steps.InLoop.of([eqn.params["jaxpr"]]).small


def test_a_loop_of_scalars_is_compiled_as_one_function() -> None:
    body = lambda i, x: x * 0.99 + jnp.sin(x)  # noqa: E731
    assert is_small(body, jnp.float32(1.0))
    assert loop(body, jnp.float32(1.0)) < 15
    many = jnp.ones(1000)
    assert not is_small(body, many)
    assert loop(body, many) > 10 * loop(body, jnp.float32(1.0))


@pytest.mark.parametrize("n", [8, 64])
def test_what_products_read_tells_small_loops(n: int) -> None:
    matrix = jnp.ones((n, n))
    assert is_small(lambda i, h: jnp.tanh(matrix @ h), jnp.ones(n)) == (n == 8)


def test_a_loop_in_a_small_step_counts_too() -> None:
    def nested(size: int) -> Callable[..., Any]:
        return lambda i, x: x + lax.fori_loop(0, 3, lambda j, y: y * 0.5, jnp.full(size, x)).sum()

    assert is_small(nested(4), jnp.float32(1.0))
    assert not is_small(nested(400), jnp.float32(1.0))


@pytest.mark.parametrize(
    "body",
    [
        lambda i, x: x.at[i].set(2.0 * x[i - 1]),
        lambda i, x: x.at[jnp.array([3, 5])].add(1.0),
        lambda i, x: lax.dynamic_update_slice(x, x[:2] + 1.0, (i, 0)),
    ],
    ids=["set", "scatter", "dynamic_update_slice"],
)
def test_a_step_writes_where_the_array_lies(body: Callable[..., Any]) -> None:
    few, many = (loop(body, jnp.ones((rows, 64))) for rows in (100, 10_000))
    assert many == few < 1000


def test_updates_of_one_array_count_once() -> None:
    """Each writes where the last one did; what else a step carries is as large as it is."""

    def body(i: Any, carried: Any) -> Any:
        x, y = carried
        for k in range(4):
            x = x.at[i + k].set(y[k])
        return x, jnp.tanh(y)

    assert not is_small(body, (jnp.ones(4000), jnp.ones(1000)))
    assert is_small(body, (jnp.ones(4000), jnp.ones(8)))
    small = loop(body, (jnp.ones(4000), jnp.ones(8)))
    assert small == loop(body, (jnp.ones(40_000), jnp.ones(8))) < 60


def test_what_is_called_in_a_step_tells_small_loops() -> None:
    matrix = jnp.ones((64, 64))
    product = jax.jit(lambda h: jnp.tanh(matrix @ h))
    assert not is_small(lambda i, h: product(h), jnp.ones(64))
    activations = lambda i, h: jax.nn.silu(jax.nn.relu(h)) + jnp.clip(h, 0, 1)  # noqa: E731
    assert is_small(activations, jnp.ones(64))


@pytest.mark.parametrize(
    ("body", "carried"),
    [
        (lambda i, x: jnp.cumsum(x), jnp.ones(8)),
        (lambda i, key: jax.random.fold_in(key, i), jax.random.key(0)),
        (lambda i, x: jnp.sort(x), jnp.ones(8)),
        (lambda i, x: jnp.linalg.cholesky(x), jnp.eye(3)),
    ],
    ids=["cumsum", "fold_in", "sort", "cholesky"],
)
def test_nothing_is_started_in_a_small_loop(body: Callable[..., Any], carried: Any) -> None:
    assert is_small(body, carried)
    once = max(estimate(eqn).ns for eqn in jax.make_jaxpr(lambda c: body(0, c))(carried).eqns)
    assert loop(body, carried) < 4 * once


def test_an_update_outside_of_loops_moves_the_array() -> None:
    def update(x: Any) -> Any:
        return x.at[jnp.array([3, 5])].add(1.0)

    assert ns(update, jnp.ones((100_000, 64))) > 100 * ns(update, jnp.ones((100, 64)))


def test_rows_are_read_not_the_table() -> None:
    def look_up(table: Any, at: Any) -> Any:
        return table[at]

    few, many = (ns(look_up, jnp.ones((rows, 64)), jnp.arange(8)) for rows in (100, 100_000))
    assert many == few


def test_matrix_of_a_vector_bounds_its_product_in_a_step() -> None:
    def product(n: int) -> float:
        matrix = jnp.ones((n, n))
        return loop(lambda i, h: jnp.tanh(matrix @ h), jnp.ones(n))

    assert 3 < product(256) / product(128) < 4
    # Above what a core's own cache holds each byte takes longer.
    assert 5 < product(512) / product(256) < 6.1
    assert 3.8 < product(1024) / product(512) < 4


def test_a_scan_reads_and_writes_its_rows() -> None:
    def scan(rows: int, width: int) -> float:
        def f(x: Any) -> Any:
            return lax.scan(lambda c, row: (c + 1.0, row * c), 0.0, x)[1]

        return ns(f, jnp.ones((rows, width)))

    assert scan(STEPS, 100_000) > 10 * scan(STEPS, 1000)


def test_branches_in_a_step_are_of_that_step() -> None:
    def body(i: Any, x: Any) -> Any:
        return lax.cond(x > 0, lambda y: y * 0.5, lambda y: y + 1.0, x)

    assert loop(body, jnp.float32(1.0)) < 15


def test_calls_in_a_step_are_of_that_step() -> None:
    inner = jax.jit(lambda y: y * 0.5 + 1.0)
    assert loop(lambda i, x: inner(x), jnp.float32(1.0)) < 15


def test_a_loop_over_keys_is_estimated() -> None:
    def draws(key: Any) -> Any:
        def step(k: Any, _: Any) -> Any:
            k, now = jax.random.split(k)
            return k, jax.random.normal(now, (64,)).sum()

        return lax.scan(step, key, None, length=STEPS)

    assert 1500 < ns(draws, jax.random.key(0)) < 4500  # 2,700 were measured


@pytest.mark.parametrize("loop", [
    lambda a: lax.scan(lambda c, x: (True, x * 2), False, a),
    lambda a: lax.scan(lambda c, x: (c + 1, 3.0), 0.0, a),
    lambda a: lax.fori_loop(0, 4, lambda i, c: (c[0] * 2, 0), (a, 7)),
    lambda a: lax.while_loop(lambda c: c[1], lambda c: (c[0] + 1, False), (a, True)),
    lambda a: lax.fori_loop(0, 3, lambda i, x: lax.fori_loop(0, 2, lambda j, y: (y[0] + j, 1), (x, 0))[0], a),
    lambda a: jax.scipy.sparse.linalg.gmres(a + 6 * jnp.eye(6), a[0])[0],
])  # fmt: skip
@pytest.mark.parametrize("strategy", ["sequential", "branches", "auto"])
def test_steps_that_return_a_literal(loop: Callable[[Any], Any], strategy: str) -> None:
    """A flag that is set, a counter that begins anew: literals have no hash."""
    a = jnp.sin(jnp.arange(36.0)).reshape(6, 6)
    got, want = dfx.schedule(jax.jit(loop), strategy)(a), jax.jit(loop)(a)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, want)
