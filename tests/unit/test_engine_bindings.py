"""The engine as Python sees it: programs, what they refuse, and the numbers that both sides use."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from dynaflow_xla import machine
from dynaflow_xla.errors import EngineError
from dynaflow_xla.timelines import measured

_engine = pytest.importorskip("dynaflow_xla.ffi._engine")


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


def test_a_program_says_what_its_lanes_do() -> None:
    program = _engine.Program(2, 1, 1, 1, 64, "p")
    source, target = program.add_buffer("arg", 0, 0, 4), program.add_buffer("result", 0, 0, 4)
    program.add_c_launch(0, "nothing", 0, 0, [source], [target])
    program.add_record(0, 0)
    program.add_wait(1, 0)
    program.add_python_launch(1, "mine", print, [], [])
    assert repr(program).splitlines()[1:] == [
        "  lane 0: launch 'nothing' (C function), record 0",
        "  lane 1: wait 0, launch 'mine' (Python callable)",
    ]


def test_what_cannot_be_in_a_program_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="counts must not be negative, and lanes at most 256"):
        _engine.Program(257, 0, 0, 0, 0, "p")
    program = _engine.Program(1, 0, 0, 0, 0, "p")
    with pytest.raises(ValueError, match="p: lane 1 of 1 lanes"):
        program.add_record(1, 0)
    program.finish()
    for change in (
        lambda: program.add_buffer("scratch", -1, 0, 0),
        lambda: program.add_python_launch(0, "late", print, [], []),
        program.finish,
    ):
        with pytest.raises(ValueError, match="finished and can no longer change"):
            change()
    assert program.run([], []) == []


def test_python_and_the_engine_use_the_same_numbers() -> None:
    assert machine.ALIGNMENT == _engine.ALIGNMENT
    assert (measured.TRACE_WAIT, measured.TRACE_COPY) == (_engine.TRACE_WAIT, _engine.TRACE_COPY)


class Failing:
    """A step that the engine may run again; it raises the first time."""

    repeatable = True

    def __init__(self, error: Exception) -> None:
        self.calls, self.error = 0, error

    def __call__(self, _: Any) -> None:
        self.calls += 1
        if self.calls == 1:
            raise self.error


def _failing(lane: int) -> tuple[Any, Failing]:
    step = Failing(ValueError("no memory"))
    program = _engine.Program(2, 0, 0, 0, 0, "failing")
    program.add_python_launch(lane, "step", step, [], [])
    program.finish()  # and no other lane: threads stand in for each other's lanes
    return program, step


def _nothing_comes_later() -> None:
    for _ in range(1000):  # between bytecodes the main thread raises what was put off
        time.sleep(0)


def test_only_the_main_threads_errors_are_a_signal_handlers() -> None:
    """Of a step on another thread they are its own: it fails once, and nothing is raised elsewhere."""
    program, step = _failing(lane=1)
    with pytest.raises(EngineError, match="ValueError: no memory"):
        program.run([], [])
    _nothing_comes_later()
    assert step.calls == 1

    program, step = _failing(lane=0)
    told: list[str] = []

    def call() -> None:
        try:
            program.run([], [])
        except EngineError as error:
            told.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    _nothing_comes_later()
    assert step.calls == 1 and "ValueError: no memory" in told[0]

    program, step = _failing(lane=0)
    with pytest.raises(ValueError, match="^no memory$"):
        program.run([], [])
        _nothing_comes_later()
    assert step.calls == 2
