"""The text form of a plan: one line an item, read back exactly; and a table of its regions to look at."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.graph import PartitionedGraph
from dynaflow_xla.planning.plan import (
    Instruction,
    Launch,
    Merge,
    Plan,
    PlanBuffer,
    Record,
    Slice,
    Wait,
)

_KINDS: dict[str, type[Any]] = {
    "launch": Launch, "record": Record, "wait": Wait, "slice": Slice, "merge": Merge,
}  # fmt: skip


def _fields(item: Any) -> str:
    data = msgspec.to_builtins(item)
    data.pop("type", None)
    return " ".join(f"{key}={json.dumps(value)}" for key, value in data.items())


def plan_to_text(plan: Plan) -> str:
    """A header line, then notes, buffers and instructions in order."""
    head = {
        "version": plan.version, "graph": plan.graph, "strategy": plan.strategy,
        "lanes": plan.lanes, "events": plan.events, "scratch_bytes": plan.scratch_bytes,
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
            raise PlanError(f"line {number}: expected key=value, got {rest[position:]!r}")
        position += len(key) + 1
        try:
            data[key.strip()], position = decoder.raw_decode(rest, position)
        except json.JSONDecodeError as error:
            raise PlanError(f"line {number}: the value of {key.strip()!r} is malformed") from error
        while position < len(rest) and rest[position] == " ":
            position += 1
    return word, data


def plan_from_text(text: str) -> Plan:
    """Reads ``plan_to_text``'s form.

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
                raise PlanError(f"line {number}: unknown item {word!r}")
        except (msgspec.ValidationError, KeyError) as error:
            raise PlanError(f"line {number}: malformed {word}: {error}") from error
    if head is None:
        raise PlanError("a plan's text must begin with a line 'plan version=...'")
    document = {
        **head,
        "notes": notes,
        "buffers": [msgspec.to_builtins(b) for b in buffers],
        "instructions": [msgspec.to_builtins(i) for i in instructions],
    }
    return Plan.from_json(json.dumps(document))


def region_table(plan: Plan, pg: PartitionedGraph) -> list[str]:
    """A heading and a line for each region, for ``explain``."""
    lanes = {i.region: i for i in plan.instructions if isinstance(i, Launch)}
    rows = [("region", "lane", "resource", "est. us", "MB moved", "ops", "tags", "source")]
    for region in pg.regions:
        launch = lanes[region.id]
        rows.append(
            (
                region.name + (f" (replaced by {launch.replace})" if launch.replace else ""),
                "outer" if launch.lane < 0 else str(launch.lane),
                region.resource,
                f"{region.cost_ns / 1e3:.1f}",
                f"{region.bytes_moved / 1e6:.2f}",
                str(len(region.ops)),
                ",".join(sorted(region.tags)) or "-",
                str(region.source or "-"),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
