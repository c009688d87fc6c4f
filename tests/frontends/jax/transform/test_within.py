"""Functions with rules, placements and loops of their own inside: each derivative is that of the original."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval as pe
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from round_robin import RoundRobin

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax.transform.primitive import program_p

pytestmark = pytest.mark.usefixtures("quick_to_compile")

DEVICE = jax.devices("cpu")[0]
ROWS = NamedSharding(Mesh(np.array([DEVICE]), ("rows",)), PartitionSpec("rows"))


@jax.custom_batching.custom_vmap
def ruled(v: Any) -> Any:
    return jnp.sort(v) * jnp.cos(v)


@ruled.def_vmap
def _(size: int, batched: Any, v: Any) -> Any:
    return jnp.sort(v, axis=-1) * jnp.cos(v) + 7, True  # told apart from what vmap would do


@jax.custom_batching.sequential_vmap
def one_by_one(v: Any) -> Any:
    return jnp.sort(v) + 1


def of_rows(v: Any) -> Any:
    """A loop whose condition differs from row to row."""

    def body(c: Any) -> Any:
        return jnp.sort(c[0]) * 1.1, c[1] + 1

    return lax.while_loop(lambda c: c[1] < 2 + jnp.abs(v.sum()), body, (v, 0))[0]


NAMED = jax.checkpoint_policies.save_only_these_names("kept")
CLOSED = jax.make_jaxpr(lambda v: jnp.sin(jnp.sort(v)) * v)(jnp.zeros((3, 4)))

WITHIN: dict[str, Callable[[Any], Any]] = {
    "custom_vmap": lambda x: jax.vmap(ruled)(x) + jnp.cos(x) + ruled(x[0]),
    "sequential_vmap": lambda x: jax.vmap(one_by_one)(x) + jnp.sort(jnp.cos(x)),
    "sharding_constraint": lambda x: (
        lax.with_sharding_constraint(jnp.sort(x), ROWS) * jnp.cos(x) + jnp.sort(-x)
    ),
    "device": lambda x: (
        jax.device_put(jnp.sort(x), ROWS) * jnp.ones(x.shape, x.dtype, device=DEVICE) + jnp.sin(x)
    ),
    "batched_while": lambda x: jax.vmap(of_rows)(x) + jnp.sort(jnp.cos(x)),
    "named_checkpoint": lambda x: (
        jax.checkpoint(lambda v: checkpoint_name(jnp.sin(jnp.sort(v)), "kept") * v, policy=NAMED)(x)
        + jnp.cos(x)
    ),
    "closed_call": lambda x: jaxpr_as_fun(CLOSED)(x)[0] + jnp.cos(x),
}


def total(f: Any) -> Any:
    return lambda x: jnp.sum(f(x) * jnp.cos(jnp.arange(x.size).reshape(x.shape)))


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, -x])),
    "jvp": lambda f, x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "grad": lambda f, x: jax.jit(jax.grad(total(f)))(x),
}


@pytest.mark.parametrize("name", WITHIN)
def test_what_is_within_keeps_its_meaning(name: str) -> None:
    original = WITHIN[name]
    fast = dfx.schedule(original, "branches", lanes=1)
    x = jnp.asarray(np.random.default_rng().uniform(-1, 1, (3, 4)), jnp.float32)
    compared = 0
    for way in WAYS.values():
        try:
            want = way(original, x)
        except (ValueError, TypeError, NotImplementedError) as error:  # JAX has no such derivative
            with pytest.raises(type(error)):
                way(fast, x)
            continue
        for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(way(fast, x)), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
        compared += 1
    assert compared == (3 if name not in ("custom_vmap", "sequential_vmap", "batched_while") else 2)


def test_a_program_that_was_exported_is_scheduled_again() -> None:
    """What is read back from bytes is a function like others: one region, with its derivative."""
    original = WITHIN["device"]
    x = jnp.asarray(np.random.default_rng().uniform(-1, 1, (3, 4)), jnp.float32)
    again = export.deserialize(export.export(jax.jit(original))(x).serialize(vjp_order=1))

    def around(x: Any) -> Any:
        return again.call(jnp.sort(x)) + jnp.cos(x)

    fast = dfx.schedule(around, "branches", lanes=1)
    np.testing.assert_allclose(fast(x), around(x), rtol=1e-5)
    np.testing.assert_allclose(WAYS["grad"](fast, x), WAYS["grad"](around, x), rtol=1e-5)
    assert any("call_exported" in op.kind for op in dfx.graph(fast, x).graph.ops)


def test_a_body_whose_results_are_all_that_a_loop_carries_stays_in_the_loop() -> None:
    """XLA takes a custom call for invariant if it is the root of a loop's body, and the loop never ends."""

    def turns(f: Any, a: Any, b: Any) -> Any:
        return lax.while_loop(
            lambda c: c[0].max() < 100, lambda c: jax.jvp(f, (c[0],), (c[1],)), (a, b)
        )

    def square(x: Any) -> Any:
        return x * x

    fast = dfx.schedule(jax.jit(square), RoundRobin(), lanes=min(2, len(os.sched_getaffinity(0))))
    start = tuple(jnp.asarray(np.random.default_rng().uniform(2, 3, (2, 5)), jnp.float32))
    compiled = jax.jit(partial(turns, fast)).lower(*start).compile()
    assert "dfx_run" in compiled.as_text()
    assert "dfx_run" not in compiled.as_text().partition("ENTRY")[2], "it would run once"
    for got, wanted in zip(compiled(*start), turns(square, *start), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", ["call", "grad", "jvp"])
def test_a_helper_that_is_scheduled_inside_and_was_called_before(before: str) -> None:
    """JAX keeps the trace of a jitted helper, with the derivatives of what is scheduled in it."""

    def plain(v: Any) -> Any:
        return jnp.cumsum(jnp.sort(v, 1), 1) + v * 2

    uses: dict[str, Callable[[Any], Any]] = {
        "call": lambda f: f(x), "grad": lambda f: jax.grad(lambda v: f(v).sum())(x),
        "jvp": lambda f: jax.jvp(f, (x,), (x,))[1],
        "linearize": lambda f: jax.linearize(f, x)[1](x),
        "jit": lambda f: jax.jit(lambda v: jax.jvp(f, (v,), (v,))[1])(x),
    }  # fmt: skip
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 8)), jnp.float32)
    for name, use in uses.items():
        inner = dfx.schedule(
            jax.jit(lambda v: (jnp.sort(v, 1), v * 2)), dfx.Branches(wide=False), lanes=2
        )
        helper = jax.jit(lambda v, inner=inner: jnp.cumsum(inner(v)[0], 1) + inner(v)[1])
        uses[before](helper)
        fast = dfx.schedule(helper, dfx.Branches(wide=False), lanes=2)
        np.testing.assert_allclose(use(fast), use(plain), rtol=1e-4, atol=1e-4, err_msg=name)
    whole = jax.jit(lambda v: jax.jvp(inner, (v,), (v,))[1])
    whole(x)
    fast = dfx.schedule(whole, dfx.Branches(wide=False), lanes=2)
    assert "is scheduled already" in dfx.explain(fast, x)
    np.testing.assert_allclose(fast(x)[1], 2 * x, rtol=1e-5)


def nested(levels: int) -> Callable[[Any], Any]:
    """Jitted functions inside of each other, that close over arrays and name scopes."""
    if levels == 0:
        return lambda x: jnp.sort(x) * jnp.sin(x)
    inner, weights = jax.jit(nested(levels - 1)), np.random.rand(3).astype("f") / levels

    def level(x: Any) -> Any:
        with jax.named_scope(f"level_{levels % 2}"):
            return inner(x) * 1.01 + jnp.cos(x) * weights

    return level


@pytest.mark.parametrize("levels", [3, 60])
def test_derivatives_of_deeply_nested_calls(levels: int) -> None:
    f, x = nested(levels), jnp.asarray(np.random.randn(3), jnp.float32)
    fast = dfx.schedule(f, strategy="branches")
    for derivative in (
        jax.grad(lambda g, x: g(x).sum(), argnums=1),
        lambda g, x: jax.jvp(g, (x,), (x,)),
        lambda g, x: jax.vmap(jax.grad(lambda x: g(x).sum()))(x[None]),
    ):
        want = derivative(jax.jit(f), x) if levels < 60 else derivative(nested_flat(f), x)
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), derivative(fast, x), want
        )


def nested_flat(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function operator by operator, as JAX itself cannot map or push forward so many calls."""

    def flat(x: Any) -> Any:
        with jax.disable_jit():
            return f(x)

    return flat


@pytest.mark.parametrize("strategy", ["sequential", "branches"])
def test_arguments_that_nothing_reads_stay_where_they_are_as_with_jit(strategy: str) -> None:
    def f(used: Any, x: Any) -> tuple[Any, Any, Any]:
        return jnp.sort(used["a"]) + jnp.sort(x), used["as it is"], 2

    jitted = jax.jit(f)
    fast = dfx.schedule(jitted, strategy=strategy)
    rng = np.random.default_rng(0)
    a, x, back = (rng.normal(size=4096).astype(np.float32) for _ in range(3))
    key, aside = jax.random.key(0), np.ones((3, 5), np.float32)
    given = {"a": a, "as it is": back, "unread": aside, "key": key}, x

    def arguments(made: Any) -> int:
        head = next(line for line in made.lower(*given).as_text().split("\n") if "@main(" in line)
        return str(head).count("%arg")

    assert arguments(fast) <= arguments(jitted) + 1  # the key has no literal
    jax.tree.map(np.testing.assert_array_equal, fast(*given), jitted(*given))

    def loss(fn: Any, w: Any, x: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            return jax.checkpoint(lambda c: fn({**given[0], "a": c, "unread": w}, row)[0])(carry), 0

        return (lax.scan(step, w[0] * 2, x)[0] ** 2).sum()

    w, rows = rng.normal(size=(2, 8)).astype(np.float32), rng.normal(size=(3, 8)).astype(np.float32)
    for transform in (jax.grad, lambda g: jax.vmap(g, (None, 0))):
        got, want = (
            jax.jit(transform(partial(loss, fn)))(
                w, rows if transform is jax.grad else rows[:, None]
            )
            for fn in (fast, jitted)
        )
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["sequential", "branches"])
def test_results_that_nobody_reads_are_not_computed_in_a_larger_jit(strategy: str) -> None:
    def f(x: Any, w: Any) -> tuple[Any, Any, Any]:
        return jnp.sort(x, axis=-1).sum(-1), jnp.linalg.eigvalsh(w), x.shape[0]

    fast = dfx.schedule(jax.jit(f), strategy=strategy, lanes=2)
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(8, 512)).astype(np.float32), np.eye(64, dtype=np.float32)

    def programs(g: Callable[..., Any]) -> list[set[str]]:
        """The kinds of operators in the regions of each scheduled program that ``jax.jit`` keeps."""
        jaxpr = jax.make_jaxpr(g)(x, w).jaxpr
        left, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        found = []
        waiting = [left]
        while waiting:
            for eqn in waiting.pop().eqns:
                if eqn.primitive is program_p:
                    pg = eqn.params["program"].entry.pg
                    found.append({pg.graph.ops[i].kind for r in pg.regions for i in r.ops})
                waiting += [p.jaxpr for p in eqn.params.values() if hasattr(p, "jaxpr")]
        return found

    assert any("eigh" in kinds for kinds in programs(lambda x, w: fast(x, w)))
    idle = dfx.schedule(lambda x, w: (jnp.linalg.eigvalsh(w), f(x, w))[1], strategy, lanes=2)
    jaxpr = pe.dce_jaxpr(jax.make_jaxpr(lambda x, w: idle(x, w))(x, w).jaxpr, [True] * 3)[0]
    assert ".part" not in str(jaxpr), "all results are read: the plan stays"
    (kinds,) = programs(lambda x, w: fast(x, w)[0] * 2)
    assert "eigh" not in kinds and "sort" in kinds
    for g in (
        lambda fn: fn(x, w)[0] * 2,
        lambda fn: jax.grad(lambda x: (fn(x, w)[0] ** 2).sum())(x),
        lambda fn: jax.vmap(lambda w: fn(x, w)[1])(jnp.stack([w, w + 1])),
        lambda fn: lax.scan(lambda c, _: (c + fn(x, w)[0], None), jnp.zeros(8), None, length=2)[0],
    ):
        got, want = jax.jit(partial(g, fast))(), jax.jit(partial(g, f))()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


class _NeedsEigh(RoundRobin):
    def rules(self, graph: Any) -> Any:
        if not any(op.kind == "eigh" for op in graph.ops):
            raise ValueError("no eigh")
        return super().rules(graph)


def test_a_strategy_that_counts_on_all_regions_has_them() -> None:
    def f(x: Any, w: Any) -> tuple[Any, Any]:
        return jnp.sort(x, axis=-1), jnp.linalg.eigvalsh(w)

    fast = dfx.schedule(f, strategy=_NeedsEigh(), lanes=2)
    x, w = np.arange(512, dtype=np.float32)[::-1], np.eye(64, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: fast(x, w)[0])(x), np.sort(x))


def test_parts_that_are_scalars_say_nothing(recwarn: pytest.WarningsRecorder) -> None:
    fast = dfx.schedule(lambda x, n: (jnp.sort(x, -1), n + 1), "branches", lanes=2)
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    assert jax.jit(lambda x, n: fast(x, n)[1])(x, 1) == 2
    assert jax.jit(lambda x: lax.scan(lambda n, a: (fast(a, n)[1], None), 0, x)[0])(x[None]) == 1
    assert not recwarn.list
