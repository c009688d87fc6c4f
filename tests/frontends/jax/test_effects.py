"""Callbacks and prints of a scheduled function: as often, and in the order, as in the original."""

from __future__ import annotations

import functools
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
