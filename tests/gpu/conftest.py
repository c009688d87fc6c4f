"""The GPU suite: every test has the marker ``gpu`` and is skipped, with the reason, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda_driver as cuda
import pytest

from dynaflow_xla.ffi import _engine

HERE = str(Path(__file__).parent) + "/"

# Spins for `cycles` clock cycles: what a lane does before a step when races are hunted; and y = a * x.
PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry delay(.param .u64 cycles) {
  .reg .u64 %rd<4>; .reg .pred %p;
  ld.param.u64 %rd0, [cycles];
  mov.u64 %rd1, %clock64;
AGAIN:
  mov.u64 %rd2, %clock64;
  sub.u64 %rd3, %rd2, %rd1;
  setp.lt.u64 %p, %rd3, %rd0;
  @%p bra AGAIN;
  ret;
}
.visible .entry scale(.param .u64 x, .param .u64 y, .param .f32 a, .param .u32 n) {
  .reg .u64 %rd<6>; .reg .u32 %r<6>; .reg .f32 %f<4>; .reg .pred %p;
  ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [y];
  ld.param.f32 %f0, [a]; ld.param.u32 %r0, [n];
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  setp.ge.u32 %p, %r4, %r0;
  @%p ret;
  cvta.to.global.u64 %rd0, %rd0; cvta.to.global.u64 %rd1, %rd1;
  mul.wide.u32 %rd2, %r4, 4;
  add.u64 %rd3, %rd0, %rd2; add.u64 %rd4, %rd1, %rd2;
  ld.global.f32 %f1, [%rd3];
  mul.f32 %f2, %f1, %f0;
  st.global.f32 [%rd4], %f2;
  ret;
}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = _engine.cuda_problem()
    for item in items:
        if not str(item.path).startswith(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.filterwarnings("default"))
        if problem:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {problem}"))


@pytest.fixture(scope="session")
def _driver() -> cuda.Driver:
    return cuda.Driver()


@pytest.fixture
def device(_driver: cuda.Driver) -> cuda.Driver:
    """Memory, a stream and graphs, without a framework."""
    return _driver


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch finds no CUDA device")
    return torch


@pytest.fixture
def jax() -> Iterator[Any]:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip(f"JAX runs on {jax.default_backend()!r}: its CUDA plugin is missing")
    # Else a product may have TF32's precision in one program and not in the other.
    with jax.default_matmul_precision("highest"):
        yield jax


@pytest.fixture
def ptx() -> bytes:
    return PTX.encode() + b"\0"
