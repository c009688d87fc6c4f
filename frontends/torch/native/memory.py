"""What a plan's buffers hold in a call of PyTorch's own operators.

Tensors are passed by reference, so the buffers of a value (of its lane, of another one, of the outer
program) are one place of the call's environment, named by the value. What the plan says is followed:
which argument and which rows of it a buffer is, where the parts of a result lie, which value is
which result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynaflow_xla.errors import PlanError
from dynaflow_xla.frontends.torch.capture.captured import (
    Captured,
    JoinedLayout,
    overlapping,
    place,
    rows_of,
)
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.instructions import Launch, Merge, Slice
from dynaflow_xla.planning.plan import Plan

Environment = list[Any]


@dataclass(frozen=True)
class MergedResult:
    """A result that the nano-batches write, each its part.

    Attributes:
        value: Its id.
        axis: Along which the parts lie.
        layout: How it lies in memory.
        parts: For each part its value id, the place of the view in the environment, start and rows.
    """

    value: int
    axis: int
    layout: JoinedLayout
    parts: tuple[tuple[int, int, int, int], ...]


class Memory:
    """The places of a plan's buffers.

    Attributes:
        placed: Results that are put together in place.
        results: For each result its value, or ("const", object).
        written: (input value, value): what an argument holds at the end.

    Args:
        captured: The graph.
        plan: A plan of it.
    """

    def __init__(self, captured: Captured, plan: Plan) -> None:
        graph, buffers = captured.graph, plan.buffers
        self._slots = len(graph.values)
        # What nobody reads has no buffer, and may be a result as it is.
        self._inputs = list(graph.inputs)
        for b in buffers:
            if b.kind == "arg" and b.offset < 0:
                self._inputs[b.index] = b.value
        self._runs = _runs(self._inputs)
        self._rows = [
            (
                buffers[i.out].value,
                buffers[i.src].index,
                i,
                *captured.copied.get(buffers[i.out].value, (1, None)),
            )
            for i in plan.instructions
            if isinstance(i, Slice)
        ]
        self.placed = tuple(
            self._place(captured, plan, i) for i in plan.instructions if isinstance(i, Merge)
        )
        self._nothing: Environment = [None] * self._slots
        result = {b.index: b.value for b in buffers if b.kind == "result" and b.offset < 0}
        held = {value: result.get(n, value) for n, value in enumerate(graph.outputs)}
        self.results = [held[o] if isinstance(o, int) else o for o in captured.outputs]
        self.written = [(into, held[value]) for into, value in captured.epilogue]

    def _place(self, captured: Captured, plan: Plan, merge: Merge) -> MergedResult:
        whole = plan.buffers[merge.out]
        parts, start = [], 0
        for number in merge.srcs:
            part = plan.buffers[number]
            rows = part.shape[merge.axis]
            parts.append((part.value, self._slots, start, rows))
            self._slots += 1
            start += rows
        return MergedResult(whole.value, merge.axis, captured.joined[whole.value], tuple(parts))

    def environment(self, inputs: Sequence[Any]) -> Environment:
        """What a call starts with: arguments, rows of them, and results to be written in place.

        A list of inputs is emptied.
        """
        assert len(inputs) == len(self._inputs)
        env = self._nothing.copy()
        # A slice at a time: there are hundreds of parameters.
        for value, first, after in self._runs:
            env[value : value + after - first] = inputs[first:after]
        for value, source, view, runs, empty in self._rows:
            made = rows_of(inputs[source], view.axis, view.start, view.stop - view.start, runs)
            if empty is not None:
                copy = empty()
                slot = rows_of(copy, view.axis, 0, copy.shape[view.axis], runs)
                place(slot, made, overlapping(slot))
                made = copy
            env[value] = made
        for placed in self.placed:
            made = env[placed.value] = placed.layout.empty()
            for _, slot, start, rows in placed.parts:
                env[slot] = rows_of(made, placed.axis, start, rows, placed.layout.runs)
        if isinstance(inputs, list):
            inputs.clear()  # the environment owns them now
        return env

    def finish(self, env: Environment) -> None:
        """Puts together what could not be written in place."""
        for placed in self.placed:
            whole = env[placed.value]
            parts = [env[slot] for _, slot, _, _ in placed.parts]
            if all(part.dtype is whole.dtype for part in parts):
                continue
            made = torch.empty_like(whole, dtype=parts[0].dtype)
            for part, (_, _, start, rows) in zip(parts, placed.parts, strict=True):
                rows_of(made, placed.axis, start, rows, placed.layout.runs).copy_(part)
            env[placed.value] = made


def results_of(memory: Memory, env: Environment) -> list[Any]:
    """Ends a call: puts together what is in parts, writes what inputs are to hold, and gives the results."""
    memory.finish(env)
    for into, value in memory.written:
        env[into].copy_(env[value])
    return [env[out] if isinstance(out, int) else out[1] for out in memory.results]


def _runs(values: Sequence[int]) -> list[tuple[int, int, int]]:
    """Where values count up by one: the first value, its position, and the position after the last."""
    runs: list[tuple[int, int, int]] = []
    for position, value in enumerate(values):
        if runs and value == runs[-1][0] + position - runs[-1][1]:
            runs[-1] = (*runs[-1][:2], position + 1)
        else:
            runs.append((value, position, position + 1))
    return runs


class Flow:
    """Who reads what somebody else made, by the buffers of the launches.

    Attributes:
        read_as: Region id -> input -> value that its launch reads for it, where that is another one.

    Args:
        plan: A plan.
        pg: Its regions.
        groups: Regions that run as one stretch.
        written: Arguments that are written at the end.

    Raises:
        PlanError: a launch reads a buffer of its lane alone which nothing on that lane writes.
    """

    def __init__(
        self, plan: Plan, pg: PartitionedGraph, groups: Sequence[Sequence[int]], written: set[int]
    ) -> None:
        self._buffers = plan.buffers
        self._kept = {b.value for b in plan.buffers if b.kind == "result"} | written
        self._kept.update(pg.graph.outputs)  # an argument may be a result as it is
        self._launches = {i.region: i for i in plan.instructions if isinstance(i, Launch)}
        self._home = {region: number for number, group in enumerate(groups) for region in group}
        self._readers: dict[int, set[int]] = {}
        self.read_as: dict[int, dict[int, int]] = {}
        on_lane = {(b, i.lane) for i in self._launches.values() for b in i.outs}
        for region, launch in self._launches.items():
            for number in launch.ins:
                buffer = plan.buffers[number]
                if buffer.kind == "local" and (number, launch.lane) not in on_lane:
                    raise PlanError(
                        f"region {launch.name!r} on lane {launch.lane} reads buffer {number}, which "
                        "nothing on this lane writes"
                    )
                self._readers.setdefault(buffer.value, set()).add(self._home[region])
            wanted = pg.regions[region].inputs
            if (read := self._reads(region)) != wanted:
                pairs = zip(wanted, read, strict=True)
                self.read_as[region] = {a: b for a, b in pairs if a != b}

    def _reads(self, region: int) -> tuple[int, ...]:
        return tuple(self._buffers[b].value for b in self._launches[region].ins)

    def _makes(self, group: Sequence[int]) -> set[int]:
        return {self._buffers[b].value for r in group for b in self._launches[r].outs}

    def exported(self, group: Sequence[int]) -> set[int]:
        """What a group makes and somebody else reads."""
        me = {self._home[group[0]]}
        return {v for v in self._makes(group) if v in self._kept or self._readers.get(v, me) - me}

    def taken(self, group: Sequence[int]) -> set[int]:
        """What only this group reads, of others."""
        me = {self._home[group[0]]}
        reads = {v for r in group for v in self._reads(r)} - self._makes(group)
        return {v for v in reads if v not in self._kept and self._readers[v] == me}
