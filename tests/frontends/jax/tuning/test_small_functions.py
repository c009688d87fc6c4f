"""Functions of some tens of microseconds: one lane where it spares a hand-over, none where it does not.

That lane is the thread that calls, and the program itself may be what runs there.
"""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla import machine  # noqa: E402
from dynaflow_xla.frontends.jax.signature import own_options  # noqa: E402
from dynaflow_xla.planning.instructions import Launch  # noqa: E402

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("quick_to_compile", "assumed_numbers")]


def chains(*xs: Any) -> list[Any]:
    out = []
    for x in xs:
        for _ in range(4):
            x = jnp.tanh(x) * jnp.exp(-x * x) + 0.5 * x
        out.append(x)
    return out


def _rows(count: int, size: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(size), jnp.float32) for _ in range(count)]


def _branches(fn: Any) -> Any:
    return dfx.schedule(jax.jit(fn), dfx.Branches(), lanes=2)


def _lanes(fast: Any, *args: Any) -> set[int]:
    return {i.lane for i in dfx.plan(fast, *args).instructions if isinstance(i, Launch)}


def test_one_lane_spares_the_hand_over_of_the_program(assert_same: Any) -> None:
    xs = _rows(8, 256)
    fast = _branches(chains)
    assert _lanes(fast, *xs) == {0}
    assert fast.planned(xs, {}).on_caller
    assert_same(chains(*xs), fast(*xs))
    machine.use(dataclasses.replace(machine.ASSUMED, program_ns=1_000.0))
    assert _lanes(_branches(chains), *xs) == {-1}


@pytest.mark.parametrize("alone_first", [True, False])
def test_inside_of_a_larger_program_there_is_none_to_spare(
    alone_first: bool, assert_same: Any
) -> None:
    """Each has its own plan, whichever is met first."""
    fast = _branches(chains)
    larger = jax.jit(lambda *xs: [x + 1 for x in fast(*xs)])
    xs = _rows(8, 2048)
    for seed in range(2):
        calls = {"alone": lambda xs: fast(*xs), "inside": lambda xs: [y - 1 for y in larger(*xs)]}
        given = _rows(8, 2048, seed)
        for name in sorted(calls, reverse=not alone_first):
            assert_same(chains(*given), calls[name](given))
    assert "dfx_run" not in larger.lower(*xs).as_text()
    assert "dfx_run" in fast.lower(*xs).as_text()


def test_the_only_lane_is_the_thread_that_calls(assert_same: Any) -> None:
    """No program beside the one around the lanes, and no thread of XLA's that would be woken."""
    xs = _rows(8, 256)
    fast, plain = _branches(chains), jax.jit(chains)
    assert fast.planned(xs, {}).on_caller and "dfx_run" not in fast.lower(*xs).as_text()
    assert "lane 0 is the thread that calls" in dfx.explain(fast, *xs)

    def slept(call: Any) -> int:
        """How often this thread waited for another one in 200 calls."""

        def count() -> int:
            status = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text()
            [line] = [line for line in status.splitlines() if line.startswith("voluntary")]
            return int(line.split()[1])

        for _ in range(5):
            jax.block_until_ready(call(*xs))
        before = count()
        for _ in range(200):
            jax.block_until_ready(call(*xs))
        return count() - before

    assert slept(fast) < 20 < slept(plain)
    assert_same(chains(*xs), fast(*xs))


def test_loops_and_derivatives_around_it(assert_same: Any) -> None:
    fast = _branches(chains)
    xs = _rows(8, 1024)

    def last(call: Any) -> Any:
        return jax.lax.scan(lambda c, _: (call(*c), None), xs, None, length=3)[0]

    assert_same(last(chains), last(fast))
    assert "dfx_run" not in jax.jit(lambda: last(fast)).lower().as_text()

    def gradient(f: Any) -> Any:
        return jax.grad(lambda *a: sum(map(jnp.sum, f(*a))))(*xs)

    assert_same(gradient(chains), gradient(fast))
    assert_same(*[jax.vmap(f)(*[x[None] for x in xs]) for f in (chains, fast)])
    assert_same(chains(*xs), fast(*xs))


def test_what_auto_settles_has_lanes_alone_only(assert_same: Any) -> None:
    """A child of Auto's keeps both plans apart, too."""
    fast = dfx.schedule(jax.jit(chains), "auto", lanes=2)
    xs = _rows(8, 256)
    child = fast.with_strategy(dfx.Branches(lanes=2))
    assert child.has_two and _lanes(child, *xs) == {0}
    assert_same(chains(*xs), fast(*xs))
    assert_same(chains(*xs), jax.jit(lambda *a: fast(*a))(*xs))


def test_what_xla_runs_where_it_is_called_stays() -> None:
    """It hands over what has a thousand floating point operations."""
    for size, lanes in ((2, {-1}), (256, {0})):
        fast, xs = _branches(chains), _rows(2, size)
        assert _lanes(fast, *xs) == lanes
        assert fast.planned(xs, {}).on_caller == (lanes == {0})


def test_a_second_lane_is_for_more_than_it_costs() -> None:
    """Chains of 94 us on two lanes: each has a half, or one lane has them all."""
    xs = _rows(8, 1024)
    for lanes_ns, lanes in ((10_000.0, [4, 4]), (50_000.0, [8])):
        machine.use(dataclasses.replace(machine.ASSUMED, lanes_ns=lanes_ns))
        plan = dfx.plan(_branches(chains), *xs)
        launches = [i.lane for i in plan.instructions if isinstance(i, Launch)]
        assert [launches.count(lane) for lane in sorted(set(launches))] == lanes


def test_lanes_are_awake_where_there_is_nothing_else() -> None:
    """Not inside of a larger program."""
    xs = _rows(8, 1024)
    for wake_ns, inside in ((1_000.0, True), (60_000.0, False)):
        machine.use(dataclasses.replace(machine.ASSUMED, lane_wake_ns=wake_ns, lanes_ns=10_000.0))
        fast = _branches(chains)
        assert _lanes(fast, *xs) == {0, 1}
        larger = jax.jit(lambda *xs, fast=fast: [x + 1 for x in fast(*xs)])
        assert ("dfx_run" in larger.lower(*xs).as_text()) == inside


def test_two_tiny_operators_in_a_large_program_wake_nobody() -> None:
    def large(x: Any, y: Any, w: Any) -> Any:
        made = w
        for _ in range(6):
            made = made @ w
        return jnp.sort(x), jnp.sort(y), made

    assert _lanes(_branches(large), jnp.ones(256), jnp.ones(256), jnp.ones((768, 768))) == {-1}


def test_products_of_one_tile_are_not_handed_out() -> None:
    def forks(pattern: str, x: tuple[int, ...], w: tuple[int, ...]) -> float:
        graph = dfx.graph(
            _branches(lambda x, w: jnp.einsum(pattern, x, w)), jnp.ones(x), jnp.ones(w)
        )
        shared = [region.spread.forks for region in graph.regions]
        assert all(r.spread.products > 0 for r in graph.regions) == bool(sum(shared))
        return sum(shared)

    # What XLA of jaxlib 0.10.2 does, by its threads' context switches.
    for tiled, shapes in {
        0: [(64, 32, 32), (64, 64, 64), (64, 256, 256), (128, 128, 512), (256, 128, 256)],
        1: [(256, 256, 256), (128, 256, 512), (64, 1024, 256), (512, 512, 512), (1024, 256, 64)],
    }.items():
        for m, k, n in shapes:
            assert forks("mk,kn->mn", (m, k), (k, n)) == tiled, (m, k, n)
            assert forks("bmk,bkn->bmn", (8, m, k), (8, k, n)) == tiled, (m, k, n)
    assert forks("bqhd,bkhd->bhqk", (2, 128, 4, 64), (2, 128, 4, 64)) == 0
    assert forks("km,kn->mn", (64, 64), (64, 128)) == 0  # of columns: left to Eigen
    assert forks("km,kn->mn", (256, 256), (256, 256)) == 1


def mlp(x: Any, w: Any) -> Any:
    for _ in range(4):
        x = jnp.tanh(x @ w) + 0.1
    return x


def _layers(rows: int, width: int = 64, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    made = [rng.standard_normal(shape) for shape in ((rows, width), (width, width))]
    return jnp.asarray(made[0], jnp.float32), jnp.asarray(made[1] / 8, jnp.float32)


EACH = pytest.mark.parametrize("strategy", [dfx.Branches(), dfx.Sequential()], ids=repr)


@EACH
def test_products_stay_with_who_calls_by_a_compiler_option(strategy: Any, assert_same: Any) -> None:
    """XLA would hand each of them to its pool; and no program of a lane's own is needed."""
    x, w = _layers(64)
    fast = dfx.schedule(jax.jit(mlp), strategy, lanes=2)
    assert _lanes(fast, x, w) == {0}
    assert fast.planned((x, w), {}).own_options
    assert "dfx_run" not in fast.lower(x, w).as_text()
    assert "compiled with xla_disable_hlo_passes" in dfx.explain(fast, x, w)
    for seed in range(3):
        given = _layers(64, seed=seed)
        assert_same(mlp(*given), fast(*given))
        result = fast(*given)
        assert result.is_ready()
    assert dfx.verify(fast, x, w).rows
    assert fast.lower(x, w).compile()(x, w).shape == (64, 64)
    # Inside of something larger the option cannot be given.
    larger = jax.jit(lambda x, w: fast(x, w) + 1)
    assert_same(mlp(x, w) + 1, larger(x, w))
    assert_same(*(jax.grad(lambda x, f=f: f(x, w).sum())(x) for f in (mlp, fast)))
    assert_same(mlp(x, w), fast(x, w))


@EACH
@pytest.mark.parametrize("order", [(64, 4096, 64, 4096), (4096, 64, 64, 4096, 2048, 64)])
def test_signatures_of_both_kinds_take_turns(
    strategy: Any, order: tuple[int, ...], assert_same: Any
) -> None:
    fast = dfx.schedule(jax.jit(mlp), strategy, lanes=2)
    for seed, rows in enumerate(order):
        given = _layers(rows, seed=seed)
        assert_same(mlp(*given), fast(*given))
        assert bool(fast.planned(given, {}).own_options) == (rows == 64)
    fast.clear_cache()
    for rows in order:
        assert_same(mlp(*_layers(rows)), fast(*_layers(rows)))


@EACH
def test_settings_that_change_between_calls(
    strategy: Any, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are made anew where JAX traces anew; each call finds the program of the plan that it has then."""
    given = _layers(64)
    fast = dfx.schedule(jax.jit(mlp), strategy, lanes=2)
    for free in (True, False, True):
        with monkeypatch.context() as patch:
            if not free:
                patch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=dce")
            fast.original.clear_cache()
            assert_same(mlp(*given), fast(*given))
            fast.lower(*given)
    with jax.enable_x64(True):
        assert_same(mlp(*given), fast(*given))
    assert_same(mlp(*given), fast(*given))


def test_threads_meet_signatures_of_both_kinds(assert_same: Any) -> None:
    fast = dfx.schedule(jax.jit(mlp), dfx.Branches(), lanes=2)
    sizes = [8 * (n + 4) for n in range(4)] + [1024, 1536]
    wrong: list[Any] = []

    def work(shift: int) -> None:
        try:
            for n in range(12):
                given = _layers(sizes[(n + shift) % len(sizes)], seed=n)
                np.testing.assert_allclose(fast(*given), mlp(*given), rtol=1e-4, atol=1e-5)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("conflicts", [True, False])
def test_compiler_options_of_the_user(conflicts: bool, assert_same: Any) -> None:
    given = _layers(64)
    options = {"xla_disable_hlo_passes": "dce"} if conflicts else {"xla_cpu_enable_fast_math": True}
    fast = dfx.schedule(jax.jit(mlp, compiler_options=options), dfx.Sequential(), lanes=2)
    assert bool(fast.planned(given, {}).own_options) != conflicts
    for _ in range(3):
        assert_same(mlp(*given), fast(*given))


def test_static_values_without_a_hash_are_jaxs_error() -> None:
    fast = dfx.schedule(jax.jit(lambda x, n: x @ x * n[0], static_argnums=1), dfx.Branches())
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match="hash"):
            fast(jnp.ones((64, 64)), [2])


def test_numbers_that_are_too_large_are_jaxs_error() -> None:
    plain = jax.jit(mlp)
    fast, (x, _) = dfx.schedule(plain, dfx.Branches()), _layers(64)
    for f in (plain, fast):
        with pytest.raises(OverflowError, match="argument path is"):
            f(x, 2**70)


@EACH
@pytest.mark.parametrize("rows", [8, 64])
def test_one_pass_over_memory_is_a_lanes(strategy: Any, rows: int, assert_same: Any) -> None:
    """The thread that calls has XLA's own operators, which take several times as long."""

    def sums(x: Any) -> Any:
        for _ in range(3):
            x = jnp.cumsum(jnp.sin(x), axis=1)
        return x

    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 512)), jnp.float32)
    fast = dfx.schedule(jax.jit(sums), strategy, lanes=2)
    assert not fast.planned((x,), {}).on_caller
    assert_same(sums(x), fast(x))


@EACH
def test_symbolic_sizes_are_the_originals(strategy: Any, assert_same: Any) -> None:
    from jax import export

    fast = dfx.schedule(jax.jit(mlp), strategy)
    (rows,) = export.symbolic_shape("rows")
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 64), (64, 64))]
    with pytest.warns(dfx.FallbackWarning, match="sizes that are known"):
        exported = export.export(fast)(*given)
    assert_same(mlp(*_layers(64)), exported.call(*_layers(64)))
    assert_same(mlp(*_layers(64)), fast(*_layers(64)))


def test_settings_of_one_thread_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one looks again for the program of its own settings, another meets the signature under its."""
    local = threading.local()

    def find(*_: Any) -> dict[str, Any]:
        return {"option": 1} if getattr(local, "set", False) else {}

    programs = own_options.OwnOptions(find, lambda *_: "signature")

    def options() -> Any:
        return programs.of((), {})

    assert options() == {}
    local.set, clear = True, programs.clear

    def clear_and_another() -> None:
        clear()
        thread = threading.Thread(target=options)
        thread.start()
        thread.join(60)

    monkeypatch.setattr(programs, "clear", clear_and_another)

    def call() -> Any:
        programs.check((), {}, own_options.key_of(options()))
        return options()

    assert programs.again(call) == {"option": 1}
    local.set = False
    assert options() == {}


def test_auto_does_not_measure_one_program_twice(
    assert_same: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    given = _layers(64)
    fast = dfx.schedule(jax.jit(mlp), dfx.Auto(min_cost_ns=0.0), lanes=2)
    for _ in range(3):
        assert_same(mlp(*given), fast(*given))
    choice = fast.decision(given, {})
    assert choice is None or "caller's thread" in choice.left_out.get(
        "Branches(lanes=2)", "caller's thread"
    )
