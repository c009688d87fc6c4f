"""Faults of the engine and of the driver that these tests must notice."""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cases import CASES, assert_close, matrix, scheduled, wanted

from dynaflow_xla.ffi import _engine


def test_a_driver_that_ignores_waits_is_noticed_by_values(driver: Any, values: Any) -> None:
    """With delays before each operation some result is wrong, under every case that has two lanes."""
    for name in ("branches", "four", "training_step"):
        case = CASES[name]
        fast = scheduled(case, "ffi")
        x = matrix(0)
        jax.block_until_ready(fast(x))
        driver.delay(20_000)
        assert_close(wanted(case.fn, x), fast(x))
        driver.ignore_waits(True)
        wrong = 0
        for seed in range(1, 9):
            try:
                assert_close(wanted(case.fn, matrix(seed)), fast(matrix(seed)))
            except AssertionError:
                wrong += 1
                break
        driver.ignore_waits(False)
        driver.delay(0)
        jax.block_until_ready(fast(x))
        assert wrong, f"{name}: nothing was wrong where no stream waits"


def lane_program(driver: Any, waits: bool, early: bool = False, live: bool = False) -> list[str]:
    """Two lanes of kernels, the second of which reads what the first writes; the races in its trace.

    Where a `live` buffer was donated, the second lane has no such input, and writes over the first's.
    """
    engine = _engine.CudaEngine(0)
    n = 256
    program = _engine.Program(2, 1, 1 + live, 2, 0, "two lanes")
    ptx = SCALE + b"\0"
    source = program.add_buffer("arg", 0, 0, 4 * n)
    middle, end = (program.add_buffer("result", i, 0, 4 * n) for i in range(2))

    def scale(lane: int, name: str, of: Any, to: Any) -> None:
        parameters = [("in", 0), ("out", 0), struct.pack("f", 2.0), struct.pack("I", n)]
        engine.add_kernel_launch(
            program, lane, name, ptx, "scale", (1, 1, 1), (n, 1, 1), 0, parameters, [of], [to]
        )

    if early:
        program.add_record(0, 0)
    scale(0, "first", source, middle)
    if not early:
        program.add_record(0, 0)
    if waits:
        program.add_wait(1, 0)
    if live:
        scale(1, "second", program.add_buffer("arg", 1, 0, 4 * n), end)
    else:
        scale(1, "second", middle, end)
    program.finish()
    x, y, z, other = (jax.device_put(np.full(n, i, np.float32)) for i in range(4))
    jax.block_until_ready((x, y, z, other))
    pointers = [a.unsafe_buffer_pointer() for a in (x, y, z, other)]
    arguments, results = [pointers[0], pointers[3]][: 1 + live], pointers[1:3]
    if live:
        results[1] = pointers[0]  # the donated argument's memory, which the first lane reads
    library = driver.functions
    library.fake_stream.restype = ctypes.c_void_p
    stream = library.fake_stream()

    with driver.tracing() as traces:
        engine.run(program, arguments, results, stream)
        library.fake_synchronize(ctypes.c_void_p(stream))
    trace = traces[0]
    assert len(trace.kernels("")) == 2
    return [str(a) for a, _, _ in trace.races()]


SCALE = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 y, .param .f32 a, .param .u32 n) { ret; }
"""


def test_a_wait_that_the_engine_drops_is_a_race(driver: Any) -> None:
    assert not lane_program(driver, waits=True)
    assert lane_program(driver, waits=False)


def test_an_event_recorded_too_early_is_a_race(driver: Any) -> None:
    assert lane_program(driver, waits=True, early=True)


def test_a_live_buffer_that_is_donated_is_a_race(driver: Any) -> None:
    """A result in the memory of an argument that another lane still reads; with a wait it is none."""
    assert lane_program(driver, waits=False, live=True)
    assert not lane_program(driver, waits=True, live=True)


def test_a_buffer_that_was_donated_is_gone(driver: Any) -> None:
    """Donated to one call and read by the next: JAX has deleted it, and says so."""
    fast = jax.jit(scheduled(CASES["branches"], "ffi"), donate_argnums=0)
    x = jax.device_put(matrix(0))
    want = wanted(CASES["branches"].fn, matrix(0))
    assert_close(want, fast(x))
    if x.is_deleted():
        with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
            np.asarray(x)


@pytest.mark.parametrize("streams", [1, 2])
def test_matrices_of_a_list_are_accesses(streams: int, driver: Any) -> None:
    """A batched solve in place, and another that reads it: cuBLAS finds the matrices by lists."""
    n, batches = 8, 3
    lower = np.tril(
        np.random.default_rng(0).standard_normal((n, n)).astype(np.float32)
    ) + 4 * np.eye(n)
    given = np.stack([lower.astype(np.float32)] * batches)
    x, y = (jax.block_until_ready(jax.device_put(given)) for _ in range(2))
    lists = []
    for of in (x, y):
        at = of.unsafe_buffer_pointer() + 4 * n * n * np.arange(batches, dtype=np.uint64)
        lists.append(jax.block_until_ready(jax.device_put(at.view(np.uint32))))
    of_x, of_y = (ctypes.c_void_p(made.unsafe_buffer_pointer()) for made in lists)
    one = ctypes.byref(ctypes.c_float(1))
    library = ctypes.CDLL(str(Path(os.environ["DYNAFLOW_XLA_STANDIN"]).parent / "libcublas.so.13"))
    driver.functions.fake_stream.restype = ctypes.c_void_p
    used = [ctypes.c_void_p(driver.functions.fake_stream()) for _ in range(streams)]
    handle = ctypes.c_void_p()
    library.cublasCreate_v2(ctypes.byref(handle))
    with driver.current(), driver.tracing() as traces:
        for number, (a, b) in enumerate([(of_y, of_x), (of_x, of_y)]):
            library.cublasSetStream_v2(handle, used[number % streams])
            status = library.cublasStrsmBatched(handle, 0, 0, 0, 0, n, n, one, a, n, b, n, batches)
            assert status == 0
        for stream in used:
            assert driver.functions.fake_synchronize(stream) == 0
    library.cublasDestroy_v2(handle)
    first, second = (k for k in traces[0].kernels() if k.name == "cublasStrsmBatched")
    assert len(first.accesses) == len(second.accesses) == 2 + 2 * batches
    races = traces[0].races()
    assert bool(races) == (streams == 2)
    if races:
        ((a, b, met),) = races
        assert (a, b) == (first, second)
        assert any(0 <= met.address - of.unsafe_buffer_pointer() < given.nbytes for of in (x, y))


def test_pairs_of_accesses() -> None:
    """What the race check takes for a conflict."""
    from driver_trace import Access

    for (a, b), meets in {
        ((0, 8), (8, 8)): False, ((0, 9), (8, 8)): True, ((8, 8), (0, 8)): False, ((2, 1), (0, 8)): True,
    }.items():  # fmt: skip
        for u, v in itertools.product((False, True), repeat=2):
            assert Access(*a, u).meets(Access(*b, v)) == (meets and (u or v))
