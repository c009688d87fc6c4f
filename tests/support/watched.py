"""Programs that could hang, each in a process of its own under a hard limit.

A hang shows as a failure with the stacks of every Python thread, never as a stuck test run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 400


def watched(limit_s: int = LIMIT_S) -> str:
    """The first lines of a program: where its threads are is told before it is killed."""
    return f"""
import faulthandler, os, sys, threading, time
faulthandler.dump_traceback_later({limit_s} - 10, exit=False)
"""


WATCHED = watched()

JAX = """
import jax, jax.numpy as jnp, numpy as np
import dynaflow_xla as dfx
from round_robin import RoundRobin

LANES = min(2, len(os.sched_getaffinity(0)))

def spread(fn, **options):
    return dfx.schedule(fn, RoundRobin(), lanes=LANES, **options)
"""

ON_LANES = (
    WATCHED
    + JAX
    + """
def work(x):
    a = jnp.sort(x, axis=-1) @ x.T
    b = jnp.cos(jnp.sort(-x, axis=0))
    return a @ x * 1e-3 + b @ x.T @ x * 1e-3

x = jnp.asarray(np.random.default_rng(0).random((32, 32)), jnp.float32)
fast = spread(work)
want = np.asarray(jax.jit(work)(x))

def check(got):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

def at_once(count, loop):
    errors = []

    def kept(i):
        try:
            loop(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=kept, args=(i,)) for i in range(count)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors, errors
"""
)


def ended(source: str, *, limit_s: int = LIMIT_S, **environment: str) -> Any:
    """Runs a program in a fresh interpreter; fails the test with its threads' stacks where it hangs.

    Returns:
        The ``subprocess.CompletedProcess``, its output as text.
    """
    names = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONFAULTHANDLER": "1"}
    names.pop("XLA_FLAGS", None)
    names["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    try:
        return subprocess.run(
            [sys.executable, "-P", "-c", source],
            capture_output=True, text=True, timeout=limit_s, env={**names, **environment},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said, text = (
            x.decode(errors="replace") if isinstance(x, bytes) else x or ""
            for x in (error.stdout, error.stderr)
        )
        pytest.fail(
            f"hung for {limit_s} s, after {said[-200:]!r}; its threads were:\n{text[-8000:]}"
        )


def told(done: Any) -> str:
    """How a program ended, for a failure's text."""
    return f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def run(code: str, *, any_status: bool = False, before: str = ON_LANES) -> str:
    """Runs a program that has to print "done"; returns its standard error.

    Args:
        code: What follows the preamble.
        any_status: It may end with any status.
        before: The preamble; this one has functions on lanes.
    """
    # The engine's watchdog tells what lanes wait for.
    done = ended(before + textwrap.dedent(code), DYNAFLOW_XLA_WATCHDOG_S=str(LIMIT_S // 4))
    assert any_status or done.returncode == 0, told(done)
    assert "done" in done.stdout.split(), told(done)
    return done.stderr
