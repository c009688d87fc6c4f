"""Discrete-event simulation of a plan with estimated costs."""

from __future__ import annotations

from dynaflow_xla.ir import PartitionedGraph
from dynaflow_xla.plan import Launch, Plan, Record, Wait
from dynaflow_xla.timeline import Span, Timeline

BYTES_PER_NS = 8.0


def simulate(plan: Plan, pg: PartitionedGraph, *, handoff_ns: float = 2_000.0) -> Timeline:
    """Predicts when each region runs.

    Args:
        plan: A validated plan.
        pg: Its graph; region costs are the estimates.
        handoff_ns: Time from a record to the end of a wait for it.
    """
    clock = [0.0] * plan.lanes
    recorded: dict[int, float] = {}
    spans = []
    for instruction in plan.instructions:
        if isinstance(instruction, Record):
            recorded[instruction.event] = clock[instruction.lane]
        elif isinstance(instruction, Wait):
            begin = clock[instruction.lane]
            end = max(begin, recorded[instruction.event] + handoff_ns)
            clock[instruction.lane] = end
            label = f"wait for event {instruction.event}"
            spans.append(Span(instruction.lane, label, "wait", int(begin), int(end)))
        elif isinstance(instruction, Launch):
            cost = pg.regions[instruction.region].cost_ns
            lane = instruction.lane
            if lane < 0:
                clock = [max(clock) + cost] * plan.lanes
                continue
            copied = sum(
                plan.buffers[b].bytes for b in instruction.ins if plan.buffers[b].kind == "scratch"
            )
            copied += sum(
                plan.buffers[b].bytes
                for b in instruction.outs
                if plan.buffers[b].kind in ("scratch", "result", "stage")
            )
            begin, end = clock[lane], clock[lane] + cost
            spans.append(
                Span(lane, instruction.name, "launch", int(begin), int(end), instruction.region)
            )
            if copied:
                spans.append(Span(lane, "copy", "copy", int(end), int(end + copied / BYTES_PER_NS)))
            clock[lane] = end + copied / BYTES_PER_NS
    return Timeline(
        "predicted", tuple(spans), plan.lanes, int(max(clock, default=0.0)), {"name": plan.graph}
    )
