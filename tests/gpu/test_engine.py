"""The engine's CUDA lanes on a device: kernels, order, captures, replays."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynaflow_xla.ffi import _engine

N = 4096
LANES = 4
REPLAYS = 200 if os.environ.get("DYNAFLOW_XLA_STANDIN") else 10_000


def _program(engine: Any, ptx: bytes, seed: int, delays: bool) -> tuple[Any, list[float]]:
    """Each step scales what another lane made; random delays sit in front. Returns factors, too."""
    chance = random.Random(seed)
    steps = 12
    program = _engine.Program(LANES, steps, 1, steps, 0, "scales")
    source = program.add_buffer("arg", 0, 0, 4 * N)
    places, factors, lane_of = [source], [1.0], [0]
    for step in range(steps):
        lane = chance.randrange(LANES)
        of = chance.randrange(len(places))
        factor = chance.choice([0.5, 2.0, -1.0])
        if of and lane_of[of] != lane:
            program.add_wait(lane, of - 1)
        if delays:
            cycles = struct.pack("Q", chance.randrange(40_000))
            engine.add_kernel_launch(
                program, lane, "delay", ptx, "delay", (1, 1, 1), (1, 1, 1), 0, [cycles], [], []
            )
        out = program.add_buffer("result", step, 0, 4 * N)
        engine.add_kernel_launch(
            program, lane, f"scale {step}", ptx, "scale", (N // 256, 1, 1), (256, 1, 1), 0,
            [("in", 0), ("out", 0), struct.pack("f", factor), struct.pack("I", N)],
            [places[of]], [out],
        )  # fmt: skip
        program.add_record(lane, step)
        places.append(out)
        factors.append(factors[of] * factor)
        lane_of.append(lane)
    program.finish()
    return program, factors[1:]


def _memory(device: Any, factors: list[float], seed: int = 0) -> tuple[Any, list[Any], Any]:
    """An argument, results that hold nothing yet, and the argument's values."""
    x = np.random.default_rng(seed).standard_normal(N).astype(np.float32)
    nothing = np.full(N, np.nan, np.float32)
    return device.array(x), [device.array(nothing) for _ in factors], x


def _check(x: Any, outs: list[Any], factors: list[float]) -> None:
    for out, factor in zip(outs, factors, strict=True):
        np.testing.assert_array_equal(out.get(), x * np.float32(factor))


@pytest.mark.values
@pytest.mark.parametrize("seed", range(20))
def test_random_programs_with_delays(device: Any, ptx: bytes, seed: int) -> None:
    engine = _engine.CudaEngine(0)
    program, factors = _program(engine, ptx, seed, delays=True)
    source, outs, _ = _memory(device, factors)
    for call in range(10):
        x = np.random.default_rng(call).standard_normal(N).astype(np.float32)
        source.put(x)
        for out in outs:
            out.put(np.full(N, np.nan, np.float32))
        engine.run(program, [source.address], [o.address for o in outs], device.stream)
        _check(x, outs, factors)


@pytest.mark.values
def test_ten_thousand_replays_of_a_captured_call(device: Any, ptx: bytes) -> None:
    engine = _engine.CudaEngine(0)
    program, factors = _program(engine, ptx, 3, delays=False)
    source, outs, x = _memory(device, factors)
    with device.capture() as graphs:
        engine.run(program, [source.address], [o.address for o in outs], device.stream)
    for replay in range(REPLAYS):
        look = replay % (REPLAYS // 20) == 0
        if look:
            x = np.random.default_rng(replay).standard_normal(N).astype(np.float32)
            source.put(x)
            for out in outs:
                out.put(np.full(N, np.nan, np.float32))
        device.launch(graphs[0])
        if look:
            _check(x, outs, factors)
    device.wait()
    assert engine.failures == 0


def test_the_text_of_the_kernels_assembles(ptx: bytes, tmp_path: Path) -> None:
    """A driver takes the text as it is; what is wrong with it is better known before."""
    tool = shutil.which("ptxas")
    if tool is None:
        pytest.skip("ptxas is not installed")
    text = tmp_path / "kernels.ptx"
    text.write_bytes(ptx.rstrip(b"\0"))
    command = [tool, "-arch=sm_90", str(text), "-o", str(tmp_path / "kernels.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bad_input(device: Any, ptx: bytes) -> None:
    with pytest.raises(RuntimeError, match="no CUDA device 99"):
        _engine.CudaEngine(99)
    engine = _engine.CudaEngine(0)
    program = _engine.Program(1, 0, 0, 0, 0, "p")
    with pytest.raises(RuntimeError, match="cuModuleGetFunction of 'nothing'"):
        engine.add_kernel_launch(
            program, 0, "s", ptx, "nothing", (1, 1, 1), (1, 1, 1), 0, [], [], []
        )
    cycles = struct.pack("Q", 1)
    engine.add_kernel_launch(
        program, 0, "too wide", ptx, "delay", (1, 1, 1), (9999, 1, 1), 0, [cycles], [], []
    )
    program.finish()
    with pytest.raises(RuntimeError, match="step 'too wide'.*cuLaunchKernel"):
        engine.run(program, [], [], device.stream)
    good, factors = _program(engine, ptx, 1, delays=False)
    source, outs, x = _memory(device, factors)
    engine.run(good, [source.address], [o.address for o in outs], device.stream)
    _check(x, outs, factors)


def test_a_thread_keeps_the_context_that_it_had(device: Any, ptx: bytes) -> None:
    """None on a new thread; and where the caller's is current, it is current after the call."""
    engine = _engine.CudaEngine(0)
    program, factors = _program(engine, ptx, 5, delays=False)
    source, outs, x = _memory(device, factors)
    run = (program, [source.address], [o.address for o in outs], device.stream)
    seen: list[int | None] = []

    def other() -> None:
        engine.run(*run)
        seen.append(device.context())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    before = device.context()
    engine.run(*run)
    assert seen == [None]
    assert before is not None and device.context() == before
    _check(x, outs, factors)
