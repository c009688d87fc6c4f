"""A scheduled function on eight devices: inside of ``shard_map``, and outside."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("quick_to_compile")


_MESH = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
assert len(jax.devices()) == 8
mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 8)), jnp.float32)
xs = jax.device_put(x, NamedSharding(mesh, P("d")))
"""


def test_inside_shard_map(run_program: Any) -> None:
    out = run_program(
        _MESH
        + """
def local(x):
    return jnp.sort(x, axis=-1) @ jnp.cos(x).T + jnp.sort(-x, axis=0) @ x.T

def mapped(f):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d")))

fast = spread(local)
want = jax.block_until_ready(mapped(local)(xs))
run = mapped(lambda x: fast(x) * 1.0)
for _ in range(20):
    got = jax.block_until_ready(run(xs))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
print("same", len(got.sharding.device_set))
""",
        devices=8,
    )
    assert out.split() == ["same", "8"]


def test_inside_shard_map_over_some_axes_only(run_program: Any) -> None:
    """Along the others XLA partitions the program, which it cannot do with lanes."""
    out = run_program(
        """
from jax.sharding import PartitionSpec as P
from dynaflow_xla.errors import UnsupportedError
mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
x = jnp.asarray(np.random.default_rng(0).standard_normal((16, 8)), jnp.float32)

def local(x):
    return jnp.sort(x, axis=-1) @ jnp.cos(x).T + jnp.sort(-x, axis=0) @ x.T

def mapped(f, axes):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), axis_names=axes))

fast, want = spread(local), mapped(local, {"d"})(x)
try:
    print(np.allclose(mapped(fast, {"d"})(x), want, atol=1e-5))
except UnsupportedError as error:
    print("refused", "over all axes" in str(error))
np.testing.assert_allclose(mapped(fast, {"d", "m"})(x), want, rtol=1e-5, atol=1e-5)
print("same")
""",
        devices=8,
    )
    assert out.splitlines() == ["refused True", "same"]


def test_collective_inside_a_scheduled_function(run_program: Any) -> None:
    out = run_program(
        _MESH
        + """
def local(x):
    y = jnp.sort(x, axis=-1) + jnp.cos(x)
    total = jax.lax.psum(y, "d")
    return jnp.sort(total, axis=0) + y * jax.lax.axis_index("d")

def mapped(f):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d")))

fast = spread(local)
want = jax.block_until_ready(mapped(local)(xs))
run = mapped(fast)
for _ in range(10):
    got = jax.block_until_ready(run(xs))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
print("same")
""",
        devices=8,
    )
    assert out.split() == ["same"]


def test_grad_inside_shard_map(run_program: Any) -> None:
    out = run_program(
        _MESH
        + """
w = jnp.asarray(np.random.default_rng(1).standard_normal((8, 8)), jnp.float32)

def loss(f):
    def local(w, x):
        g = jax.grad(lambda w: (f(w, x) ** 2).sum())(w)
        return jax.lax.psum(g, "d")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(),
                                 check_vma=False))

model = lambda w, x: jnp.tanh(x @ w) + jnp.sort(x, axis=-1) @ w
want = jax.block_until_ready(loss(model)(w, xs))
run = loss(spread(model))
for _ in range(5):
    got = jax.block_until_ready(run(w, xs))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
print("same")
""",
        devices=8,
    )
    assert out.split() == ["same"]


def test_several_devices_outside_shard_map_are_refused(run_program: Any) -> None:
    out = run_program(
        _MESH
        + """
fast = spread(two_sorts)
for call in (fast, jax.jit(fast)):
    try:
        jax.block_until_ready(call(xs))
    except dfx.UnsupportedError as error:
        assert "shard_map" in str(error), error
        print("refused")
np.testing.assert_allclose(fast(x), two_sorts(x), rtol=1e-5, atol=1e-5)
other = jax.device_put(x, jax.devices()[3])
got = fast(other)
np.testing.assert_allclose(got, two_sorts(x), rtol=1e-5, atol=1e-5)
print(got.devices() == {jax.devices()[3]})
""",
        devices=8,
    )
    assert out.split() == ["refused", "refused", "True"]


def test_auto_on_several_devices_is_the_original(run_program: Any) -> None:
    """Whatever it decided on one: lanes belong to one device."""
    out = run_program(
        _MESH
        + """
import warnings
from jax.sharding import PartitionSpec
from dynaflow_xla.tuning import autotune

def measure(runs, *_, **__):
    for run in runs.values():
        run()
    return autotune.Medians({n: [2.0 if n.startswith("original") else 1.0] * 12 for n in runs})

autotune.measure = measure
f = jax.jit(lambda x: jnp.sort(jnp.sin(x)) + jnp.sort(jnp.cos(x)))
x = jnp.linspace(-9.0, 9.0, 40_000)
xs = jax.device_put(x, NamedSharding(mesh, P("d")))
want = f(x)
grad = jax.grad(lambda g, x: (g(x) ** 2).sum(), 1)
for inside in (False, True):
    fast = dfx.schedule(f, dfx.Auto(min_cost_ns=0.0, budget_s=100.0), lanes=2)
    if not inside:
        np.testing.assert_allclose(fast(x), want, rtol=1e-5, atol=1e-5)
        assert "Branches" in dfx.explain(fast, x).splitlines()[0], dfx.explain(fast, x)
    with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as told:
        # What was not decided is not: it would hold for one device, too.
        warnings.simplefilter("always")
        for call in (fast, fast, jax.jit(fast)):
            np.testing.assert_allclose(call(x), want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(grad(fast, x), grad(f, x), rtol=1e-5, atol=1e-5)
        dfx.verify(fast, x)
    undecided = "nothing is decided yet for" in dfx.explain(fast, x)
    print(any("several devices" in str(w.message) for w in told), undecided)
    np.testing.assert_allclose(jax.jit(fast)(xs), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fast(xs), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fast(x), want, rtol=1e-5, atol=1e-5)
    assert "Branches" in dfx.explain(fast, x).splitlines()[0], dfx.explain(fast, x)
    with jax.set_mesh(mesh):
        try:
            dfx.tune(fast, x, budget_s=1.0)
        except dfx.UnsupportedError as error:
            print("one device" in str(error))

def placed(x):
    return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("d"))) + jnp.sort(x)

fast = dfx.schedule(jax.jit(placed))
np.testing.assert_allclose(fast(x), jax.jit(placed)(x), rtol=1e-5, atol=1e-5)
print("values on 8 devices" in dfx.explain(fast, x))
""",
        devices=8,
    )
    assert out.split() == ["True", "False", "True", "False", "True", "True", "True"]
