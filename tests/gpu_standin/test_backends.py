"""Both GPU backends under JAX's transformations, from threads, and where something fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    BACKENDS,
    CASES,
    LANES,
    assert_close,
    loop,
    matrix,
    scheduled,
    two_branches,
    wanted,
)

import dynaflow_xla as dfx

DELAY_US = 300


@pytest.fixture(autouse=True)
def delays(driver: Any) -> None:
    """Before each operation: what the calls do not order comes out of order."""
    driver.delay(DELAY_US)


def _scalar(x: Any) -> Any:
    return two_branches(x)[0].sum()


def _use(how: str, fast: Any) -> Any:
    """What a user does with a function of one matrix."""
    if how == "jit":
        return jax.jit(lambda x: fast(x * 2)[0] + 1)
    if how == "grad":
        return jax.grad(lambda x: fast(x)[0].sum())
    if how == "vmap":
        return lambda x: jax.vmap(fast)(jnp.stack([x, x + 1]))
    if how == "scan":
        return lambda x: jax.lax.scan(lambda c, _: (fast(c)[0] * 0.1, c.sum()), x, None, length=3)
    if how == "donation":
        return lambda x: jax.jit(fast, donate_argnums=0)(x + 0)
    return fast


@pytest.mark.filterwarnings(
    "ignore::dynaflow_xla.errors.FallbackWarning"
)  # of an outer jit: serial
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.values
@pytest.mark.parametrize("how", ["plain", "jit", "grad", "vmap", "scan", "donation"])
def test_transformations(how: str, backend: str) -> None:
    """The first use is inside of the transformation."""
    used = _use(how, dfx.schedule(two_branches, dfx.Branches(), backend=backend, lanes=LANES))
    original = _use(how if how != "donation" else "plain", two_branches)
    for seed in range(2):
        assert_close(wanted(original, matrix(seed)), used(jax.device_put(matrix(seed))))


@pytest.mark.values
@pytest.mark.parametrize("backend", BACKENDS)
def test_loops(backend: str) -> None:
    fast = dfx.schedule(loop, dfx.Branches(), backend=backend, lanes=LANES)
    assert_close(wanted(loop, matrix(1)), fast(matrix(1)))


@pytest.mark.values
@pytest.mark.parametrize("backend", BACKENDS)
def test_threads(backend: str) -> None:
    fast = scheduled(CASES["branches"], backend)
    want = [wanted(two_branches, matrix(seed)) for seed in range(3)]
    failures: list[BaseException] = []

    def caller(seed: int) -> None:
        try:
            for _ in range(5):
                assert_close(want[seed], fast(matrix(seed)))
        except BaseException as error:  # told by the main thread
            failures.append(error)

    threads = [threading.Thread(target=caller, args=(seed,), daemon=True) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not failures, failures[0]


@pytest.mark.not_computed  # what a failed launch leaves behind may be read
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_launch_that_fails_is_told_and_the_next_call_works(backend: str, driver: Any) -> None:
    fast = scheduled(CASES["branches"], backend)
    x = jax.device_put(matrix(0))
    jax.block_until_ready(fast(x))
    function = "cuGraphLaunch" if backend == "xla" else "cuLaunchKernel"
    driver.fail(function, 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        jax.block_until_ready(fast(x + 0))
        jax.block_until_ready(fast(x))
    driver.fail("", 0)
    assert_close(wanted(two_branches, matrix(0)), fast(x))


@pytest.mark.not_computed  # what a failed launch leaves behind may be read
def test_no_launch_that_fails_in_a_lane_is_silent(driver: Any) -> None:
    """XLA's Execute returns success then: the error is in its event alone."""
    driver.delay(0)
    fast = scheduled(CASES["four"], "ffi")
    x = jax.block_until_ready(jax.device_put(matrix(0)))
    want = wanted(CASES["four"].fn, matrix(0))
    assert_close(want, fast(x))
    functions = ("cuLaunchKernel", "cuGraphLaunch")
    before = [driver.calls(f) for f in functions]
    jax.block_until_ready(fast(x))
    launches = [driver.calls(f) - n for f, n in zip(functions, before, strict=True)]
    assert sum(launches) > 2
    for function, count in zip(functions, launches, strict=True):
        for skip in range(count):
            driver.fail(function, 2, skip)
            with pytest.raises(jax.errors.JaxRuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
                jax.block_until_ready(fast(x))
            driver.fail("", 0)
            assert_close(want, fast(x))


ALONE = """
import jax, numpy as np, sys, os
import dynaflow_xla as dfx
from cases import CASES, matrix, scheduled, two_branches, wanted, assert_close
import driver_trace
driver = driver_trace.Driver(os.environ["DYNAFLOW_XLA_STANDIN"])
what, backend = sys.argv[1:]
with jax.default_matmul_precision("highest"):
    fast = scheduled(CASES["branches"], backend)
    x = jax.device_put(matrix(0))
    want = wanted(two_branches, matrix(0))
    assert_close(want, fast(x))
    if what == "lost":
        driver.lose(719)
        for call in range(2):
            try:
                jax.block_until_ready(fast(x))
            except Exception as error:
                print("told:", type(error).__name__, str(error)[:200].replace(chr(10), " "))
    else:
        try:
            jax.block_until_ready(jax.numpy.ones((1 << 15, 1 << 10)) + 1)
        except Exception as error:
            print("told:", type(error).__name__, str(error)[:200].replace(chr(10), " "))
        assert_close(want, fast(x))
        print("works")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", ["lost", "memory"])
def test_in_a_process_of_its_own(what: str, backend: str, tmp_path: Path) -> None:
    """A device that is lost is lost for ever; memory that is too small is told, and the rest works."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    env = {**os.environ, "FAKE_CUDA_MEMORY_MB": "96" if what == "memory" else "81920"}
    done = subprocess.run(
        [sys.executable, str(script), what, backend],
        capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip
    said = done.stdout + done.stderr[-2000:]
    assert done.returncode == 0, said
    assert done.stdout.count("told:") == (2 if what == "lost" else 1), said
    assert what == "lost" or "works" in done.stdout, said
    assert np.char.find(said, "Segmentation") < 0
