"""Calls that take long are reported: ``DYNAFLOW_XLA_WATCHDOG_S``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dynaflow_xla.errors import PlanError
from dynaflow_xla.ffi import _engine
from dynaflow_xla.planning.instructions import Instruction, Launch, Record, Wait

VARIABLE = "DYNAFLOW_XLA_WATCHDOG_S"

_seconds = 0.0


def ensure() -> None:
    """Has the engine report calls that take longer than the variable says; asked for once a program.

    Raises:
        PlanError: it is no number of seconds.
    """
    global _seconds
    wanted = _wanted()
    if wanted != _seconds:
        _engine.watch(wanted)
        _seconds = wanted


def watched() -> bool:
    """Whether calls are watched now."""
    return bool(_seconds)


def _wanted() -> float:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 1e9:  # nor what is no number
        raise PlanError(
            f"{VARIABLE} must be a number of seconds (0 or nothing: calls are not watched); got {text!r}"
        )
    return seconds


def name(
    program: Any, instructions: Sequence[Instruction], numbers: Mapping[int, int] | None = None
) -> None:
    """Tells a watched engine what a program's events and waits are, in the words of the plan.

    Args:
        program: The engine's, not finished yet.
        instructions: Those of its stage.
        numbers: The program's number of each event, if it has others than the plan.
    """
    ensure()
    if not _seconds:
        return
    last: dict[int, Launch] = {}
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, Launch):
            last[instruction.lane] = instruction
        elif isinstance(instruction, Record | Wait):
            event = instruction.event if numbers is None else numbers[instruction.event]
            lane = instruction.lane
            if isinstance(instruction, Record):
                made = last.get(lane)
                what = "the start" if made is None else f"region {made.name!r}"
                program.name_event(event, f"{what} on lane {lane}")
                continue
            following = (i for i in instructions[position:] if isinstance(i, Launch))
            mine = next((i for i in following if i.lane == lane), None)
            program.name_wait(lane, event, "the end" if mine is None else f"region {mine.name!r}")
