"""Every bad input gets the right error, with a message that says what must hold."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unhurried import unhurried

import dynaflow_xla as dfx

CORES = len(os.sched_getaffinity(0))


def f(x: Any) -> Any:
    a = jnp.sort(x)
    b = jnp.cos(x)
    return jnp.sort(a * b)


X = jnp.asarray([3.0, 1.0, 2.0])


class Scripted(dfx.Strategy):
    """Cuts at every operator and runs a given schedule function."""

    def __init__(self, script: Callable[[Any], None]) -> None:
        self.script = script

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("*")] if graph.ops else None

    def schedule(self, s: Any) -> None:
        self.script(s)

    def __repr__(self) -> str:
        return "Scripted()"


def planned(script: Callable[[Any], None], fn: Any = f, x: Any = X, **options: Any) -> Any:
    return dfx.plan(dfx.schedule(fn, Scripted(script), **options), x)


# -- arguments of schedule -------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fastest", 3, None, dfx.Branches, object()])
def test_bad_strategy(strategy: Any) -> None:
    with pytest.raises(dfx.PlanError, match="strategy"):
        dfx.schedule(f, strategy)


@pytest.mark.parametrize("lanes", [0, -1, 1.5, "2", True, [2]])
def test_bad_lanes(lanes: Any) -> None:
    with pytest.raises(dfx.PlanError, match="lanes must be an integer"):
        dfx.schedule(f, lanes=lanes)


def test_more_lanes_than_cores() -> None:
    with pytest.raises(dfx.PlanError, match=f"{CORES}.*{CORES + 1}"):
        dfx.schedule(f, lanes=CORES + 1)


@pytest.mark.parametrize("backend", ["cuda", "", None, 1, "FFI"])
def test_bad_backend(backend: Any) -> None:
    with pytest.raises(dfx.PlanError, match="backend"):
        dfx.schedule(f, backend=backend)


@pytest.mark.parametrize("option", [{"backend": "torch"}, {"compiler": "inductor"}])
def test_torch_options_of_a_jax_function(option: dict[str, Any]) -> None:
    with pytest.raises(dfx.UnsupportedError, match=next(iter(option))):
        dfx.schedule(jax.jit(f), **option)


def test_select_without_several_strategies() -> None:
    with pytest.raises(dfx.PlanError, match="select"):
        dfx.schedule(f, select="x")


@pytest.mark.parametrize("fn", [3, "f", {"f": f}, X])
def test_not_a_function(fn: Any) -> None:
    with pytest.raises(dfx.UnsupportedError, match=type(fn).__name__):
        dfx.schedule(fn)


@pytest.mark.parametrize("rules", [["sort"], [3], [dfx.Op("sort"), None], "sort"])
def test_not_a_rule(rules: Any) -> None:
    with pytest.raises(dfx.RuleError):
        dfx.schedule(f, rules=rules)


@pytest.mark.parametrize(
    "rule",
    [dfx.Op("no_such_operator"), dfx.Scope("nowhere/**"), dfx.Call("absent")],
    ids=["op", "scope", "call"],
)
def test_rule_that_matches_nothing(rule: Any) -> None:
    with pytest.raises(dfx.RuleError, match="no_such_operator|nowhere|absent"):
        dfx.schedule(f, dfx.Branches(), rules=[rule])(X)


@pytest.mark.parametrize("inspect", [dfx.graph, dfx.plan, dfx.explain, dfx.verify, dfx.profile])
def test_inspecting_something_else(inspect: Any) -> None:
    with pytest.raises(dfx.UnsupportedError, match="schedule"):
        inspect(f, X)


@pytest.mark.parametrize("of_torch", [False, True])
def test_a_keyword_that_explain_has_itself_is_named(of_torch: bool) -> None:
    def model(x: Any, deep: Any = False) -> Any:
        return x * 2 if deep is not False else x + x

    x: Any = pytest.importorskip("torch").ones(3) if of_torch else X
    fast = dfx.schedule(model, "branches", lanes=1, backend="torch" if of_torch else "ffi")
    with pytest.raises(dfx.UnsupportedError, match="deep=True of explain.*backend='xla'.*partial"):
        dfx.explain(fast, x, deep=True)
    with pytest.raises(dfx.PlanError, match="deep, which explain has itself, must be True or"):
        dfx.explain(fast, x, deep=3)
    assert dfx.explain(functools.partial(fast, deep=True), x).startswith("model")


def test_keywords_that_inspecting_functions_have_themselves_are_bound() -> None:
    def model(
        x: Any, rounds: Any, runs: Any, costs: Any, seed: Any = 1.0, measure: Any = 1.0
    ) -> Any:
        return jnp.sort(x) * rounds * runs + jnp.cos(x) * costs * seed * measure

    fast = dfx.schedule(model, "branches", lanes=1)
    bound = functools.partial(fast, rounds=2.0, runs=3.0, costs=4.0, seed=5.0, measure=6.0)
    assert dfx.simulate(bound, X, costs={}).summary()
    assert dfx.debug(bound, X, rounds=1, seed=3).seed == 3
    assert dfx.check_determinism(bound, X, runs=2).runs == 2
    assert dfx.why(bound, X, measure=False, rounds=1).reason
    np.testing.assert_allclose(bound(X), model(X, 2.0, 3.0, 4.0, 5.0, 6.0), rtol=1e-6)


def test_the_error_of_verify_has_no_report() -> None:
    held = [1.0]
    fast = dfx.schedule(lambda x: jnp.sort(x) * held[0], "sequential")
    fast(X)
    held[0] = 2.0
    with pytest.raises(dfx.VerificationError, match="first trace") as found:
        dfx.verify(fast, X)
    assert found.value.report is None


def test_shardings_on_the_jit() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(dfx.UnsupportedError, match="shardings"):
        dfx.schedule(jax.jit(f, in_shardings=sharding))


def test_errors_of_the_function_pass_through() -> None:
    def broken(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        dfx.schedule(broken, "branches")(X)
    with pytest.raises(TypeError):
        dfx.schedule(lambda x, y: x @ y, "branches")(jnp.ones(3), jnp.ones(4))
    with pytest.raises(TypeError):
        dfx.schedule(f, "branches")()
    with pytest.raises(TypeError):
        dfx.schedule(f, "branches")("text")
    with pytest.raises(jax.errors.TracerBoolConversionError):
        dfx.schedule(lambda x: x if x.sum() > 0 else -x, "branches")(X)


def test_a_failed_trace_leaves_no_state(schedule: Any) -> None:
    state = {"fail": True}

    def g(x: Any) -> Any:
        if state["fail"]:
            raise ValueError("first time")
        return jnp.sort(x)

    fast = schedule(g)
    with pytest.raises(ValueError, match="first time"):
        fast(X)
    state["fail"] = False
    np.testing.assert_array_equal(fast(X), np.sort(X))
    assert "dfx_run" in fast.lower(X).as_text()


def test_tune_of_a_fixed_strategy() -> None:
    with pytest.raises(dfx.PlanError, match="Auto"):
        dfx.tune(dfx.schedule(f, "branches"), X)


@pytest.mark.parametrize("budget_s", [0, -1.0])
def test_tune_without_a_budget(budget_s: float) -> None:
    with pytest.raises(dfx.PlanError, match="budget_s"):
        dfx.tune(dfx.schedule(f), X, budget_s=budget_s)


def test_profile_takes_arrays() -> None:
    fast = dfx.schedule(f, "branches")
    with pytest.raises(dfx.UnsupportedError, match="arrays"):
        dfx.profile(fast, jax.ShapeDtypeStruct((3,), jnp.float32))


# -- strategies ------------------------------------------------------------------------------------


def run_all(s: Any, **options: Any) -> None:
    while ready := s.ready():
        for op in ready:
            s.execute(op, **options)


def test_forgets_a_region() -> None:
    with pytest.raises(dfx.PlanError, match="sort"):
        planned(lambda s: [s.execute(op) for op in s.ready()])


def test_schedules_nothing() -> None:
    with pytest.raises(dfx.PlanError):
        planned(lambda s: None)


def test_executes_twice() -> None:
    def script(s: Any) -> None:
        op = s.ready()[0]
        s.execute(op)
        s.execute(op)

    with pytest.raises(dfx.PlanError, match="twice|already"):
        planned(script)


def test_executes_before_its_inputs() -> None:
    with pytest.raises(dfx.PlanError, match="before its inputs"):
        planned(lambda s: s.execute(s.handles[-1]))


def test_never_ends() -> None:
    def script(s: Any) -> None:
        while s.ready():
            pass

    with pytest.raises(dfx.PlanError, match="ready"):
        planned(script)


@pytest.mark.parametrize("lane", [-1, CORES, 99, 0.5, "0", None, True])
def test_lane_out_of_range(lane: Any) -> None:
    with pytest.raises(dfx.PlanError, match="lane"):
        planned(functools.partial(run_all, lane=lane))


def test_lane_beyond_the_lanes_given() -> None:
    with pytest.raises(dfx.PlanError, match="lane"):
        planned(functools.partial(run_all, lane=1), lanes=1)


@pytest.mark.parametrize("op", ["sort", 0, None, ()])
def test_executes_what_is_no_handle(op: Any) -> None:
    with pytest.raises(dfx.PlanError):
        planned(lambda s: s.execute(op))


def test_executes_a_handle_of_another_plan() -> None:
    kept: list[Any] = []

    def keep(s: Any) -> None:
        kept.extend(s.ready())
        run_all(s)

    planned(keep)
    with pytest.raises(dfx.PlanError):
        planned(lambda s: (s.execute(kept[0]), run_all(s)))


def test_error_in_a_strategy_passes_through() -> None:
    def script(s: Any) -> None:
        raise ZeroDivisionError("in the strategy")

    with pytest.raises(ZeroDivisionError, match="in the strategy"):
        planned(script)


REPLACEMENTS = {
    "shape": lambda x: jnp.sort(x)[:2],
    "dtype": lambda x: jnp.sort(x).astype(jnp.float16),
    "count": lambda x: (jnp.sort(x), x),
    "none": lambda x: None,
    "arguments": lambda x, y, z: x,
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_bad_replacement(kind: str) -> None:
    def script(s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                if "sort" in op.name:
                    s.execute(op, replace=REPLACEMENTS[kind])
                else:
                    s.execute(op)

    with pytest.raises(dfx.PlanError, match="replacement.*sort"):
        planned(script)


def test_replacement_that_is_no_function() -> None:
    with pytest.raises(dfx.PlanError, match="replace"):
        planned(lambda s: s.execute(s.ready()[0], replace=3))


def test_outer_region_on_a_lane_or_replaced() -> None:
    def g(x: Any) -> Any:
        jax.debug.callback(lambda v: None, x)
        return jnp.sort(x)

    def script(s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                s.execute(op, replace=lambda *a: None) if "outer" in op.tags else s.execute(op)

    with pytest.raises(dfx.PlanError):
        planned(script, g)


def test_a_bad_strategy_leaves_the_package_working(schedule: Any) -> None:
    with pytest.raises(dfx.PlanError):
        planned(lambda s: None)
    np.testing.assert_allclose(schedule(f)(X), jax.jit(f)(X), rtol=1e-6)


# -- donation, static values, comparison -----------------------------------------------------------


@pytest.mark.parametrize("strategy", ["auto", "branches"])
def test_a_donated_array_given_twice(strategy: str) -> None:
    def g(state: Any, y: Any) -> Any:
        return jnp.sort(state["a"]) + jnp.sort(y)

    fast = dfx.schedule(jax.jit(g, donate_argnums=0), strategy)
    x = jnp.arange(4096.0)[::-1]
    with pytest.raises(dfx.PlanError, match=r"argument 0\['a'\] and argument 1.*test_errors.py"):
        fast({"a": x}, x)
    with pytest.raises(dfx.PlanError, match="given once"):
        fast({"a": x, "b": x}, x + 1)
    np.testing.assert_array_equal(fast({"a": x.copy()}, x), 2 * jnp.sort(x))
    assert not x.is_deleted()


def test_static_value_without_a_hash_is_jaxs_error() -> None:
    fast = dfx.schedule(jax.jit(lambda x, shape: x.reshape(shape), static_argnums=1))
    with pytest.raises(ValueError, match="hashable"):
        fast(jnp.arange(4.0), [2, 2])
    assert fast(jnp.arange(4.0), (2, 2)).shape == (2, 2)


def test_auto_decides_by_type_not_by_scalar_value() -> None:
    fast = dfx.schedule(jax.jit(lambda x, s, n: x * s + n, static_argnums=2))
    for scalar in (1.0, 2.0, 3.0):
        for static in (1, 2):
            fast(jnp.arange(4.0), scalar, static)
    assert len(fast.decisions) == 2


# -- faults at run time ----------------------------------------------------------------------------

RUN_ERRORS = (dfx.EngineError, jax.errors.JaxRuntimeError)


@pytest.fixture(scope="module")
def faulty(schedule: Any) -> Any:
    """A plan over two lanes, many edges between them, with a fault in the middle on demand."""

    def g(flag: Any, x: Any) -> Any:
        a = jnp.sort(x)
        b = jnp.cos(x)
        fault = jax.ffi.ffi_call("dfx_test_fail", jax.ShapeDtypeStruct((), jnp.int32))(flag)
        c = jnp.sort(a * b + fault)
        d = jnp.sort(b - a + fault)
        return jnp.cumsum(c) + jnp.sin(d), jnp.sort(a)

    return schedule(g)


def whole(outs: Any) -> None:
    jax.block_until_ready(outs)


def test_injected_fault_then_the_next_call_works(faulty: Any) -> None:
    good = [np.asarray(leaf) for leaf in faulty(jnp.int32(0), X)]
    for number in range(1, 6):
        with pytest.raises(RUN_ERRORS, match=f"injected fault {number}"):
            whole(faulty(jnp.int32(number), X))
        again = faulty(jnp.int32(0), X)
        for want, got in zip(good, again, strict=True):
            np.testing.assert_array_equal(got, want)


def test_injected_fault_at_top_level_is_an_engine_error(faulty: Any) -> None:
    """When the call itself reports it (synchronous dispatch), it has the package's own type."""
    with pytest.raises(RUN_ERRORS, match="injected fault 7") as caught:
        whole(faulty(jnp.int32(7), X))
    assert isinstance(caught.value, dfx.DynaflowError) or "EngineError" in str(caught.value)


def test_injected_fault_inside_an_outer_program(faulty: Any) -> None:
    # JAX itself chooses the type: ValueError if it ran the program on the caller's thread.
    outer = jax.jit(lambda flag, x: jax.tree.map(lambda y: y * 2, faulty(flag, x * 1)))
    for program in (outer, jax.jit(faulty), faulty.lower(jnp.int32(0), X).compile()):
        with pytest.raises(
            (*RUN_ERRORS, ValueError), match="EngineError: .*injected fault 3"
        ) as caught:
            whole(program(jnp.int32(3), X))
        assert str(caught.value).count("EngineError") == 1
        whole(program(jnp.int32(0), X))
    whole(outer(jnp.int32(0), X))


def test_many_faults_in_a_row_and_mixed(faulty: Any) -> None:
    for call in range(40):
        flag = call % 3
        if flag:
            with pytest.raises(RUN_ERRORS):
                whole(faulty(jnp.int32(flag), X))
        else:
            whole(faulty(jnp.int32(0), X))


def test_fault_names_the_lane_or_region(faulty: Any) -> None:
    with pytest.raises(RUN_ERRORS, match="lane [01]|ffi_call"):
        whole(faulty(jnp.int32(1), X))


def test_error_in_a_python_callback_between_stages(schedule: Any) -> None:
    def fail(v: Any) -> Any:
        if v[0] > 2:
            raise RuntimeError("callback failed")
        return np.asarray(v)

    def g(x: Any) -> Any:
        y = jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.sort(x))
        return jnp.cos(y) + jnp.sort(y)

    fast = schedule(g)
    with pytest.raises(RUN_ERRORS, match="callback failed"):
        whole(fast(X + 5))
    np.testing.assert_allclose(fast(X), jax.jit(g)(X), rtol=1e-6)


def test_unknown_plan_is_an_engine_error() -> None:
    """A program that holds a schedule of another process."""
    dfx.plan(dfx.schedule(f, "branches"), X)  # registers the custom calls
    call = jax.ffi.ffi_call("dfx_run", jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="EngineError: no plan"):
        jax.block_until_ready(jax.jit(lambda x: call(x, plan="0" * 32))(X))


def test_every_error_derives_from_one() -> None:
    for name in ("PlanError", "RuleError", "SeparabilityError", "UnsupportedError",
                 "VerificationError", "EngineError"):  # fmt: skip
        assert issubclass(getattr(dfx, name), dfx.DynaflowError)


def test_a_function_for_one_batch_size_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurried(monkeypatch)
    x = jnp.ones((8, 4))
    fast = dfx.schedule(lambda x: jnp.sort(x.reshape(8, 2, 2)), dfx.NanoBatch(2), in_axes=0)
    with pytest.raises(dfx.SeparabilityError, match="cannot be traced with 4 instead of 8 rows"):
        fast(x)
    auto = dfx.schedule(fast.original, dfx.Auto(budget_s=5.0, min_cost_ns=0.0), in_axes=0)
    assert (auto(x) == fast.original(x)).all()
    assert "cannot be traced" in dfx.explain(auto, x)


@pytest.mark.parametrize("strategy", ["branches", "auto"])
def test_builtins_without_a_signature_raise_what_they_raise(strategy: str) -> None:
    with pytest.raises(TypeError, match="Only scalar arrays"):
        dfx.schedule(jax.jit(int), strategy)(jnp.arange(3))


@pytest.mark.parametrize(
    "strategy", [dfx.NanoBatch(2), dfx.Auto(budget_s=5.0, min_cost_ns=0.0)], ids=repr
)
def test_function_that_checks_its_batch_size(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own check fails at another size: a split is refused, and Auto leaves it out."""
    unhurried(monkeypatch)

    def checked(x: Any) -> Any:
        assert x.shape[0] == 8
        return jnp.sin(x @ jnp.ones((64, 64)))

    fast = dfx.schedule(jax.jit(checked), strategy, in_axes=0)
    x = jax.random.normal(jax.random.key(0), (8, 64))
    if isinstance(strategy, dfx.Auto):
        np.testing.assert_allclose(fast(x), checked(x), rtol=1e-6)
    else:
        with pytest.raises(dfx.SeparabilityError, match="cannot be traced with 4 instead of 8"):
            fast(x)


@pytest.mark.parametrize("backend", ["ffi", "xla"])
def test_a_token_is_refused_by_name(backend: str) -> None:
    fast = dfx.schedule(lambda x, token: (jnp.sin(x), token), "branches", backend=backend)
    with pytest.raises(dfx.UnsupportedError, match="takes arrays.*AbstractToken.*create_token"):
        fast(jnp.ones(3), jax.lax.create_token())


@pytest.mark.parametrize("jitted", [False, True])
def test_attributes_of_the_function_are_its_schedule_s(jitted: bool) -> None:
    def f(x: Any) -> Any:
        return jnp.sin(x)

    f.note = {"of": "the function"}  # type: ignore[attr-defined]
    fast = dfx.schedule(jax.jit(f) if jitted else f, "branches")
    assert fast.note is f.note  # type: ignore[attr-defined]
    assert not hasattr(fast, "other")


@pytest.mark.parametrize("backend", ["ffi", "xla"])
@pytest.mark.parametrize("strategy", ["branches", "sequential"])
def test_compiler_options_reach_what_runs_in_the_program_around(
    strategy: str, backend: str
) -> None:
    """One region, which no lane computes: XLA would say that it does not know the option."""
    for given in (
        dfx.schedule(
            jax.jit(jnp.sqrt, compiler_options={"no_such": "x"}), strategy, backend=backend
        ),
        dfx.schedule(jnp.sqrt, strategy, backend=backend, compiler_options={"no_such": "x"}),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'no_such'"):
            given(jnp.ones(3))
    options = {"xla_embed_ir_in_executable": True}
    fast = dfx.schedule(jnp.sqrt, strategy, backend=backend, compiler_options=options)
    np.testing.assert_array_equal(fast(jnp.ones(3)), jnp.ones(3))
    np.testing.assert_array_equal(jax.jit(lambda x: fast(x) + 1)(jnp.ones(3)), 2 * jnp.ones(3))
