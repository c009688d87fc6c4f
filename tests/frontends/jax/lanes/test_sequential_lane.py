"""``Sequential`` takes one lane where more cores gain nothing, and all cores where they do."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import threadpoolctl  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.planning.instructions import Launch  # noqa: E402

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("two_cores")]


def sorts(x: Any, y: Any) -> Any:
    return jnp.sort(x), jnp.sort(y)[::-1]


def products(x: Any, y: Any) -> Any:
    for _ in range(3):
        x = x @ y
    return x


def lanes_of(fast: Any, *args: Any) -> set[int]:
    return {step.lane for step in dfx.plan(fast, *args).instructions if isinstance(step, Launch)}


def drawn(*shape: int) -> jax.Array:
    values = np.random.default_rng().standard_normal(shape, dtype=np.float32)
    return jnp.asarray(values / shape[-1] ** 0.5)


def test_sorts_have_one_lane_and_products_all_cores(assert_same: Any) -> None:
    fast = dfx.schedule(jax.jit(sorts), dfx.Sequential())
    args = drawn(1 << 16), drawn(1 << 16)
    assert lanes_of(fast, *args) == {0}
    assert_same(sorts(*args), fast(*args))
    wide = dfx.schedule(jax.jit(products), dfx.Sequential())
    args = drawn(768, 768), drawn(768, 768)
    assert lanes_of(wide, *args) == {-1}
    assert_same(products(*args), wide(*args))


def test_what_is_short_for_a_lane_keeps_all_cores() -> None:
    """A lane's entry would cost more than two percent of it."""
    fast = dfx.schedule(jax.jit(sorts), dfx.Sequential())
    assert lanes_of(fast, drawn(1 << 12), drawn(1 << 12)) == {-1}


def test_large_results_are_not_there_twice() -> None:
    def much(x: Any) -> Any:
        return jnp.broadcast_to(jnp.sort(x), (1 << 7, 1 << 18))  # 128 MB

    assert lanes_of(dfx.schedule(jax.jit(sorts), dfx.Sequential()), *[drawn(1 << 18)] * 2) == {0}
    assert lanes_of(dfx.schedule(jax.jit(much), dfx.Sequential()), drawn(1 << 18)) == {-1}


def test_what_is_donated_keeps_its_memory(assert_same: Any) -> None:
    """On a lane the result would be copied into it, and the user told so."""
    fast = dfx.schedule(jax.jit(sorts, donate_argnums=(0, 1)), dfx.Sequential())
    args = drawn(1 << 18), drawn(1 << 18)
    want = sorts(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lanes_of(fast, *args) == {-1}
        given = [x.unsafe_buffer_pointer() for x in args]
        got = fast(*args)
    assert all(x.is_deleted() for x in args)
    assert {x.unsafe_buffer_pointer() for x in got} == set(given)
    assert_same(want, got)


@pytest.mark.parametrize(("size", "lane"), [(1 << 13, False), (1 << 18, True)])
def test_part_of_something_larger(size: int, lane: bool, assert_same: Any) -> None:
    """XLA fuses it with what is around it, which matters less the longer it takes."""
    fast = dfx.schedule(jax.jit(sorts), dfx.Sequential())
    args = drawn(size), drawn(size)
    around = jax.jit(lambda *a: fast(*(x + 1 for x in a)))
    assert ("dfx_run" in around.lower(*args).as_text()) == lane
    assert_same(jax.jit(lambda *a: sorts(*(x + 1 for x in a)))(*args), around(*args))


def test_a_gradient_inside_of_a_step_has_one_lane() -> None:
    def loss(w: Any, x: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            h = jnp.tanh(row @ w + h @ w)
            return h, h

        return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1].sum()

    args = drawn(32, 32), drawn(2048, 4, 32)

    def stepped(gradient: Any) -> Any:
        return jax.jit(lambda w, x: w - 0.1 * gradient(w, x))

    fast = stepped(dfx.schedule(jax.grad(loss), dfx.Sequential()))
    assert "dfx_run" in fast.lower(*args).as_text()
    np.testing.assert_allclose(fast(*args), stepped(jax.grad(loss))(*args), rtol=1e-4, atol=1e-4)


def calls_blas(x: Any) -> Any:
    return jax.scipy.linalg.solve_triangular(x, x.T, lower=True)


def test_what_openblas_shares_with_a_gain_keeps_all_cores(assert_same: Any) -> None:
    """A triangular solve with many columns; an eigendecomposition gains nothing there."""
    x = drawn(512, 512) + 4 * jnp.eye(512)
    fast = dfx.schedule(jax.jit(calls_blas), dfx.Sequential())
    assert lanes_of(fast, x) == {-1}
    assert_same(jax.jit(calls_blas)(x), fast(x))
    spectrum = dfx.schedule(jax.jit(jnp.linalg.eigvalsh), dfx.Sequential())
    assert lanes_of(spectrum, x[:256, :256] + x[:256, :256].T) == {0}


def test_a_lane_of_one_core_holds_openblas_to_one_thread(assert_same: Any) -> None:
    x = drawn(512, 512)
    fast = dfx.schedule(jax.jit(jnp.linalg.eigvalsh), dfx.Sequential())
    assert lanes_of(fast, x) == {0}
    assert_same(jax.jit(jnp.linalg.eigvalsh)(x), fast(x))
    controllers = threadpoolctl.ThreadpoolController().lib_controllers
    libraries = [lib for lib in controllers if lib.internal_api == "openblas"]
    before = [lib.num_threads for lib in libraries]
    if max(before, default=1) == 1:
        pytest.skip("no OpenBLAS has several threads here")
    seen = set()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: fast(x).block_until_ready())
        while not call.done():
            seen.add(max(lib.num_threads for lib in libraries))
    assert 1 in seen
    deadline = time.monotonic() + 30  # the call's end may follow its result
    while [lib.num_threads for lib in libraries] != before and time.monotonic() < deadline:
        pass
    assert [lib.num_threads for lib in libraries] == before


@pytest.mark.parametrize("rows", [192, 384])
def test_branches_take_one_lane_where_lanes_gain_nothing_and_cores_neither(
    rows: int, assert_same: Any
) -> None:
    def spectrum(x: Any) -> Any:
        return jnp.linalg.svd(x, compute_uv=False)

    x = drawn(rows, rows)
    fast = dfx.schedule(jax.jit(spectrum), dfx.Branches())
    assert lanes_of(fast, x) == {0}
    assert_same(jax.jit(spectrum)(x), fast(x))
    wide = dfx.schedule(jax.jit(products), dfx.Branches())
    assert lanes_of(wide, drawn(768, 768), drawn(768, 768)) == {-1}


@pytest.mark.parametrize(
    ("rows", "count", "on_caller"),
    [(64, 1, True), (128, 1, True), (256, 1, False), (256, 4, False)],
)
def test_short_factorizations_are_on_one_lane_or_on_the_caller(
    rows: int, count: int, on_caller: bool, assert_same: Any
) -> None:
    """OpenBLAS's threads make what is a little longer twice as long; only lanes hold them back."""

    plain = jax.jit(lambda *xs: [jnp.linalg.cholesky(x) for x in xs])
    fast = dfx.schedule(plain, dfx.Sequential())
    xs = [drawn(rows, rows) for _ in range(count)]
    xs = [x @ x.T + rows * jnp.eye(rows) for x in xs]
    assert lanes_of(fast, *xs) == {0}
    assert fast.planned(xs, {}).on_caller == on_caller
    assert_same(plain(*xs), fast(*xs))


def test_arrays_over_several_devices_keep_the_original(run_program: Any) -> None:
    """A custom call would be given all of them; XLA shares the original out."""
    out = run_program(
        """
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        mesh = Mesh(np.array(jax.devices()), ("d",))
        x = jax.random.normal(jax.random.key(0), (64, 1 << 14))
        x = jax.device_put(x, NamedSharding(mesh, P("d")))
        f = lambda x: jnp.sort(x, axis=1)
        for strategy in (dfx.Sequential(), dfx.Branches()):
            fast = dfx.schedule(jax.jit(f), strategy)
            for g in (fast, jax.jit(lambda x: fast(x - 1) + 1)):
                y = g(x)
                assert y.sharding.spec == P("d"), y.sharding
                np.testing.assert_allclose(y, f(x), rtol=1e-5, atol=1e-5)
        print("shared out")
        """,
        devices=4,
    )
    assert "shared out" in out
