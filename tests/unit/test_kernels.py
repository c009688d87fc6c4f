"""Descriptions of kernels and lanes: what they refuse, and what they hand to the driver."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla import kernels
from dynaflow_xla.kernels import ptx_parameters

PTX = """
.visible .entry other(.param .u64 a) { ret; }
.visible .entry twice(
    .param .u64 .ptr .global .align 1 twice_param_0,
    .param .u64 twice_param_1, .param .u32 twice_param_2, .param .u64 twice_param_3
)
.reqntid 128 { ret; }
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image": b""}, "PTX text or bytes"),
        ({"image": 3}, "PTX text or bytes"),
        ({"grid": ()}, "grid of kernel 'k' must be one to three positive integers"),
        ({"grid": (0,)}, "got \\(0,\\)"),
        ({"block": (1, 1, 1, 1)}, "block of kernel 'k'"),
        ({"block": 128}, "block of kernel 'k'"),
        ({"parameters": [3]}, "must be .*numpy scalar or bytes; got 3"),
        ({"parameters": [("inout", 0)]}, "got \\('inout', 0\\)"),
    ],
)
def test_a_kernel_that_cannot_be(change: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {"image": PTX, "name": "k", "grid": (1,), "block": (1,)}
    with pytest.raises(dfx.PlanError, match=words):
        dfx.CudaKernel(**{**good, **change})


def test_parameters_are_bound_to_the_region() -> None:
    kernel = dfx.CudaKernel(PTX, "k", (2, 3), (64,), [("out", 0), np.int32(-7), b"ab", ("in", 1)])
    assert kernel.size == ((2, 3, 1), (64, 1, 1))
    assert kernel.image_bytes() == PTX.encode() + b"\0"
    bound = kernel.bound(2, 1, "r")
    assert bound == [("out", 0), struct.pack("i", -7), b"ab", ("in", 1)]
    plain = dfx.CudaKernel(b"cubin", "k", (1,), (1,))
    assert plain.bound(2, 1, "r") == [("in", 0), ("in", 1), ("out", 0)]
    assert plain.image_bytes() == b"cubin"
    with pytest.raises(dfx.PlanError, match="takes \\('in', 1\\); region 'r' has 1 inputs"):
        kernel.bound(1, 1, "r")
    with pytest.raises(
        dfx.PlanError, match="must write every output of region 'r'.*\\('out', 1\\)"
    ):
        kernel.bound(2, 2, "r")
    with pytest.raises(dfx.UnsupportedError, match="for PyTorch give replace= a function"):
        kernel(1, 2)


def _triton(**metadata: Any) -> Any:
    known = {"name": "twice", "num_warps": 4, "shared": 96, **metadata}
    return SimpleNamespace(metadata=SimpleNamespace(**known), asm={"ptx": PTX, "cubin": b"\x7fELF"})


def test_a_kernel_of_triton_gets_null_for_memory_of_its_own() -> None:
    kernel = dfx.CudaKernel.from_triton(_triton(), (8,), [("in", 0), ("out", 0), np.int32(5)])
    assert (kernel.image, kernel.name, kernel.block, kernel.shared_bytes) == (
        b"\x7fELF", "twice", (128,), 96,
    )  # fmt: skip
    assert kernel.bound(1, 1, "r") == [("in", 0), ("out", 0), struct.pack("i", 5), bytes(8)]
    with pytest.raises(dfx.PlanError, match="has 4 parameters; region 'r' gives it 5"):
        dfx.CudaKernel.from_triton(_triton(), (8,)).bound(4, 1, "r")
    with pytest.raises(dfx.UnsupportedError, match="memory of its own \\(global_scratch_size\\)"):
        dfx.CudaKernel.from_triton(_triton(global_scratch_size=64), (8,))


def test_parameters_of_ptx() -> None:
    assert ptx_parameters(PTX, "twice") == 4 and ptx_parameters(PTX, "other") == 1
    with pytest.raises(dfx.PlanError, match="no kernel 'nobody'"):
        ptx_parameters(PTX, "nobody")


def test_a_kernel_of_nvcc(tmp_path: Path) -> None:
    """PTX that nvcc made is taken as it is; the kernel has the parameters that it was written with."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    (tmp_path / "k.cu").write_text(
        'extern "C" __global__ void scale(const float* x, float* y, float a, unsigned n) {\n'
        "  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  if (i < n) y[i] = a * x[i];\n}\n"
    )
    made = tmp_path / "k.ptx"
    subprocess.run(
        [nvcc, "-ptx", "-arch=sm_90", str(tmp_path / "k.cu"), "-o", str(made)], check=True
    )
    text = made.read_text()
    parameters = [("in", 0), ("out", 0), np.float32(2), np.uint32(8)]
    kernel = dfx.CudaKernel(text, "scale", (1,), (32,), parameters)
    assert len(kernel.bound(1, 1, "r")) == ptx_parameters(text, "scale") == 4


@pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_a_real_kernel_of_triton() -> None:
    """Compiled for an H200 without one."""
    pytest.importorskip("triton")
    import triton_kernels

    compiled = triton_kernels.compile_scale()
    kernel = dfx.CudaKernel.from_triton(compiled, (4,), [("in", 0), ("out", 0), np.int32(1000)])
    assert kernel.image_bytes().startswith(b"\x7fELF")
    bound = kernel.bound(1, 1, "r")
    assert bound[:3] == [("in", 0), ("out", 0), struct.pack("i", 1000)]
    assert all(p == bytes(8) for p in bound[3:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sms": [0, 8]}, "sms must be a tuple of integers"),
        ({"sms": (8,)}, "sms\\[0\\] must be 0: lane 0 is the caller's stream"),
        ({"sms": (0, -8)}, "sms must not be negative"),
        ({"priorities": (0, 0.5)}, "priorities must be a tuple of integers"),
        ({"priorities": (0, 0, 0)}, "3 entries for 2 lanes"),
    ],
)
def test_lanes_that_cannot_be(change: dict[str, Any], words: str) -> None:
    with pytest.raises(dfx.PlanError, match=words):
        dfx.Lanes(2, **change)


def test_plain_lanes_are_a_number() -> None:
    assert not dfx.Lanes(2).special and not dfx.Lanes(2, (0, 0), (0, 0)).special
    assert dfx.Lanes(2, sms=(0, 8)).special and dfx.Lanes(2, priorities=(0, -1)).special
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(8.0)
    fast = dfx.schedule(lambda x: x * 2, strategy="sequential", lanes=dfx.Lanes(1))
    assert (fast(x) == x * 2).all()
    with pytest.raises(dfx.PlanError, match="lanes must be an integer >= 1; got 0"):
        dfx.schedule(lambda x: x, lanes=dfx.Lanes(0))
    if jax.default_backend() == "cpu":
        confined = dfx.Lanes(2, sms=(0, 8))
        fast = dfx.schedule(lambda x: x * 2, strategy="sequential", backend="ffi", lanes=confined)
        with pytest.raises(dfx.UnsupportedError, match="which lanes of a CPU have not"):
            fast(x)


def test_lanes_are_at_most_those_of_the_engine() -> None:
    header = Path(__file__).parents[2] / "csrc" / "include" / "dfx" / "program.h"
    assert f"kMaxLanes = {kernels.MAX_LANES};" in header.read_text()
    assert dfx.Lanes(kernels.MAX_LANES, width=1).count == kernels.MAX_LANES
    with pytest.raises(dfx.PlanError, match="at most 256; got 257"):
        dfx.Lanes(257, width=1)
