"""The engine's CUDA side on a machine without CUDA: clear errors, and nothing breaks."""

from __future__ import annotations

import pytest

import dynaflow_xla as dfx

_engine = pytest.importorskip("dynaflow_xla.ffi._engine")


def test_what_is_missing_is_said() -> None:
    problem = _engine.cuda_problem()
    assert problem == "" or "CUDA" in problem


@pytest.mark.skipif(not _engine.cuda_problem(), reason="this machine has a CUDA device")
def test_without_cuda_everything_says_so() -> None:
    with pytest.raises(dfx.EngineError, match="CUDA"):
        _engine.CudaEngine()


def test_a_pjrt_step_refuses_null_pointers() -> None:
    program = _engine.Program(1, 0, 0, 0, 0, "p")
    with pytest.raises(RuntimeError, match="table is null"):
        _engine.add_pjrt_launch(program, 0, "s", 0, 1, 1, None, [], [], [], [], [], [], [])
