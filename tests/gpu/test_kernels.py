"""CUDA kernels in the place of regions, on a device: values, XLA's graph, confined lanes, faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx

N = 1 << 16
FACTORS = {"a2": 2.0, "b2": 2.0, "a3": 3.0, "b3": 3.0}


def _function(a: Any, b: Any) -> Any:
    outs = []
    for name, x in (("a", a), ("b", b)):
        with dfx.mark(f"{name}2"):
            twice = x * 2.0
        with dfx.mark(f"{name}3"):
            outs.append(twice * 3.0)
    return tuple(outs)


class Kernels(dfx.Strategy):
    """Each region a kernel, but for one."""

    def __init__(self, ptx: bytes, but: str = "") -> None:
        self.ptx, self.but = ptx, but

    def __repr__(self) -> str:
        return f"Kernels({self.but!r})"

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                kernel = dfx.CudaKernel(
                    self.ptx, "scale", (N // 256,), (256,),
                    [("in", 0), ("out", 0), np.float32(FACTORS[op.name]), np.uint32(N)],
                )  # fmt: skip
                s.execute(
                    op,
                    lane=int(op.name.startswith("b")),
                    replace=None if op.name == self.but else kernel,
                )


def _arrays(jax: Any, seed: int) -> list[Any]:
    x = np.random.default_rng(seed).standard_normal((2, N)).astype(np.float32)
    return [jax.numpy.asarray(row) for row in x]


@pytest.mark.values
@pytest.mark.parametrize("but", ["", "b2"], ids=["kernels", "with_an_executable"])
def test_values_and_many_calls(jax: Any, ptx: bytes, but: str) -> None:
    fast = dfx.schedule(_function, strategy=Kernels(ptx, but), backend="ffi", lanes=2)
    for seed in range(5):
        args = _arrays(jax, seed)
        for _ in range(50):
            got = fast(*args)
        for want, have in zip(_function(*args), got, strict=True):
            np.testing.assert_allclose(np.asarray(want), np.asarray(have), rtol=1e-6)
    ((stage, _),) = fast.planned(tuple(args), {}).stages
    assert stage.capturable == (not but)


@pytest.mark.values
@pytest.mark.parametrize("mode", ["LHS", "CONCURRENT"])
def test_the_plan_is_part_of_xlas_graph(jax: Any, ptx: bytes, mode: str, tmp_path: Path) -> None:
    """Between XLA's own kernels, in one CUDA graph: replays read new arguments."""
    fast = dfx.schedule(_function, strategy=Kernels(ptx), backend="ffi", lanes=2)

    def around(a: Any, b: Any) -> Any:
        x, y = fast(a + 1.0, b - 1.0)
        return x + y, x * y

    options = {
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
        "xla_gpu_command_buffer_scheduling_mode": mode,
    }
    run = jax.jit(around).lower(*_arrays(jax, 0)).compile(compiler_options=options)
    for seed in range(30):
        args = _arrays(jax, seed)
        a, b = (np.asarray(v) for v in args)
        x, y = (a + 1) * 6, (b - 1) * 6
        for want, got in zip((x + y, x * y), run(*args), strict=True):
            np.testing.assert_allclose(want, np.asarray(got), rtol=1e-5, atol=1e-4)


@pytest.mark.values
@pytest.mark.parametrize("sms", [(0, 32), (0, 32, 16), (0, 20, 0, 8)], ids=str)
def test_confined_lanes(jax: Any, ptx: bytes, sms: tuple[int, ...]) -> None:
    lanes = dfx.Lanes(len(sms), priorities=(0, -1), sms=sms)
    fast = dfx.schedule(_function, strategy=Kernels(ptx), backend="ffi", lanes=lanes)
    args = _arrays(jax, 3)
    try:
        got = fast(*args)
    except dfx.EngineError as error:
        if "no green contexts" not in str(error):
            raise
        pytest.skip(str(error))
    for want, have in zip(_function(*args), got, strict=True):
        np.testing.assert_allclose(np.asarray(want), np.asarray(have), rtol=1e-6)


def test_a_kernel_of_triton(jax: Any) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    here = Path(__file__).resolve().parents[1] / "support"
    sys.path.insert(0, str(here))
    try:
        import triton_kernels
    finally:
        sys.path.remove(str(here))
    compiled = triton_kernels.compile_scale()

    class Triton(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            for op in s.ready():
                parameters = [("in", 0), ("out", 0), np.int32(N)]
                s.execute(op, replace=dfx.CudaKernel.from_triton(compiled, (N // 256,), parameters))

    def f(a: Any) -> Any:
        with dfx.mark("all"):
            return a * 2.5

    x = _arrays(jax, 0)[0]
    got = dfx.schedule(f, strategy=Triton(), backend="ffi", lanes=1)(x)
    np.testing.assert_allclose(np.asarray(f(x)), np.asarray(got), rtol=1e-6)


FAULT = """
import os, struct, sys
import cuda_driver
from dynaflow_xla.ffi import _engine

device = cuda_driver.Driver()

engine = _engine.CudaEngine(0, check_steps=True)
program = _engine.Program(2, 0, 0, 0, 0, "p")
far = struct.pack("Q", 1 << 47)
engine.add_kernel_launch(
    program, 1, "broken", open(sys.argv[1], "rb").read(), "scale", (1, 1, 1), (32, 1, 1), 0,
    [far, far, struct.pack("f", 1), struct.pack("I", 32)], [], [],
)
program.finish()
for wanted in ("step 'broken': cuStreamSynchronize", "CUDA context is lost"):
    try:
        engine.run(program, [], [], device.stream)
    except RuntimeError as error:
        assert wanted in str(error), error
    else:
        raise SystemExit("the fault went unnoticed")
print("named", flush=True)
os._exit(0)
"""


def test_a_fault_is_named_and_the_device_is_lost(ptx: bytes, tmp_path: Path) -> None:
    """In a process of its own, because the context does not survive."""
    image, script = tmp_path / "k.ptx", tmp_path / "fault.py"
    image.write_bytes(ptx)
    script.write_text(FAULT)
    path = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    )
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(image)],
        capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0 and "named" in done.stdout, done.stdout + done.stderr
