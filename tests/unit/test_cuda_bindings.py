"""The engine's CUDA side on a machine without CUDA: clear errors, and nothing breaks."""

from __future__ import annotations

import pytest

_engine = pytest.importorskip("dynaflow_xla.ffi._engine")


def test_availability_agrees() -> None:
    problem = _engine.cuda_problem()
    assert _engine.cuda_available() == (problem == "")
    if problem:
        assert "CUDA" in problem


@pytest.mark.skipif(_engine.cuda_available(), reason="this machine has a CUDA device")
def test_without_cuda_everything_says_so() -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        _engine.cuda_device_count()
    with pytest.raises(RuntimeError, match="CUDA"):
        _engine.CudaEngine()


def test_a_pjrt_step_refuses_null_pointers() -> None:
    program = _engine.Program(1, 0, 0, 0, 0, "p")
    with pytest.raises(RuntimeError, match="table is null"):
        _engine.add_pjrt_launch(program, 0, "s", 0, 1, 1, None, [], [], [], [], [], [], [])


def test_a_call_with_other_lists_than_the_programs_is_refused() -> None:
    """What is missing would be read from beyond the list's end."""
    program = _engine.Program(1, 0, 2, 1, 0, "p")
    with pytest.raises(ValueError, match=r"finish\(\) before run"):
        program.run([0, 0], [0])
    program.finish()
    for args, results in ([], [0]), ([0], [0]), ([0, 0, 0], [0]), ([0, 0], []), ([0, 0], [0, 0]):
        with pytest.raises(
            ValueError,
            match=f"program 'p' takes 2 arguments and 1 results; got {len(args)} and {len(results)}",
        ):
            program.run(args, results)
    assert program.run([0, 0], [0]) == []
