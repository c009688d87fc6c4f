"""Collectives of one process with two devices on the stand-in: ``python two_devices.py NAME BACKEND``."""

from __future__ import annotations

import os
import sys
from typing import Any

import driver_trace
import jax
import jax.numpy as jnp
import numpy as np
import values
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import dynaflow_xla as dfx

AXIS, DEVICES, N = "d", 2, 32


def reduced(x: Any, w: Any) -> Any:
    with dfx.mark("product"):
        a = jnp.tanh(x @ w)
    a = jax.lax.psum(a, AXIS)
    with dfx.mark("beside"):
        b = jnp.sin(x) * 2
    with dfx.mark("after"):
        return a[: b.shape[0], : b.shape[1]] + b, a


def gathered(x: Any, w: Any) -> Any:
    with dfx.mark("product"):
        a = jnp.tanh(x @ w)
    a = jax.lax.all_gather(a, AXIS, tiled=True)
    with dfx.mark("after"):
        s = a * 2
    return jax.lax.psum_scatter(s, AXIS, tiled=True) + 1, jax.lax.pmax(s, AXIS)


def exchanged(x: Any, w: Any) -> Any:
    with dfx.mark("product"):
        a = jnp.tanh(x @ w)
    b = jax.lax.ppermute(a, AXIS, [(0, 1), (1, 0)])
    c = jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True)
    with dfx.mark("after"):
        return b * 2 + a, c + 1


def training(x: Any, w: Any) -> Any:
    def loss(w: Any) -> Any:
        with dfx.mark("tower_a"):
            a = jnp.tanh(x @ w)
        with dfx.mark("tower_b"):
            b = jnp.sin(x @ w.T)
        with dfx.mark("loss"):
            return ((a - b) ** 2).mean()

    value, grad = jax.value_and_grad(loss)(w)
    grad = jax.lax.pmean(grad, AXIS)
    return jax.lax.pmean(value, AXIS), w - 0.1 * grad


CASES = {f.__name__: f for f in (reduced, gathered, exchanged, training)}
OUT = {
    "reduced": (P(AXIS), P()), "gathered": (P(AXIS), P()), "exchanged": (P(AXIS), P(AXIS)),
    "training": (P(), P()),
}  # fmt: skip


def spread(fn: Any, name: str, devices: list[Any]) -> tuple[Any, Mesh]:
    mesh = Mesh(np.array(devices), (AXIS,))
    specs = {"in_specs": (P(AXIS), P()), "out_specs": OUT[name], "check_vma": False}
    return jax.shard_map(fn, mesh=mesh, **specs), mesh


def main(name: str, backend: str) -> None:
    driver = driver_trace.Driver(os.environ["DYNAFLOW_XLA_STANDIN"])
    devices = jax.devices()
    assert len(devices) == DEVICES, devices
    fn = CASES[name]
    fast = dfx.schedule(fn, dfx.Branches(), backend=backend, lanes=dfx.Lanes(2))
    run, mesh = spread(fast, name, devices)
    launches = 0
    with jax.default_matmul_precision("highest"):
        run = jax.jit(run)
        for seed in range(4):
            driver.delay(200 * (seed > 0))
            rng = np.random.default_rng(seed)
            x, w = (rng.standard_normal((N, N)).astype(np.float32) * 0.2 for _ in range(2))
            placed = (
                jax.device_put(x, NamedSharding(mesh, P(AXIS))),
                jax.device_put(w, NamedSharding(mesh, P())),
            )
            jax.block_until_ready(placed)
            with driver.tracing(values.installed().kernel) as traces:
                got = jax.block_until_ready(run(*placed))
            want = reference(name, x, w)
            for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(np.asarray(g), np.asarray(e), rtol=2e-4, atol=2e-4)
            races = traces[0].races()
            assert not races, driver_trace.report(races)
            launches += sum(o.name.startswith("nccl") for o in traces[0].operations)
    assert launches, "no collective was launched"
    # What else a communicator can do may be unknown.
    missing = set(driver.missing()) - {"ncclCommQueryProperties"}
    assert not missing, missing
    assert not driver.without_context()
    assert not driver.misuse()
    unknown = values.installed().unknown
    assert not unknown and not values.installed().errors, (unknown, values.installed().errors[:1])
    print(f"{launches} collectives")


def reference(name: str, x: Any, w: Any) -> Any:
    """On the host, rank by rank."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        parts = [jnp.asarray(p) for p in np.split(x, DEVICES)]
        w = jnp.asarray(w)
        a = [jnp.tanh(p @ w) for p in parts]
        if name == "reduced":
            total = sum(a)
            b = [jnp.sin(p) * 2 for p in parts]
            return jnp.concatenate([total + q for q in b]), total
        if name == "gathered":
            s = jnp.concatenate(a) * 2
            half = s.shape[0] // DEVICES
            rows = [DEVICES * s[r * half : (r + 1) * half] + 1 for r in range(DEVICES)]
            return jnp.concatenate(rows), s
        if name == "exchanged":
            halves = [jnp.split(p, DEVICES) for p in parts]
            swapped = [jnp.concatenate([h[r] for h in halves]) for r in range(DEVICES)]
            mixed = [a[1] * 2 + a[0], a[0] * 2 + a[1]]
            return jnp.concatenate(mixed), jnp.concatenate(swapped) + 1

        def loss(w: Any, p: Any) -> Any:
            return ((jnp.tanh(p @ w) - jnp.sin(p @ w.T)) ** 2).mean()

        found = [jax.value_and_grad(loss)(w, p) for p in parts]
        value = sum(v for v, _ in found) / DEVICES
        return value, w - 0.1 * sum(g for _, g in found) / DEVICES


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
