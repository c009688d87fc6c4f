"""One stage of a plan: what its instructions and buffers say of who makes, reads and hands on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dynaflow_xla.errors import PlanError
from dynaflow_xla.frontends.jax.capture.physical import from_physical, physical_spec, to_physical
from dynaflow_xla.frontends.jax.planned import Planned
from dynaflow_xla.frontends.jax.regions.functions import cut_rows
from dynaflow_xla.planning.instructions import Launch, Merge, PlanBuffer, Slice

Origin = tuple[int, int]
"""A region and a value that it makes: all buffers that one launch writes the same value to."""


@dataclass(frozen=True)
class StageResult:
    """A result of a stage's custom call.

    Attributes:
        buffers: Those of the plan that it stands for.
        value: The value that they hold.
        parts: A buffer for each part that lanes write, and where it begins in the result, in bytes.
        axis: Along which the parts lie.
    """

    buffers: tuple[int, ...]
    value: int
    parts: tuple[tuple[int, int], ...]
    axis: int = 0


class StageParts:
    """One stage of a plan: its launches, and where their values come from and go to.

    Attributes:
        arguments: Buffers that are read here and written elsewhere.
        inputs: Of these, and of what others are slices of: the operands of the custom call.
        outputs: The results of the custom call.
        origin: By buffer that is written here: the region and the value.
        lane_of: By region that is launched here.
    """

    def __init__(self, made: Planned, instructions: Sequence[Any]):
        self.captured, self.pg, self.functions = made.captured, made.pg, made.functions
        self.plan = plan = made.plan
        self.instructions = instructions
        self.compiler_options = made.options.compiler_options
        self.one_pass = made.options.one_pass
        self.launches = [i for i in instructions if isinstance(i, Launch)]
        self.lanes = tuple(sorted({launch.lane for launch in self.launches}))
        self.lane_of = {launch.region: launch.lane for launch in self.launches}
        self.width_of = {launch.lane: launch.width for launch in self.launches}
        self.slices = {i.out: i for i in plan.instructions if isinstance(i, Slice)}
        self.origin: dict[int, Origin] = {}
        arguments: dict[int, None] = {}
        for launch in self.launches:
            for number in launch.ins:
                if plan.buffers[number].kind in ("arg", "stage") and number not in self.origin:
                    arguments[number] = None
            for number in launch.outs:
                self.origin[number] = (launch.region, plan.buffers[number].value)
        self.arguments = tuple(arguments)
        self.inputs = tuple(dict.fromkeys(map(self.whole, arguments)))
        self.outputs = tuple(self._outputs())
        self.result_writes: list[tuple[int, int]] = []  # the plan's buffer, the engine's
        self.in_place: set[int] = set()  # buffers of results that lanes write without a copy
        self.shared: dict[int, int] = {}  # the same for scratch
        self.told: list[tuple[Any, ...]] = []  # memory that the engine was told of

    def buffer(self, number: int) -> PlanBuffer:
        """A buffer of the plan."""
        return self.plan.buffers[number]

    def spec(self, number: int) -> Any:
        """Shape and dtype of what lies in a buffer."""
        return physical_spec(self.captured.avals[self.buffer(number).value])

    def whole(self, number: int) -> int:
        """The argument that a buffer is a slice of, or itself."""
        cut = self.slices.get(number)
        return number if cut is None else cut.src

    def origin_of(self, number: int) -> Origin:
        """What makes a buffer's value here; for arguments the buffer itself."""
        return self.origin.get(number, (-1, number))

    def _outputs(self) -> list[StageResult]:
        """What leaves the stage: each value once, and what its lanes put together where it belongs."""
        merges = [
            i
            for i in self.plan.instructions
            if isinstance(i, Merge) and all(part in self.origin for part in i.srcs)
        ]
        parts = {part for merge in merges for part in merge.srcs}
        leaving: dict[Origin, list[int]] = {}
        for launch in self.launches:
            for number in launch.outs:
                if self.buffer(number).kind in ("result", "stage") and number not in parts:
                    leaving.setdefault(self.origin[number], []).append(number)
        made = [StageResult(tuple(bs), value, ((bs[0], 0),)) for (_, value), bs in leaving.items()]
        alike: dict[Any, list[Merge]] = {}
        for merge in merges:
            key = merge.axis, *(self.origin[part] for part in merge.srcs)
            alike.setdefault(key, []).append(merge)
        for first, *others in alike.values():
            at = tuple((part, self.buffer(part).offset) for part in first.srcs)
            outs = (first.out, *(merge.out for merge in others))
            made.append(StageResult(outs, self.buffer(first.out).value, at, first.axis))
        return made

    def results(self, launch: Launch, outs: Sequence[Any]) -> dict[int, Any]:
        """What a region's function gave, by buffer that the launch writes."""
        made = dict(zip(self.pg.regions[launch.region].outputs, outs, strict=True))
        return {number: made[self.buffer(number).value] for number in launch.outs}

    def left_alone(self, launch: Launch, value: int) -> int | None:
        """The buffer of a value that a launch makes for the outer program alone: no lane reads it."""
        of_value = [b for b in launch.outs if self.buffer(b).value == value]
        if len(of_value) != 1 or self.buffer(of_value[0]).kind not in ("result", "stage"):
            return None
        graph, ops = self.captured.graph, self.pg.regions[launch.region].ops
        if any(value in graph.ops[i].inputs for i in ops):
            return None
        return None if any(of_value[0] in other.ins for other in self.launches) else of_value[0]

    def unreachable(self, launch: Launch, number: int) -> PlanError:
        """The error for a read of what no instruction brings to where it is read."""
        kind = self.buffer(number).kind
        return PlanError(
            f"launch of {launch.name!r} on lane {launch.lane} reads buffer {number} ({kind}), which nothing "
            "before it brings there"
        )

    def reference(self, *args: Any) -> list[Any]:
        """The stage as plain traceable code, over arrays (keys as their words)."""
        avals = self.captured.avals
        held = {
            number: from_physical(x, avals[self.buffer(number).value])
            for number, x in zip(self.inputs, args, strict=True)
        }
        for number in self.arguments:
            if (cut := self.slices.get(number)) is not None:
                held[number] = cut_rows(held[cut.src], cut)
        for launch in self.launches:
            for number in launch.ins:
                if number not in held:
                    raise self.unreachable(launch, number)
            outs = self.functions[launch.region](*[held[number] for number in launch.ins])
            held.update(self.results(launch, outs))
        made = []
        for output in self.outputs:
            xs = [held[part] for part, _ in output.parts]
            x = xs[0] if len(xs) == 1 else jax.lax.concatenate(xs, output.axis)
            made.append(to_physical(x, avals[output.value]))
        return made
