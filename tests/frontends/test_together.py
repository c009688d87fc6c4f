"""Several JAX functions as one plan."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_xla as dfx


def _apart(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w).sum(0)


def _rows(y: Any, *, scale: Any = 1.0) -> Any:
    return {"sorted": jnp.sort(y, axis=-1) * scale, "sums": jnp.cumsum(y, axis=-1)}


def _data(seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    make = [rng.normal(size=s).astype(np.float32) for s in ((32, 48), (16, 32), (6, 700))]
    return tuple(map(jnp.asarray, make))  # type: ignore[return-value]


def _same(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


class ByFunction(dfx.Strategy):
    """Each function on a lane of its own."""

    def schedule(self, s: Any) -> None:
        names = list(dict.fromkeys(h.function for h in s.handles))
        assert "" not in names
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=names.index(op.function) % s.lanes)


@pytest.mark.parametrize("backend", ["ffi", "xla"])
def test_one_plan_with_the_values_of_both(backend: str) -> None:
    w, x, y = _data()
    both = dfx.together(_apart, jax.jit(_rows), strategy=ByFunction(), lanes=2, backend=backend)
    calls = ((w, x), dfx.Arguments(y, scale=3.0))
    for _ in range(2):
        _same(both(*calls), both.original(*calls))
    plan, graph = dfx.plan(both, *calls), dfx.graph(both, *calls)
    assert plan.lanes == 2
    assert {r.function for r in graph.regions} == {"_apart", "_rows"}
    for region in graph.regions:
        assert {graph.graph.ops[i].function for i in region.ops} == {region.function}
    assert "_rows" in dfx.explain(both, *calls) and "of '_rows'" in graph.to_text()
    dfx.verify(both, *calls)
    dfx.simulate(both, *calls)
    pickle.loads(pickle.dumps(dfx.together(_apart, _rows, strategy="branches")))((w, x), (y,))


def test_entries_are_tuples_dictionaries_or_the_only_argument() -> None:
    w, x, y = _data()
    both = dfx.together(_apart, _rows, _rows, names=("f", "g", "h"), strategy="branches")
    first = both((w, x), y, {"y": y, "scale": 2.0})
    _same(first, both({"w": w, "x": x}, (y,), dfx.Arguments(y, scale=2.0)))
    _same(first, both.original((w, x), y, {"y": y, "scale": 2.0}))


def test_gradients_and_transformations() -> None:
    w, x, y = _data()
    both = dfx.together(_apart, _rows, strategy="branches")

    def loss(call: Any, w: Any, y: Any) -> Any:
        a, b = call((w, x), {"y": y})
        return (a**2).sum() + (b["sums"] * b["sorted"]).sum()

    for transformed in (
        lambda c: jax.jit(jax.value_and_grad(lambda w, y: loss(c, w, y), argnums=(0, 1)))(w, y),
        lambda c: jax.vmap(lambda r: c((w, x), (r,)), in_axes=0)(y),
    ):
        _same(transformed(both), transformed(both.original))


def test_static_and_donated_arguments_stay_what_they_are() -> None:
    add = jax.jit(lambda c, n: c + n, static_argnums=1, donate_argnums=0)
    power = jax.jit(lambda v, *, p: v**p, static_argnames="p")
    both = dfx.together(add, power, names=("add", "power"), strategy="branches")
    given = jnp.arange(4096.0)
    first, second = both((given, 3), dfx.Arguments(jnp.full(64, 2.0), p=3))
    np.testing.assert_array_equal(first, np.arange(4096.0) + 3)
    np.testing.assert_array_equal(second, np.full(64, 8.0))
    assert given.is_deleted()


def test_donated_buffers_are_not_shared() -> None:
    add = jax.jit(lambda c: c + 1, donate_argnums=0)
    both = dfx.together(add, jnp.sin, names=("add", "sin"), strategy="branches")
    for _ in range(2):
        given = jnp.arange(4096.0)
        with pytest.raises(
            dfx.PlanError, match=r"argument 0 of 'add' and argument 0 of 'sin' are the"
        ):
            both(given, given)
        assert not given.is_deleted()
        both(given, jnp.zeros(3))


def test_what_one_changes_the_other_may_not_use() -> None:
    memory = jax.new_ref(jnp.zeros(4))

    def adds(x: Any) -> Any:
        memory[...] += x
        return x

    def doubles(x: Any) -> Any:
        memory[...] *= 2
        return x

    both = dfx.together(adds, doubles, strategy="branches")
    with pytest.raises(dfx.PlanError, match=r"'adds' and 'doubles' share what .*test_together.py"):
        both(jnp.ones(4), jnp.ones(4))
    np.testing.assert_array_equal(memory[...], np.zeros(4))


def test_modules_of_flax_and_equinox() -> None:
    nnx = pytest.importorskip("flax.nnx")
    eqx = pytest.importorskip("equinox")
    x = jnp.ones((6, 8))
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    other = nnx.BatchNorm(8, rngs=nnx.Rngs(1))
    with pytest.raises(dfx.PlanError, match="share what one of them changes"):
        dfx.together(norm, norm, names=("a", "b"), strategy="branches")(x, x + 1)
    dfx.together(norm, other, strategy="branches")(x, x + 1)
    np.testing.assert_allclose(norm.mean[...], np.full(8, 0.01), rtol=1e-4)
    np.testing.assert_allclose(other.mean[...], np.full(8, 0.02), rtol=1e-4)
    linears = [eqx.nn.Linear(8, 4, key=jax.random.key(n)) for n in range(2)]
    ensemble = dfx.together(*linears, strategy="branches")
    assert ensemble.names == ("Linear_0", "Linear_1")
    _same(ensemble(x[0], x[1]), ensemble.original(x[0], x[1]))


def test_batches_of_each() -> None:
    w, x, y = _data()
    axes = {"_rows": {"y": 0}}
    split = dfx.together(_apart, _rows, strategy=dfx.NanoBatch([4, 2]), in_axes=axes, lanes=2)
    calls = ((w, x), dfx.Arguments(y, scale=2.0))
    with pytest.raises(dfx.PlanError, match="must"):  # scale has no axis
        dfx.together(
            _apart, _rows, strategy=dfx.NanoBatch(2), in_axes=(None, ((0,), {"scale": 0}))
        )(*calls)
    _same(split(*calls), split.original(*calls))
    nanos = {(r.function, r.nano) for r in dfx.graph(split, *calls).regions}
    assert nanos >= {("_apart", 0), ("_rows", 0), ("_rows", 1)}
    plain = dfx.together(
        _rows, jnp.sin, names=("r", "s"), strategy=dfx.NanoBatch(2), in_axes=(0, None), out_axes=0
    )
    _same(plain((y,), (w,)), plain.original((y,), (w,)))


def test_select_sees_the_arguments_of_each() -> None:
    w, x, y = _data()
    seen = []

    def choose(call: Any) -> str:
        seen.append(call.args)
        return "lanes" if call.args[1].kwargs["scale"] > 1 else "plain"

    plans = {"lanes": "branches", "plain": "original"}
    both = dfx.together(_apart, _rows, strategy=plans, select=choose)
    for scale in (0.5, 2.0):
        calls = ((w, x), dfx.Arguments(y, scale=scale))
        _same(both(*calls), both.original(*calls))
    assert seen[-1][0].args[0] is w and seen[-1][1].args[0] is y
    assert "lanes: Branches(), 1 call" in dfx.explain(both, (w, x), dfx.Arguments(y, scale=2.0))


def test_what_cannot_be_is_told_before_anything_runs() -> None:
    w, x, y = _data()
    both = dfx.together(_apart, _rows, strategy="branches")
    for call, told in (
        (lambda: both((w, x)), "an entry for each of 2 functions"),
        (lambda: both((w, x), y=y), "nothing by keyword|unexpected keyword"),
        (lambda: both((w,), (y,)), "missing a required argument: 'x'"),
        (lambda: both((w, x), {"z": y}), r"goes into a tuple: \(\{...\},\)"),
        (lambda: dfx.together(_apart), "two or more functions; got 1"),
        (lambda: dfx.together(_apart, _rows, names=("a", "a")), "texts that differ"),
        (lambda: dfx.together(_apart, _rows, names=("a", "b/c")), "a text without /"),
        (lambda: dfx.together(_apart, _rows, lane=2), "no option 'lane'"),
        (lambda: dfx.together(_apart, _rows, in_axes=(0,))((w, x), y), "entry for each of 2 functions"),
        (lambda: dfx.together(_apart, _rows, in_axes={"g": 0})((w, x), y), "in_axes names 'g'"),
        (lambda: dfx.explain(both, (w, x), y=(y,)), "nothing by keyword"),
    ):  # fmt: skip
        with pytest.raises((dfx.PlanError, TypeError), match=told):
            call()
    with pytest.raises(dfx.UnsupportedError, match="different compiler options"):
        options = ({"xla_cpu_enable_fast_math": v} for v in (True, False))
        fns = [jax.jit(jnp.sin, compiler_options=o) for o in options]
        dfx.together(*fns, strategy="branches")(w, x)


def test_auto_decides_for_all_at_once() -> None:
    w, x, y = _data()
    both = dfx.together(_apart, _rows)
    for _ in range(2):
        _same(both((w, x), (y,)), both.original((w, x), (y,)))
    assert "runs" in dfx.explain(both, (w, x), (y,)).splitlines()[0]


def test_first_calls_of_two_threads_get_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x, y = _data()
    both = dfx.together(_apart, _rows, strategy="branches", lanes=2)
    made, plain, met = [], both._scheduled, threading.Barrier(2)

    def scheduled(*args: Any) -> Any:
        made.append(args)
        time.sleep(0.2)  # for the other thread to come as far
        return plain(*args)

    monkeypatch.setattr(both, "_scheduled", scheduled)

    def call(_: int) -> Any:
        met.wait(60)
        return both((w, x), (y,))

    with ThreadPoolExecutor(2) as pool:
        for got in pool.map(call, range(2)):
            _same(got, both.original((w, x), (y,)))
    assert len(made) == 1


def test_keywords_in_another_order_are_the_same_call() -> None:
    def scaled(x: Any, *, a: Any, b: Any) -> Any:
        return jnp.tanh(x) * a - b

    _, x, _ = _data()
    both = dfx.together(scaled, lambda x: jnp.cos(x), strategy="branches", names=("f", "g"))
    for call in (dfx.Arguments(x, a=2.0, b=3.0), dfx.Arguments(x, b=3.0, a=2.0)):
        _same(both(call, x), both.original(call, x))
    assert len(both._made) == 1


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_what_together_returned_is_no_function_of_another_plan(framework: str) -> None:
    if framework == "torch":
        torch = pytest.importorskip("torch")
        pair = dfx.together(torch.nn.Linear(4, 4), torch.nn.Tanh(), names=("a", "b"))
        other: Any = torch.nn.Tanh()
    else:
        pair = dfx.together(jax.jit(_apart), jax.jit(_rows), names=("a", "b"))
        other = jax.jit(_rows)
    with pytest.raises(dfx.UnsupportedError, match="'a_and_b' is what dfx.together returned"):
        dfx.schedule(pair)
    with pytest.raises(dfx.UnsupportedError, match="'a_and_b' is what dfx.together returned"):
        dfx.together(pair, other)


def test_a_scheduled_function_of_either_framework_may_be_scheduled_again() -> None:
    torch = pytest.importorskip("torch")

    def fn(x: Any) -> Any:
        return x * 2 + 1

    again = dfx.schedule(dfx.schedule(fn, "branches"), "branches")
    x = torch.randn(5)
    torch.testing.assert_close(again(x), fn(x))
    _same(again(jnp.ones(3)), fn(jnp.ones(3)))
    both = dfx.together(dfx.schedule(fn, "branches"), torch.nn.Tanh(), strategy="branches")
    torch.testing.assert_close(both(x, x), both.original(x, x))
    both = dfx.together(dfx.schedule(fn, "branches"), jax.jit(jnp.sin), strategy="branches")
    _same(both(jnp.ones(3), jnp.ones(3)), (fn(jnp.ones(3)), jnp.sin(jnp.ones(3))))
