"""Layers with collectives under shard_map on 8 host devices, and in two processes: values and gradients."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[3] / "support"
BACKENDS = ("ffi", "xla")

PROGRAM = """
sys.path.insert(0, {support!r})
jax.config.update("jax_disable_most_optimizations", True)
from parallel_layers import AXIS, layers

mesh = jax.make_mesh((8,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))

def block(x):  # stock JAX hangs on many collectives in flight
    return jax.block_until_ready(x)

def close(want, got):
    for w, g in zip(jax.tree_util.tree_leaves(want), jax.tree_util.tree_leaves(got), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5 * float(jnp.abs(w).max()))

for name, layer in layers(batch=4, length=16, width=256).items():
    if name not in {names!r}:
        continue
    args = layer.values()
    fast = dfx.schedule(layer.fn, {strategy}, backend={backend!r}, in_axes=layer.in_axes)
    plain, scheduled = (layer.spread(f, mesh, check_vma={vma}) for f in (layer.fn, fast))
    close(block(plain(*args)), block(scheduled(*args)))
    print(name)
    numbers = tuple(range(len(args)))
    if name not in {differentiated!r}:
        continue
    close(*(
        block(jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), numbers))(*args))
        for f in (plain, scheduled)
    ))
"""

NAMES = ("transformer_block", "experts", "sequence_parallel_mlp", "ring_step")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vma", [False, True], ids=["unchecked", "checked"])
def test_values_and_gradients(backend: str, vma: bool, run_program: Any) -> None:
    """psum, all_gather, reduce_scatter, all_to_all, ppermute; with and without shard_map's own check.

    Compiling for 8 devices takes its time: with the check half of the layers, and of each way the
    gradients of one of these.
    """
    names = NAMES[vma::2] if vma else NAMES
    code = PROGRAM.format(
        support=str(SUPPORT),
        names=names,
        differentiated=NAMES[vma : vma + 3 : 2],
        strategy="dfx.DualBatch()",
        backend=backend,
        vma=vma,
    )
    assert run_program(code, devices=8).split() == list(names)


WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
number, port, backend, support = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", 2, number, initialization_timeout=240)
sys.path.insert(0, support)
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import dynaflow_xla as dfx

assert jax.process_count() == 2 and jax.device_count() == 2
mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))

def layer(x, up, down):
    with dfx.mark("up"):
        h = jnp.tanh(x @ up)
    with dfx.mark("down"):
        y = h @ down
    return x + jax.lax.psum(y, "devices")

rng = np.random.default_rng(0)
whole = [rng.standard_normal(s).astype(np.float32) / 8 for s in [(8, 64), (64, 128), (128, 64)]]
specs = (P(), P(None, "devices"), P("devices", None))
args = [
    jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda where, x=x: x[where])
    for x, spec in zip(whole, specs)
]

def spread(fn):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P()))

fast = dfx.schedule(layer, dfx.DualBatch(), backend=backend, in_axes=(0, None, None))
scheduled = spread(fast)
for _ in range(5):
    got = jax.block_until_ready(scheduled(*args))
x, up, down = whole
want = x + np.tanh(x @ up) @ down
np.testing.assert_allclose(np.asarray(got.addressable_data(0)), want, rtol=1e-4, atol=1e-5)
np.testing.assert_allclose(
    np.asarray(jax.block_until_ready(spread(layer)(*args)).addressable_data(0)), want, rtol=1e-4, atol=1e-5
)
loss = lambda *a: (scheduled(*a) ** 2).sum()
grad = jax.block_until_ready(jax.jit(jax.grad(loss, 1))(*args))
ref = jax.block_until_ready(jax.jit(jax.grad(lambda *a: (spread(layer)(*a) ** 2).sum(), 1))(*args))
np.testing.assert_allclose(
    np.asarray(grad.addressable_data(0)), np.asarray(ref.addressable_data(0)), rtol=1e-4, atol=1e-5
)
jax.distributed.shutdown()
print("done")
"""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes(backend: str) -> None:
    """jax.distributed with one CPU device in each of two processes; gloo carries the collectives."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONFAULTHANDLER="1")
    environment.pop("XLA_FLAGS", None)
    port = str(_free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER, str(number), port, backend, str(SUPPORT)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=360)
            assert worker.returncode == 0 and "done" in out.split(), err[-4000:]
    except subprocess.TimeoutExpired:
        pytest.fail("two processes hung for 360 s")
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


REFUSED = """
from jax import lax
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x, w = jnp.ones((256, 16)), jnp.eye(16)

def refused(f, *words, error=dfx.SeparabilityError):
    fast = dfx.schedule(f, dfx.DualBatch(), backend={backend!r}, in_axes=(0, None))
    mapped = jax.shard_map(fast, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=False)
    try:
        mapped(x, w)
    except error as found:
        for word in words:
            assert word in str(found), found
    else:
        raise AssertionError("not refused")

def named(collective):
    def f(x, w):
        with dfx.mark("first"):
            y = jnp.sin(x) @ w
        return collective(y)
    return f

ways = ("<string>", "along another axis than the batch's", "in_axes")
refused(named(lambda y: lax.all_gather(y, "d", axis=0, tiled=True)), "all_gather at", *ways)
refused(
    named(lambda y: lax.psum_scatter(y, "d", scatter_dimension=0, tiled=True)), "reduce_scatter at", *ways)
refused(named(lambda y: lax.all_to_all(y, "d", 0, 1, tiled=True)), "all_to_all at", *ways)

def around(x, w):
    inner = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "d"), mesh=mesh, in_specs=(P(None, "d"), P("d")), out_specs=P())
    return inner(jnp.sin(x), w)

for axes in ((0, None), None):
    fast = dfx.schedule(
        around, dfx.DualBatch() if axes else dfx.Branches(), backend={backend!r}, in_axes=axes)
    try:
        np.testing.assert_allclose(jax.block_until_ready(fast(x, w)), around(x, w), rtol=1e-5)
        assert {backend!r} == "xla" and axes is None
    except dfx.UnsupportedError as error:
        assert "shard_map at <string>" in str(error), error
print("done")
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_along_the_batch_are_refused(backend: str, run_program: Any) -> None:
    """The message has the collective, its line, and the ways out."""
    assert run_program(REFUSED.format(backend=backend), devices=8).split() == ["done"]
