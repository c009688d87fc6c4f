"""The text form of a plan: one line an item, read back exactly."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from dynaflow_xla.errors import PlanError
from dynaflow_xla.planning.instructions import (
    Instruction,
    Launch,
    Merge,
    PlanBuffer,
    Record,
    Slice,
    Wait,
)

_KINDS: dict[str, type[Any]] = {
    "launch": Launch, "record": Record, "wait": Wait, "slice": Slice, "merge": Merge,
}  # fmt: skip


_SHOWN = 80
"""Characters of a malformed line that its error repeats."""


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def _fields(item: Any) -> str:
    data = msgspec.to_builtins(item)
    data.pop("type", None)
    return " ".join(f"{key}={json.dumps(value)}" for key, value in data.items())


def written(plan: Any) -> str:
    """A header line, then notes, buffers and instructions in order."""
    head = {
        "version": plan.version, "graph": plan.graph, "strategy": plan.strategy,
        "lanes": plan.lanes, "cores": plan.cores, "events": plan.events, "scratch_bytes": plan.scratch_bytes,
        "copied_bytes": plan.copied_bytes,
    }  # fmt: skip
    lines = ["plan " + " ".join(f"{key}={json.dumps(value)}" for key, value in head.items())]
    lines += [f"note text={json.dumps(note)}" for note in plan.notes]
    lines += [f"buffer {_fields(buffer)}" for buffer in plan.buffers]
    for instruction in plan.instructions:
        lines.append(f"{type(instruction).__name__.lower()} {_fields(instruction)}")
    return "\n".join(lines) + "\n"


def _parse(line: str, number: int) -> tuple[str, dict[str, Any]]:
    word, _, rest = line.partition(" ")
    decoder = json.JSONDecoder()
    data: dict[str, Any] = {}
    position = 0
    while position < len(rest):
        key, separator, _ = rest[position:].partition("=")
        if not separator:
            raise PlanError(f"line {number}: expected key=value, got {_shown(rest[position:])}")
        position += len(key) + 1
        try:
            data[key.strip()], position = decoder.raw_decode(rest, position)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"line {number}: the value of {key.strip()!r} is malformed") from error
        while position < len(rest) and rest[position] == " ":
            position += 1
    return word, data


def read(text: str) -> dict[str, Any]:
    """The JSON form of a plan, from the text that ``written`` makes.

    Raises:
        PlanError: with the line number.
    """
    head: dict[str, Any] | None = None
    notes: list[str] = []
    buffers: list[PlanBuffer] = []
    instructions: list[Instruction] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        word, data = _parse(line.strip(), number)
        try:
            if word == "plan":
                head = data
            elif word == "note":
                notes.append(str(data["text"]))
            elif word == "buffer":
                buffers.append(msgspec.convert(data, PlanBuffer))
            elif word in _KINDS:
                instructions.append(msgspec.convert({**data, "type": word}, _KINDS[word]))
            else:
                raise PlanError(f"line {number}: unknown item {_shown(word)}")
        except (msgspec.ValidationError, KeyError) as error:
            raise PlanError(f"line {number}: malformed {word}: {error}") from error
    if head is None:
        raise PlanError("a plan's text must begin with a line 'plan version=...'")
    return {
        **head,
        "notes": notes,
        "buffers": [msgspec.to_builtins(b) for b in buffers],
        "instructions": [msgspec.to_builtins(i) for i in instructions],
    }
