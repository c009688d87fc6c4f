"""Programs that could hang, each in a process of its own under a hard limit.

A hang shows as a failure with the stacks of every Python thread, never as a stuck test run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

LIMIT_S = 400

WATCHED = f"""
import faulthandler, os, sys, threading, time
faulthandler.dump_traceback_later({LIMIT_S} - 10, exit=False)
"""

ON_LANES = (
    WATCHED
    + """
import jax, jax.numpy as jnp, numpy as np
import dynaflow_xla as dfx

LANES = min(2, len(os.sched_getaffinity(0)))

class RoundRobin(dfx.Strategy):
    def rules(self, graph):
        return [dfx.Op("*")] if graph.ops else None

    def schedule(self, s):
        count = 0
        while ready := s.ready():
            for op in ready:
                if "outer" in op.tags:
                    s.execute(op)
                else:
                    s.execute(op, lane=count % LANES)
                    count += 1

def spread(fn):
    return dfx.schedule(fn, RoundRobin(), lanes=LANES)

def work(x):
    a = jnp.sort(x, axis=-1) @ x.T
    b = jnp.cos(jnp.sort(-x, axis=0))
    return a @ x * 1e-3 + b @ x.T @ x * 1e-3

x = jnp.asarray(np.random.default_rng(0).random((32, 32)), jnp.float32)
fast = spread(work)
want = np.asarray(jax.jit(work)(x))

def check(got):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
"""
)


def run(code: str, *, any_status: bool = False, before: str = ON_LANES) -> str:
    """Runs a program that has to print "done"; returns its standard error.

    Args:
        code: What follows the preamble.
        any_status: It may end with any status.
        before: The preamble; this one has functions on lanes.
    """
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONFAULTHANDLER="1")
    environment["DYNAFLOW_XLA_WATCHDOG_S"] = str(LIMIT_S // 4)  # tells what lanes wait for
    environment.pop("XLA_FLAGS", None)
    source = before + textwrap.dedent(code)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", source],
            capture_output=True, text=True, timeout=LIMIT_S, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said, text = (
            x.decode(errors="replace") if isinstance(x, bytes) else x or ""
            for x in (error.stdout, error.stderr)
        )
        pytest.fail(
            f"hung for {LIMIT_S} s, after {said[-200:]!r}; its threads were:\n{text[-8000:]}"
        )
    report = f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    assert any_status or done.returncode == 0, report
    assert "done" in done.stdout.split(), report
    return done.stderr
