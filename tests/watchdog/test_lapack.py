"""Batched LAPACK calls in one CPU program: jaxlib's own kernels hang when enough of them run at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

LIMIT_S = 400

PROGRAM = """
import faulthandler
faulthandler.dump_traceback_later({limit} - 10, exit=False)
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import dynaflow_xla as dfx

rng = np.random.default_rng(0)
x = rng.standard_normal((8, 48, 48)).astype(np.float32)
x = jnp.asarray(x @ x.transpose(0, 2, 1) + 48 * np.eye(48, dtype=np.float32))
calls = {{
    "qr": lambda a: jnp.linalg.qr(a)[1],
    "eigh": lambda a: jnp.linalg.eigh(a)[0],
    "solve": lambda a: jnp.linalg.solve(a, a[..., :3]),
    "svd": lambda a: jnp.linalg.svd(a, compute_uv=False),
}}

class Wide(dfx.Strategy):
    def rules(self, graph):
        return [dfx.Op("*")] if graph.ops else None

    def schedule(self, s):
        while ready := s.ready():
            for op in ready:
                s.execute(op, width="all")

def eight(call):
    return lambda x: [call(x * (i + 1.0)) for i in range(8)]

def total(f):
    return lambda x: sum(jnp.sum(y ** 2) for y in f(x))

def looped(f):
    return lambda x: lax.scan(lambda c, _: (c * 1.5, [y.sum() for y in f(c)]), x, None, length=2)

ways = {{
    "plain": lambda f, schedule: schedule(f),
    "nested": lambda f, schedule: schedule(looped(f)),
    "grad": lambda f, schedule: jax.jit(jax.grad(total(schedule(f)))),
    "vmap": lambda f, schedule: jax.jit(jax.vmap(schedule(f))),
    "split": lambda f, schedule: schedule(f),
}}

def one(x):  # no two calls at the same time
    return np.asarray(jnp.stack(x)) if isinstance(x, list) else np.asarray(x)

def check(name, way, backend):
    f = eight(calls[name])
    options = dict(in_axes=0) if way == "split" else {{}}
    # On all cores, all regions are in one program, as on the backend xla.
    whole = dfx.Branches() if backend == "xla" else Wide()
    strategy = dfx.NanoBatch(2) if way == "split" else whole
    made = ways[way](f, lambda g: dfx.schedule(g, strategy, backend=backend, **options))
    for _ in range(20):
        got = jax.block_until_ready(made(x))
    if way in ("plain", "split", "vmap"):
        for i in range(8):
            want = np.asarray(calls[name](x * (i + 1.0)))
            np.testing.assert_allclose(np.abs(got[i]), np.abs(want), rtol=2e-3, atol=2e-3)
    assert all(np.isfinite(np.asarray(y)).all() for y in jax.tree_util.tree_leaves(got))

for case in {cases!r}:
    print(case, flush=True)
    check(*case)
print("done")
"""

CASES = [
    ("qr", "plain", "xla"), ("qr", "split", "xla"), ("eigh", "plain", "xla"), ("eigh", "nested", "xla"),
    ("eigh", "grad", "xla"), ("solve", "plain", "xla"), ("solve", "nested", "xla"), ("svd", "vmap", "xla"),
    ("qr", "plain", "ffi"), ("eigh", "grad", "ffi"), ("solve", "split", "ffi"),
]  # fmt: skip


def test_they_do_not_hang_one_program() -> None:
    """Eight calls that do not depend on each other; without the order between them most cases hang."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONFAULTHANDLER="1")
    environment.pop("XLA_FLAGS", None)
    source = PROGRAM.format(limit=LIMIT_S, cases=CASES)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", source],
            capture_output=True, text=True, timeout=LIMIT_S, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        pytest.fail(f"hung for {LIMIT_S} s, in the last of:\n{text}")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.split()[-1] == "done"
