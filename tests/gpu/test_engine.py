"""The engine's CUDA lanes on a device: kernels, order, captures, replays."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest

from dynaflow_xla.ffi import _engine

N = 4096
LANES = 4


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


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_with_delays(torch: Any, ptx: bytes, seed: int) -> None:
    engine = _engine.CudaEngine(0)
    program, factors = _program(engine, ptx, seed, delays=True)
    x = torch.randn(N, device="cuda")
    for _ in range(10):
        outs = [torch.full((N,), float("nan"), device="cuda") for _ in factors]
        stream = torch.cuda.current_stream().cuda_stream
        engine.run(program, [x.data_ptr()], [o.data_ptr() for o in outs], stream)
        for out, factor in zip(outs, factors, strict=True):
            assert torch.equal(out, x * factor)


def test_ten_thousand_replays_of_a_captured_call(torch: Any, ptx: bytes) -> None:
    engine = _engine.CudaEngine(0)
    program, factors = _program(engine, ptx, 3, delays=False)
    x = torch.randn(N, device="cuda")
    outs = [torch.empty(N, device="cuda") for _ in factors]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.run(
            program, [x.data_ptr()], [o.data_ptr() for o in outs],
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
    for replay in range(10_000):
        if replay % 500 == 0:
            x.copy_(torch.randn(N, device="cuda"))
            for out in outs:
                out.fill_(float("nan"))
        graph.replay()
        if replay % 500 == 0:
            for out, factor in zip(outs, factors, strict=True):
                assert torch.equal(out, x * factor)
    torch.cuda.synchronize()
    assert engine.failures == 0


def test_bad_input(torch: Any, ptx: bytes) -> None:
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
    stream = torch.cuda.current_stream().cuda_stream
    with pytest.raises(RuntimeError, match="step 'too wide'.*cuLaunchKernel"):
        engine.run(program, [], [], stream)
    good, factors = _program(engine, ptx, 1, delays=False)
    x = torch.randn(N, device="cuda")
    outs = [torch.empty(N, device="cuda") for _ in factors]
    engine.run(good, [x.data_ptr()], [o.data_ptr() for o in outs], stream)
    assert torch.equal(outs[0], x * factors[0])
