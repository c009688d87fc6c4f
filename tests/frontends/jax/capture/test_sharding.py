"""Functions that say where their values lie."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_to_compile")

DEVICE = jax.devices()[0]
NAMED = NamedSharding(Mesh(np.array([DEVICE]), ("x",)), PartitionSpec("x"))


def constrained(x: Any, where: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, where)


def scanned(x: Any) -> Any:
    def body(total: Any, row: Any) -> Any:
        return total + constrained(
            jax.device_put(row, DEVICE), NAMED.update(spec=PartitionSpec())
        ), row

    return jax.lax.scan(body, 0.0, x)[0]


FUNCTIONS = {
    "fftfreq": lambda x: x * jnp.fft.fftfreq(8, device=DEVICE),
    "rfftfreq on a mesh": lambda x: (
        x[:5] * jnp.fft.rfftfreq(8, device=NAMED.update(spec=PartitionSpec()))
    ),
    "zeros": lambda x: x + jnp.zeros(8, device=DEVICE),
    "arange": lambda x: x + jnp.arange(8, device=NAMED),
    "asarray": lambda x: jnp.asarray(x, device=DEVICE) * 2,
    "astype": lambda x: jnp.astype(x, jnp.bfloat16, device=DEVICE),
    "device_put": lambda x: jax.device_put((x * 2, x + 1), (DEVICE, None)),
    "device_put a sharding": lambda x: jax.device_put(x * 2, NAMED),
    "constraint": lambda x: constrained(x * 2, NAMED),
    "constraint of one device": lambda x: constrained(x, SingleDeviceSharding(DEVICE)) + 1,
    "jit": lambda x: jax.jit(jnp.sin, in_shardings=NAMED, out_shardings=NAMED)(x),
    "scan": scanned,
    "cond": lambda x: jax.lax.cond(x[0] > 0, lambda: constrained(x, NAMED), lambda: x * 2),
}


@pytest.mark.parametrize("backend", ["ffi", "xla"])
@pytest.mark.parametrize("case", list(FUNCTIONS))
def test_devices_named_inside(case: str, backend: str) -> None:
    def fn(x: Any) -> Any:
        return FUNCTIONS[case](x), jnp.sort(x)

    x = jax.random.normal(jax.random.key(3), (8,))
    fast = dfx.schedule(fn, "branches", backend=backend)

    def same(got: Any, want: Any) -> None:
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert g.dtype == w.dtype
            np.testing.assert_allclose(
                np.asarray(g, np.float32), np.asarray(w, np.float32), rtol=1e-5, atol=1e-6
            )

    same(fast(x), jax.jit(fn)(x))
    if backend == "ffi" and case != "scan":
        same(jax.jit(jax.grad(total(fast)))(x), jax.grad(total(fn))(x))
    if case not in ("scan", "cond"):
        assert not any(op.outer for op in dfx.graph(fast, x).graph.ops)


def total(fn: Any) -> Any:
    return lambda x: sum(leaf.sum() for leaf in jax.tree.leaves(fn(x))).astype(jnp.float32)


def test_a_mesh_in_force() -> None:
    def fn(x: Any) -> Any:
        return constrained(x * 2, PartitionSpec("x")) + jnp.sort(x)

    x = jnp.arange(8.0)[::-1]
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))):
        np.testing.assert_array_equal(dfx.schedule(fn, "branches")(x), fn(x))


def test_more_devices_than_lanes_have(run_program: Any) -> None:
    """JAX does not see what a schedule holds: results would silently stay on one device."""
    run_program(
        """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rows = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
x = jnp.arange(64.0).reshape(8, 8)[::-1]

def constrained(x):
    return jax.lax.with_sharding_constraint(jnp.sort(x, axis=0), rows) * 2

def put(x):
    return jax.lax.scan(lambda c, _: (jax.device_put(jnp.sort(c), rows), None), x, length=2)[0]

for f in (constrained, put):
    want = jax.jit(f)(x)
    assert want.sharding.num_devices == 4
    for fast in (spread(f), dfx.schedule(f, "sequential"), jax.jit(spread(f))):
        try:
            fast(x)
        except dfx.UnsupportedError as error:
            assert "places values on 4 devices" in str(error) and "<string>:" in str(error), error
        else:
            raise AssertionError("not refused")
    for fast in (dfx.schedule(f, "branches", backend="xla"), dfx.schedule(f, "auto")):
        assert fast(x).sharding == want.sharding and (fast(x) == want).all()

def mapped(x):
    rows = jax.shard_map(lambda x: jnp.sort(x, axis=1), mesh=rows_mesh, in_specs=P("d"), out_specs=P("d"))
    return rows(x) * 2

rows_mesh = rows.mesh
try:  # one operator, and no line of the user's: shard_map alone is jitted
    spread(jax.jit(jax.shard_map(jnp.sort, mesh=rows_mesh, in_specs=P("d"), out_specs=P("d"))))(x)
except dfx.UnsupportedError as error:
    assert str(error).startswith("shard_map") and "at None" not in str(error), error
else:
    raise AssertionError("not refused")
fast = dfx.schedule(mapped)  # Auto keeps what lanes cannot hold
assert (fast(x) == mapped(x)).all() and (jax.jit(fast)(x) == mapped(x)).all()
print("end")
""",
        devices=4,
    )


@pytest.mark.parametrize("where", [None, DEVICE])
@pytest.mark.parametrize("loop", ["scan", "while", "cond"])
def test_what_places_nothing_inside_of_loops_keeps_them_on_lanes(loop: str, where: Any) -> None:
    def step(x: Any) -> Any:
        return jax.jit(lambda v: jnp.sin(jax.device_put(v, where)) + 1e-3)(x)

    def f(x: Any) -> Any:
        if loop == "scan":
            return jax.lax.scan(lambda c, _: (step(c), None), x, None, length=20)[0]
        if loop == "while":
            return jax.lax.fori_loop(0, 20, lambda _, c: step(c), x)
        return jax.lax.cond(x.shape[0] > 1, step, lambda c: c, jnp.sort(x))

    def both(x: Any, y: Any) -> Any:
        return f(x), f(y)

    x, y = np.random.default_rng(0).normal(size=(2, 64, 32)).astype(np.float32)
    fast = dfx.schedule(both, dfx.Branches(wide=False), lanes=2)
    for got, want in zip(fast(x, y), both(x, y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert "places data" not in dfx.explain(fast, x, y)
    nano = dfx.schedule(f, dfx.NanoBatch(2), in_axes=0)
    if loop != "cond":  # a condition is one for all rows
        np.testing.assert_allclose(nano(x), f(x), rtol=1e-5)
    if loop == "scan":
        got, want = (jax.grad(lambda x, g=g: (g(x) ** 2).sum())(x) for g in (nano, f))
        np.testing.assert_allclose(got, want, rtol=1e-4)


# -- where results lie, which JAX does not look for inside of plans ---------------------------------------

SPACES = jax.memory.Space


def _fetched(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.sort(x, -1) @ jax.device_put(w, SPACES.Device))


def _offloaded(x: Any) -> Any:
    return jax.device_put(jnp.sort(x, -1), SPACES.Host), jnp.cos(x)


@pytest.mark.parametrize("strategy", ["auto", "sequential", "branches"])
def test_arrays_in_the_hosts_memory(strategy: str) -> None:
    w = jax.device_put(jnp.linspace(0, 1, 64).reshape(8, 8), SPACES.Host)
    x = jnp.cos(jnp.arange(32.0)).reshape(4, 8)
    fast = dfx.schedule(_fetched, strategy)
    np.testing.assert_allclose(fast(w, x), _fetched(w, x), rtol=1e-5)
    for of in (jax.grad, lambda f, argnums: jax.jit(jax.grad(f, argnums=argnums))):
        for argnums in (0, 1):
            want, got = of(_fetched, argnums=argnums)(w, x), of(fast, argnums=argnums)(w, x)
            np.testing.assert_allclose(got, want, rtol=1e-5)
            assert got.sharding.memory_kind == want.sharding.memory_kind
    put = dfx.schedule(_offloaded, strategy)
    for call in (put, jax.jit(put)):
        for got, want in zip(call(x), jax.jit(_offloaded)(x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
            assert got.sharding.memory_kind == want.sharding.memory_kind
    got, want = (jax.grad(lambda x, f=f: f(x)[1].sum())(x) for f in (put, _offloaded))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["auto", "sequential", "branches", dfx.NanoBatch(2)], ids=str)
def test_shardings_over_one_device(strategy: Any) -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jnp.cos(jnp.arange(32.0)).reshape(4, 8)

    def constrained(x: Any) -> Any:
        inner = jax.jit(lambda y: jax.lax.with_sharding_constraint(jnp.sort(y, -1), rows))
        kept = jax.checkpoint(lambda y: jax.lax.with_sharding_constraint(jnp.cos(y), rows))
        return inner(x), kept(x), jax.device_put(jnp.tanh(x), jax.devices()[0]), x * 2

    mapped = jax.shard_map(
        lambda x: jnp.sort(x, -1), mesh=mesh, in_specs=rows.spec, out_specs=rows.spec
    )
    for f in (constrained, mapped):
        if f is mapped and isinstance(strategy, dfx.NanoBatch):
            continue  # refused
        fast = dfx.schedule(f, strategy, in_axes=0)
        for got, want in zip(*map(jax.tree.leaves, (fast(x), jax.jit(f)(x))), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
            assert (got.sharding, got.committed) == (want.sharding, want.committed)
        got, want = (jax.grad(lambda x, g=g: jax.tree.leaves(g(x))[0].sum())(x) for g in (fast, f))
        np.testing.assert_allclose(got, want)


def test_results_of_nested_calls_are_looked_at_once() -> None:
    def step(xs: list[Any]) -> list[Any]:
        return [x + 1 for x in xs]

    for _ in range(5):
        step = jax.jit(lambda xs, f=step: f(xs))
    xs = [jnp.ones(4)] * 40
    fast = dfx.schedule(step, "branches")
    for got, want in zip(fast(xs), step(xs), strict=True):
        np.testing.assert_array_equal(got, want)


MAPPED = jax.shard_map(
    lambda rows: jnp.sort(rows, 1), mesh=NAMED.mesh, in_specs=NAMED.spec, out_specs=NAMED.spec
)
WITHIN = {
    "constraint": lambda x: (constrained(jnp.sort(x, 1), NAMED) @ x.T, jnp.sin(x)),
    "device_put": lambda x: (jax.device_put(jnp.sort(x, 1), DEVICE) @ x.T, jnp.sin(x)),
    "device_put a sharding": lambda x: (jax.device_put(jnp.sort(x, 1), NAMED) @ x.T, x + 1),
    "nested": lambda x: (jax.jit(lambda y: constrained(jnp.sort(y, 1), NAMED) * 2)(x) @ x.T,),
    "condition": lambda x: (
        jax.lax.cond(x[0, 0] > 0, lambda y: constrained(y, NAMED) * 2, jnp.cos, x),
    ),
    "scan": lambda x: (scanned(x[0]) + jnp.sort(x, 0),),
    "shard_map": lambda x: (MAPPED(x) @ x.T, jnp.sin(x)),
    "nothing": lambda x: (jnp.sort(x, 1) @ x.T, jax.device_put(jnp.sin(x))),
}


@pytest.mark.parametrize("strategy", ["branches", "sequential"])
@pytest.mark.parametrize("case", WITHIN)
def test_results_lie_where_an_operator_inside_says(case: str, strategy: str) -> None:
    """Whoever reads what it makes: JAX takes the whole function for one of that device."""
    f = jax.jit(WITHIN[case])
    x = jax.random.normal(jax.random.key(0), (16, 16))
    for call in (dfx.schedule(f, strategy), jax.jit(dfx.schedule(f, strategy))):
        for want, got in zip(f(x), call(x), strict=True):
            np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-5)
            assert (got.sharding, got.committed) == (want.sharding, want.committed)


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
def test_such_a_function_of_rows(axes: str) -> None:
    """Under ``vmap``; meshes of ``make_mesh`` have explicit axes by default."""
    kind = getattr(jax.sharding.AxisType, axes)
    where = NamedSharding(jax.make_mesh((1,), ("i",), axis_types=(kind,)), PartitionSpec())

    def f(x: Any) -> Any:
        return jax.device_put(jnp.sort(x, 1), where) @ x.T, jnp.sin(x)

    x = jax.random.normal(jax.random.key(0), (3, 8, 8))
    for call, given in ((lambda g: g, x[0]), (jax.vmap, x)):
        wants, gots = (call(g)(given) for g in (jax.jit(f), dfx.schedule(jax.jit(f), "branches")))
        for want, got in zip(wants, gots, strict=True):
            np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-5)
            assert got.committed == want.committed
