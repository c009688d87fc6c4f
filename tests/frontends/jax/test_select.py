"""Several plans of a JAX function side by side; one is chosen at each call, or by a value when it runs."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from round_robin import RoundRobin

import dynaflow_xla as dfx


def rows(x: jax.Array) -> jax.Array:
    return jnp.cumsum(jnp.sort(x, axis=-1), axis=-1) * 2


def two_branches(x: jax.Array) -> jax.Array:
    return jnp.sort(jnp.sin(x), axis=-1) + jnp.cumsum(jnp.sort(-x, axis=-1), axis=-1)


def above_four(call: Any) -> str:
    return "split" if call.batch > 4 else "whole"


PLANS = {"whole": "sequential", "split": dfx.NanoBatch(2), "plain": "original"}


def scheduled(select: Any, plans: Any = PLANS, fn: Any = rows, **options: Any) -> Any:
    options = {"in_axes": {"x": 0}, **options}
    return dfx.schedule(jax.jit(fn), plans, select=select, **options)


def data(n: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (n, 16))


def counts(fast: Any, *args: Any) -> dict[str, int]:
    found = {}
    for line in dfx.explain(fast, *args).splitlines():
        if line.startswith("select:   "):
            name, _, rest = line.removeprefix("select:   ").partition(":")
            found[name] = int(rest.rpartition(" call")[0].split()[-1])
    return found


def test_split_only_above_some_rows(assert_same: Any) -> None:
    fast = scheduled(above_four)
    for n in (8, 3, 8, 4, 8):
        assert_same(rows(data(n, n)), fast(data(n, n)))
    assert counts(fast, data(8)) == {"whole": 2, "split": 3, "plain": 0}
    told = dfx.explain(fast, data(3))
    assert told.startswith("rows: select chooses 'whole' for these arguments")
    assert "split: NanoBatch(2), 3 calls, ran last" in told and "strategy Sequential()" in told
    assert dfx.plan(fast, data(8)).strategy == "NanoBatch(2)"
    assert dfx.plan(fast, data(2)).strategy == "Sequential()"
    assert counts(fast, data(8)) == {"whole": 2, "split": 3, "plain": 0}, "looking does not count"
    for look in (dfx.graph, dfx.simulate, dfx.verify, dfx.profile):
        look(fast, data(8))


def test_prefill_or_decode_by_context_without_compiling_again(assert_same: Any) -> None:
    traces = []

    def counted(x: jax.Array) -> jax.Array:
        traces.append(1)
        return rows(x)

    state = {"phase": "whole"}
    fast = scheduled(lambda call: call.context["phase"], fn=counted, context=state)
    x = data(6)
    for phase in PLANS:
        state["phase"] = phase
        assert_same(rows(x), fast(x))
    before = len(traces)
    for phase in [*PLANS] * 5:
        state["phase"] = phase
        assert_same(rows(x), fast(x))
    assert len(traces) == before
    assert counts(fast, x) == dict.fromkeys(PLANS, 6)
    state["phase"] = "decode"
    with pytest.raises(
        dfx.PlanError, match="must return one of 'whole', 'split', 'plain'.*got 'decode'"
    ):
        fast(x)
    assert len(traces) == before, "nothing was made for a plan that there is not"


def test_switching_makes_and_compiles_nothing(assert_same: Any) -> None:
    """Both plans run on lanes, so that what is compiled is counted."""
    state = {"phase": "lanes"}
    plans = {"lanes": dfx.Branches(lanes=2), "split": dfx.NanoBatch(2)}
    fast = scheduled(lambda call: call.context["phase"], plans, fn=two_branches, context=state)
    x = data(6)

    def run() -> None:
        for phase in plans:
            state["phase"] = phase
            assert_same(two_branches(x), fast(x))

    run()
    before = dfx.stats()
    for _ in range(5):
        run()
    after = dfx.stats()
    assert (after.plans, after.compiles) == (before.plans, before.compiles)
    assert after.selected - before.selected == 10 and after.switches - before.switches == 10
    assert after.lane_calls - before.lane_calls >= 10


def test_memory_is_that_of_the_largest_plan_and_said(assert_same: Any) -> None:
    state = {"phase": "lanes"}
    plans = {"one": "sequential", "lanes": RoundRobin(), "split": dfx.NanoBatch(2)}
    fast = scheduled(lambda call: call.context["phase"], plans, fn=two_branches, context=state)
    x = data(4)
    told = dfx.explain(fast, x)
    need = {}
    for name in plans:
        state["phase"] = name
        need[name] = dfx.plan(fast, x).scratch_bytes
        assert f"{name}: " in told and f"scratch {need[name]} bytes" in told
    largest = max(need.values())
    assert largest and f"it is that of the largest, 'lanes', {largest} bytes" in told
    odd = scheduled(lambda call: "whole", {"whole": "sequential", "odd": dfx.NanoBatch([3, 2])})
    assert "odd: NanoBatch([3, 2]), 0 calls, not for these arguments: " in dfx.explain(odd, x)


def test_timelines_and_plans_say_which_plan_they_are_of() -> None:
    fast = scheduled(above_four)
    for look in (dfx.simulate, dfx.profile):
        assert look(fast, data(8)).meta["notes"] == ["select chooses 'split' for these arguments"]
    assert "select chooses 'whole' for these arguments" in dfx.plan(fast, data(2)).notes


def test_threads_choose_for_themselves(assert_same: Any) -> None:
    fast = scheduled(above_four)
    start = threading.Barrier(4)
    failed: list[BaseException] = []

    def work(n: int) -> None:
        start.wait(60)
        try:
            for k in range(6):
                assert_same(rows(data(n, k)), fast(data(n, k)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (8, 3, 6, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not failed and not any(thread.is_alive() for thread in threads)
    assert counts(fast, data(8)) == {"whole": 12, "split": 12, "plain": 0}


def test_derivatives_of_what_a_value_chooses(assert_same: Any) -> None:
    fast = scheduled(by_sign, {name: PLANS[name] for name in ("whole", "split")}, in_axes=0)
    x = jnp.abs(data(3))
    total = lambda f: lambda v: jnp.sum(f(v) ** 2)  # noqa: E731
    tangent = jnp.cos(x)
    for f in (jax.jacfwd, jax.jacrev, lambda g: jax.jvp(g, (x,), (tangent,))[1]):
        made = [f(total(one)) for one in (rows, fast)]
        want, got = (one(x) if callable(one) else one for one in made)
        assert_same(want, got)
    assert_same(
        jax.vmap(jax.grad(total(rows)))(jnp.stack([x, -x])),
        jax.vmap(jax.grad(total(fast)))(jnp.stack([x, -x])),
    )
    assert_same(
        jax.grad(lambda v: jax.checkpoint(total(rows))(v))(x),
        jax.jit(jax.grad(lambda v: jax.checkpoint(total(fast))(v)))(x),
    )


def test_the_original_has_no_plan(assert_same: Any) -> None:
    fast = scheduled(lambda call: "plain")
    assert_same(rows(data(5)), fast(data(5)))
    assert dfx.explain(fast, data(5)).endswith("the original runs: it has no plan")
    assert str(dfx.verify(fast, data(5))) == ""
    for look in (dfx.plan, dfx.graph, dfx.simulate, dfx.profile, dfx.tune):
        with pytest.raises(dfx.PlanError, match="which is the original: it has no plan"):
            look(fast, data(5))


def by_sign(call: Any) -> jax.Array:
    return call.args[0].sum() > 0


def by_index(call: Any) -> jax.Array:
    return jnp.clip(call.args[0].shape[0] // 3 + (call.args[0].sum() > 0), 0, 2)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("select", "names"), [(by_sign, ["whole", "split"]), (by_index, list(PLANS))]
)
def test_a_value_decides_inside_a_program(
    select: Any, names: list[str], sign: int, assert_same: Any
) -> None:
    fast = scheduled(select, {name: PLANS[name] for name in names}, in_axes=0)
    x = sign * jnp.abs(data(4))
    both = jnp.stack([x, -x])

    def loss(f: Any) -> Any:
        return lambda v: jnp.sum(f(v) ** 2)

    assert_same(rows(x), jax.jit(fast)(x))
    assert_same(jax.grad(loss(rows))(x), jax.jit(jax.grad(loss(fast)))(x))
    assert_same(jax.vmap(rows)(both), jax.vmap(fast)(both))
    assert_same(jax.vmap(rows)(both), jax.lax.scan(lambda c, v: (c, fast(v)), 0, both)[1])
    assert_same(rows(x), fast.lower(x).compile()(x))
    assert "a value decides when it runs" in dfx.explain(fast, x)
    text = str(jax.make_jaxpr(fast)(x))
    assert "cond[" in text


def test_both_plans_run_in_one_program(assert_same: Any) -> None:
    """Two members that differ in what they compute show which one a value chose."""

    class Times(dfx.Strategy):
        def __init__(self, by: float) -> None:
            self.by = by

        def schedule(self, s: Any) -> None:
            by = self.by
            while ready := s.ready():
                s.execute(ready[0], replace=lambda x: rows(x) * by)

    fast = scheduled(by_sign, {"once": Times(1.0), "twice": Times(2.0)}, in_axes=None)
    x = jnp.abs(data(4))
    jitted = jax.jit(fast)
    assert_same(rows(x) * 2, jitted(x))
    assert_same(rows(-x), jitted(-x))
    assert_same(rows(x) * 2, fast(x))
    assert_same(rows(-x), fast(-x))
    assert jitted._cache_size() == 1


def test_a_python_choice_is_traced_in(assert_same: Any) -> None:
    fast = scheduled(above_four)
    assert_same(rows(data(8)), jax.jit(fast)(data(8)))
    assert "cond[" not in str(jax.make_jaxpr(fast)(data(8)))
    assert "split: NanoBatch(2), 0 calls, traced into" in dfx.explain(fast, data(8))


def test_choices_that_cannot_be_inside_a_program() -> None:
    x = data(4)
    with pytest.raises(dfx.PlanError, match="a truth value chooses between two, and there are 3"):
        jax.jit(scheduled(by_sign))(x)
    with pytest.raises(dfx.PlanError, match="integer or a truth value without axes; got"):
        jax.jit(scheduled(lambda call: call.args[0] > 0))(x)
    with pytest.raises(dfx.PlanError, match="integer or a truth value without axes; got"):
        jax.jit(scheduled(lambda call: call.args[0].sum()))(x)
    with pytest.raises(dfx.PlanError, match="raised TracerBoolConversionError") as found:
        jax.jit(scheduled(lambda call: "split" if call.args[0].sum() > 0 else "whole"))(x)
    assert isinstance(found.value.__cause__, jax.errors.TracerBoolConversionError)


def test_as_other_scheduled_functions(assert_same: Any) -> None:
    fast = scheduled(above_four)
    x = data(8)
    fast(x)
    assert copy.copy(fast) is fast and copy.deepcopy(fast) is fast
    again = pickle.loads(pickle.dumps(fast))
    assert_same(rows(x), again(x))
    assert counts(again, x) == {"whole": 0, "split": 1, "plain": 0}
    fast.clear_cache()
    assert counts(fast, x)["split"] == 0
    assert_same(rows(x), fast(x))
    assert fast.original(x).shape == fast.eval_shape(x).shape
    assert fast.__name__ == "rows" and "select among whole, split, plain" in repr(fast)

    def whole(x: jax.Array) -> Any:
        return fast(x) + 1

    # A part of another plan: the original.
    assert_same(rows(x) + 1, dfx.schedule(jax.jit(whole), "branches")(x))

    assert dfx.schedule(jax.jit(rows), {"a": "auto"}, select=lambda call: 0)(x).shape == x.shape


def test_auto_may_be_one_of_them(
    assert_same: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    fast = scheduled(lambda call: "measured", {"measured": dfx.Auto(), "whole": "sequential"})
    assert_same(rows(data(4)), fast(data(4)))
    assert "auto:" in dfx.explain(fast, data(4))
