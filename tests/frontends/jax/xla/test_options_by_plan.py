"""Plans with compiler options of their own: calls go straight to programs, as under one set of options.

On a GPU they have such. Here the hooks of the backend say so, with options that XLA:CPU knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax._src import pjit  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla.frontends.jax.signature import backends  # noqa: E402
from dynaflow_xla.frontends.jax.tuning import auto, originals, ways  # noqa: E402
from dynaflow_xla.frontends.jax.xla import backend as xla_backend, xla_options  # noqa: E402
from dynaflow_xla.tuning import autotune  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::dynaflow_xla.errors.FallbackWarning")

OPTION = "xla_cpu_enable_fast_math"


def two(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) + 1, jnp.sin(w @ w) * 2


def _given(rows: int = 8, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    made = [rng.standard_normal(shape) / 3 for shape in ((rows, 8), (8, 8))]
    return jnp.asarray(made[0], jnp.float32), jnp.asarray(made[1], jnp.float32)


@pytest.fixture
def by_plan(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """As on a GPU; options by the number of rows. Holds the options of all programs that were looked for."""
    found: list[Any] = []

    def options(_self: Any, made: Any) -> dict[str, Any]:
        rows = max(made.pg.graph.values[v].shape[0] for v in made.pg.graph.inputs)
        found.append({OPTION: rows > 8} | dict(made.options.compiler_options or {}))
        return found[-1]

    monkeypatch.setattr(xla_backend.ProgramBackend, "options_by_plan", lambda _: True)
    monkeypatch.setattr(xla_backend.ProgramBackend, "compiler_options", options)
    return found


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The compiler options of each program that is traced."""
    made: list[Any] = []
    real = jax.jit

    def jit(fn: Any, **options: Any) -> Any:
        def traced(*args: Any, **kwargs: Any) -> Any:
            out = fn(*args, **kwargs)
            made.append((options.get("compiler_options") or {}).get(OPTION))
            return out

        traced.__name__ = fn.__name__
        return real(traced, **options)

    monkeypatch.setattr("dynaflow_xla.frontends.jax.scheduled.jax.jit", jit)
    return made


def _scheduled(fn: Any = two, **options: Any) -> Any:
    return dfx.schedule(
        fn if hasattr(fn, "lower") else jax.jit(fn),
        dfx.Branches(),
        backend="xla",
        lanes=2,
        **options,
    )


def _never(monkeypatch: pytest.MonkeyPatch, fast: Any, *names: str) -> None:
    for name in names or ("_call", "_recover"):

        def fails(*_: Any, _name: str = name, **__: Any) -> Any:
            raise AssertionError(f"a settled call came to {_name}")

        monkeypatch.setattr(type(fast), name, fails)


def test_the_second_call_goes_straight_to_the_program(
    by_plan: list[Any], monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    fast = _scheduled()
    assert_same(two(*_given()), fast(*_given()))
    looked = len(by_plan)
    with monkeypatch.context() as patch:
        _never(patch, fast)
        for seed in range(3):
            assert_same(two(*_given(seed=seed)), fast(*_given(seed=seed)))
    assert len(by_plan) == looked and by_plan[0] == {OPTION: False}


@pytest.mark.parametrize("order", [(8, 16, 8, 24, 16), (16, 24, 8, 16, 8)])
def test_signatures_with_different_options_have_theirs(
    order: tuple[int, ...], by_plan: list[Any], compiled: list[Any], assert_same: Any
) -> None:
    fast = _scheduled(jax.jit(two))
    compiled.clear()
    seen: list[int] = []
    for seed, rows in enumerate(order):
        before = len(compiled)
        assert_same(two(*_given(rows, seed)), fast(*_given(rows, seed)))
        own = [option for option in compiled[before:] if option is not None]
        assert own == ([] if rows in seen else [rows > 8])
        seen.append(rows)
    fast.clear_cache()
    for rows in order:
        assert_same(two(*_given(rows)), fast(*_given(rows)))


@pytest.mark.usefixtures("by_plan")
@pytest.mark.parametrize("alone_first", [True, False])
@pytest.mark.parametrize("how", ["jit", "grad", "vmap", "scan", "constants"])
def test_a_settled_program_is_no_part_of_another_one(
    how: str, alone_first: bool, assert_same: Any
) -> None:
    """JAX takes compiler options for whole programs only."""
    x, w = _given()

    def use(f: Any) -> Any:
        uses: dict[str, Callable[[], Any]] = {
            "jit": lambda: jax.jit(lambda x: f(x, w)[0] * 2)(x),
            "grad": lambda: jax.grad(lambda x: f(x, w)[0].sum())(x),
            "vmap": lambda: jax.vmap(f, (0, None))(x[None], w),
            "scan": lambda: jax.lax.scan(lambda c, _: (f(c, w)[0], c), x, None, length=3),
            "constants": lambda: jax.jit(lambda: f(x, w))(),
        }
        return uses[how]()

    fast = _scheduled()
    for alone in (alone_first, not alone_first, True):
        assert_same(*((f(x, w) if alone else use(f)) for f in (two, fast)))
    assert fast.by_options.settled is not None


@pytest.mark.usefixtures("by_plan")
def test_static_donated_and_named_arguments(assert_same: Any) -> None:
    def power(x: Any, w: Any, n: int) -> Any:
        return x @ w + n, jnp.sin(w) * n

    fast = _scheduled(jax.jit(power, static_argnames="n", donate_argnames="x"))
    for n in (1, 2, 1, 2):
        for rows in (8, 16):
            x, w = _given(rows, n)
            kept = x.copy()
            assert_same(power(kept, w, n), fast(x, w=w, n=n))
            assert x.is_deleted()
            with pytest.raises(Exception, match="deleted|donated"):
                fast(x, w=w, n=n)
    assert_same(power(*_given(), 3), fast(*_given(), 3))


def test_options_of_the_user_are_in_each_program(by_plan: list[Any], assert_same: Any) -> None:
    asked = {"xla_cpu_enable_fast_min_max": True}
    fast = _scheduled(jax.jit(two, compiler_options=asked))
    for rows in (8, 16, 8):
        assert_same(two(*_given(rows)), fast(*_given(rows)))
    assert all(options.items() >= asked.items() for options in by_plan)


def test_options_of_the_user_alone_are_settled(
    monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    fast = _scheduled(jax.jit(two, compiler_options={OPTION: False}))
    fast(*_given())
    with monkeypatch.context() as patch:
        _never(patch, fast)
        assert_same(two(*_given(24)), fast(*_given(24)))
    assert_same(two(*_given()), jax.jit(lambda *a: fast(*a))(*_given()))


@pytest.mark.usefixtures("by_plan")
def test_settings_that_change(assert_same: Any) -> None:
    fast = _scheduled()
    for on in (False, True, False, True):
        with jax.enable_x64(on):
            assert_same(two(*_given()), fast(*_given()))
            x, w = (a.astype(float) for a in _given())
            assert_same(two(x, w), fast(x, w))


@pytest.mark.usefixtures("by_plan")
def test_threads(assert_same: Any) -> None:
    fast, failed = _scheduled(), []

    def work(shift: int) -> None:
        try:
            for n in range(8):
                given = _given(8 * (1 + (n + shift) % 4), n)
                assert_same(two(*given), fast(*given))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed and not any(thread.is_alive() for thread in threads)


# -- Auto ---------------------------------------------------------------------------------------------------


def _auto() -> Any:
    return dfx.schedule(jax.jit(two), dfx.Auto(), backend="xla", lanes=2)


def _decide(fast: Any, given: Any, name: str) -> None:
    child = fast.with_strategy(dfx.Branches(lanes=2)) if name == "plan" else None
    candidate = {"plan": "Branches(lanes=2)"}.get(name, originals.NAMES.get(name, "original"))
    fast.decide(fast._signature(given, {}), auto.Choice(child, "told", candidate=candidate))


@pytest.fixture
def known_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU has no CUDA graphs."""
    monkeypatch.setattr(xla_options, "CONCURRENT", {OPTION: False})


@pytest.mark.usefixtures("by_plan", "known_options")
@pytest.mark.parametrize("name", ["plan", "graph", "original"])
def test_what_auto_chose_is_settled(
    name: str, monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    fast = _auto()
    _decide(fast, _given(), name)
    assert_same(two(*_given()), fast(*_given()))
    with monkeypatch.context() as patch:
        _never(patch, fast)
        assert_same(two(*_given(seed=1)), fast(*_given(seed=1)))
    # What is not decided yet is asked for.
    asked: list[Any] = []

    def choose(_fast: Any, args: Any, *_: Any, **__: Any) -> Any:
        asked.append(args[0].shape[0])
        return auto.Choice(None, "told", candidate="original")

    with monkeypatch.context() as patch:
        patch.setattr(auto, "choose", choose)
        for rows in (16, 8, 16):
            assert_same(two(*_given(rows)), fast(*_given(rows)))
    assert asked == [16]
    # And a part of something larger.
    assert_same(two(*_given()), jax.jit(lambda *a: fast(*a))(*_given()))
    assert_same(*(jax.vmap(f, (0, None))(_given()[0][None], _given()[1]) for f in (two, fast)))


@pytest.mark.usefixtures("by_plan", "known_options")
@pytest.mark.parametrize("name", ["plan", "graph", "original"])
def test_jax_keeps_no_signature_in_python_that_came_undecided(
    name: str, monkeypatch: pytest.MonkeyPatch, assert_same: Any
) -> None:
    """It does that with what a jitted function raised for at first: then another one serves it."""
    fast = _auto()

    def choose(*_: Any, **__: Any) -> Any:
        child = fast.with_strategy(dfx.Branches(lanes=2)) if name == "plan" else None
        return auto.Choice(child, "told", candidate=originals.NAMES.get(name, name))

    monkeypatch.setattr(auto, "choose", choose)
    sizes = (2, 4, 6, 8)
    for rows in (*sizes, *sizes):
        assert_same(two(*_given(rows)), fast(*_given(rows)))
    given = [_given(rows) for rows in sizes]
    traced: list[Any] = []

    def infer(*args: Any, _real: Any = pjit._infer_params, **kwargs: Any) -> Any:
        traced.append(args)
        return _real(*args, **kwargs)

    monkeypatch.setattr(pjit, "_infer_params", infer)
    for each in given:
        fast(*each)
    assert not traced, "a call came to JAX's Python"


@pytest.mark.usefixtures("by_plan", "known_options")
def test_plans_with_different_options_under_auto(compiled: list[Any], assert_same: Any) -> None:
    fast = _auto()
    for rows in (8, 16):
        _decide(fast, _given(rows), "plan")
    compiled.clear()
    for rows in (8, 16, 8, 16):
        assert_same(two(*_given(rows)), fast(*_given(rows)))
    assert [option for option in compiled if option is not None] == [False, True]


@pytest.mark.usefixtures("by_plan", "known_options")
def test_auto_measures_the_original_with_a_concurrent_graph(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, assert_same: Any
) -> None:
    """First of all, and whatever a model of cores says of the plans; rows of calls, as on a device."""
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ways, "on_a_device", lambda: True)
    measured: list[Any] = []
    name = originals.NAMES["graph"]

    def measure(runs: Any, **_: Any) -> Any:
        for run in runs.values():
            assert isinstance(run, autotune.Fresh) and run.wait is not None and run.in_a_row()
            run.with_given(*[run.given() for _ in range(3)])
        measured.extend(runs)
        times = {key: [2.0 if key != name else 1.0] * 9 for key in runs}
        return autotune.Medians(times, far=True)

    monkeypatch.setattr(autotune, "measure", measure)
    fast = dfx.schedule(jax.jit(two), dfx.Auto(budget_s=60.0), backend="xla", lanes=2)
    assert_same(two(*_given()), fast(*_given()))
    choice = fast.decision(_given(), {})
    assert measured[:2] == ["original", name] and "Branches(lanes=2)" in measured
    assert choice.name == name and choice.otherwise and not choice.on_caller and not choice.far
    assert not choice.predicted_ms
    assert f"auto: the {name} runs" in dfx.explain(fast, *_given())
    assert OPTION not in fast.lower(*_given()).as_text()
    again = dfx.schedule(jax.jit(two), dfx.Auto(budget_s=60.0), backend="xla", lanes=2)
    assert_same(two(*_given()), again(*_given()))
    assert again.decision(_given(), {}).kind == "graph" and again.decision(_given(), {}).otherwise
    tuned = dfx.tune(fast, *_given(), budget_s=60.0)
    assert tuned.name == name and tuned.costs is None


def test_the_users_mode_is_no_candidate(
    by_plan: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, asked = _auto(), next(iter(xla_options.CONCURRENT))
    assert originals.may_help(fast, (), (), {}) == "graph"
    monkeypatch.setenv("XLA_FLAGS", f"--{asked}=LHS")
    assert not originals.may_help(fast, (), (), {})
    assert not by_plan


# -- which backend is the default ----------------------------------------------------------------------------


def test_the_default_is_known_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX starts its devices when it is asked for its backend: not when a function is scheduled."""

    def early() -> str:
        raise AssertionError("JAX was asked too early")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", early)
        here, there = (dfx.schedule(jax.jit(two), dfx.Branches()) for _ in range(2))
        assert "two" in repr(here)
        here.clear_cache()
    assert "backend ffi (cpu)" in dfx.explain(here, *_given())
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        text = dfx.explain(there, *_given())
        assert "backend xla (gpu)" in text and backends.ON_A_GPU in text
        assert there.planned(_given(), {}).plan.lanes == 8
        options = dfx.compiler_options(there, *_given())
        assert options["xla_gpu_command_buffer_scheduling_mode"] == "CONCURRENT"
        streams = dfx.schedule(jax.jit(two), lanes=dfx.Lanes(2, priorities=(0, -1)))
        with pytest.raises(dfx.UnsupportedError, match="use backend='ffi'"):
            dfx.plan(streams, *_given())
        for lanes, count in ((dfx.Lanes(3), 3), (1, 1)):
            fast = dfx.schedule(jax.jit(two), dfx.Branches(), lanes=lanes)
            assert dfx.plan(fast, *_given()).lanes == count


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("how", ["jit", "grad", "vmap", "scan"])
def test_a_plan_is_a_part_of_a_larger_program_only_if_asked_for(
    by_plan: list[Any], monkeypatch: pytest.MonkeyPatch, wanted: bool, how: str
) -> None:
    """On a GPU such a program computed wrong values."""
    monkeypatch.setattr(xla_options, "_warned", False)
    if wanted:
        monkeypatch.setenv(xla_options.PLANS_IN_TRACES, "1")
    fast = dfx.schedule(jax.jit(two), dfx.Branches(), backend="xla", lanes=2)
    ran: list[int] = []
    real = type(fast)._run
    monkeypatch.setattr(
        type(fast), "_run", lambda self, *a, **k: ran.append(1) or real(self, *a, **k)
    )
    x, w = _given()
    calls = {
        "jit": lambda f: jax.jit(lambda x: f(x, w)[0] * 2)(x),
        "grad": lambda f: jax.grad(lambda x: f(x, w)[0].sum())(x),
        "vmap": lambda f: jax.vmap(f, (0, None))(x[None], w),
        "scan": lambda f: jax.lax.scan(lambda c, _: (f(c, w)[0], c), x, None, length=2),
    }
    with pytest.warns(dfx.FallbackWarning, match="serial" if wanted else "so the original runs"):
        got = calls[how](fast)
    assert bool(ran) is wanted
    jax.tree_util.tree_map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), calls[how](two), got
    )
    ran.clear()
    fast(x, w)
    assert ran, "at top level it has its plan"
