"""What a plan's decisions are worth: each is taken away, and the plan simulated again with its costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from dynaflow_xla.advice.costs import Given, Times
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.instructions import Launch, Record, Wait
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.recording import Decision, Recording
from dynaflow_xla.timelines.simulator import Costs, total_ns

Kind = Literal["lane", "wait", "move", "copies", "hand-overs", "start"]

_MOST_WAITS = 32
_MOST_MOVES = 16
_MOST_LANES = 8
_MOST_OTHERS = 4
"""Lanes to which a lane or a region is moved for trial, those with the least to do: each makes a plan."""

_LEAST = 0.005


@dataclass(frozen=True)
class Ablation:
    """One decision, or one cost, taken away.

    Attributes:
        kind: What it is.
        text: The same in words.
        gains_ns: How much longer the plan would take without it; below 0: it would be that much faster.
    """

    kind: Kind
    text: str
    gains_ns: int


def ablations(given: Given, times: Times) -> list[Ablation]:
    """What decides most comes first; what changes less than half a percent is left out."""
    plan, pg, costs = given.plan, given.pg, dict(enumerate(times.alone))
    total = round(times.simulated)
    found = [*_lanes(plan, pg, costs, total, times), *_waits(plan, pg, costs, total)]
    found += _moves(plan, pg, costs, total, times)
    for kind, text, cost in (
        ("copies", "all copies between lanes and of results", times.copies),
        ("hand-overs", "all hand-overs between lanes", times.hand_overs),
        ("start", "to start the lanes", times.start),
    ):
        found.append(Ablation(kind, text, -round(cost)))  # type: ignore[arg-type]
    kept = [one for one in found if abs(one.gains_ns) >= max(1.0, _LEAST * total)]
    return sorted(kept, key=lambda one: (-abs(one.gains_ns), one.text))


def _decisions(plan: Plan) -> list[Decision]:
    return [Decision(i.region, i.lane) for i in plan.launches]


def _total(pg: PartitionedGraph, plan: Plan, decisions: list[Decision], costs: Costs | None) -> int:
    """Of the plan of other decisions; lanes that are used first there have the cores that no lane has."""
    spare = plan.lane_width
    if plan.cores:
        spare = max(1, min(spare, plan.cores - plan.lane_cores))
    made = build_plan(
        pg, Recording(tuple(decisions), widths=plan.widths), lanes=plan.lanes, strategy_text=plan.strategy,
        cores=plan.cores, width=spare, counted=False,
    )  # fmt: skip
    return total_ns(made, pg, costs)


def _lanes(
    plan: Plan, pg: PartitionedGraph, costs: Costs | None, total: int, times: Times
) -> list[Ablation]:
    """Each lane without which the others would have to do its regions; of many those with most to do."""
    used = sorted(plan.lanes_used, key=_busy(plan, times))
    if len(used) < 2:
        return []
    found = []
    for lane in used[-_MOST_LANES:]:
        # To each of the other lanes as a whole: what the lane gains is what the best of these loses.
        ways = []
        for other in [n for n in used if n != lane][:_MOST_OTHERS]:
            moved = [
                Decision(d.region, other if d.lane == lane else d.lane) for d in _decisions(plan)
            ]
            ways.append(_total(pg, plan, moved, costs))
        names = [i.name for i in plan.launches if i.lane == lane]
        told = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        found.append(Ablation("lane", f"lane {lane} ({told})", min(ways) - total))
    return found


def _busy(plan: Plan, times: Times) -> Callable[[int], tuple[int, int]]:
    """By lane: what its regions take together, then its number."""
    busy = dict.fromkeys(range(plan.lanes), 0)
    for launch in plan.launches:
        if launch.lane >= 0:
            busy[launch.lane] += times.there[launch.region]
    return lambda lane: (busy[lane], lane)


def _waits(plan: Plan, pg: PartitionedGraph, costs: Costs | None, total: int) -> list[Ablation]:
    """Each wait that holds a lane up: what is lost by it. Without it the values would be wrong."""
    waits = [n for n, i in enumerate(plan.instructions) if isinstance(i, Wait)][:_MOST_WAITS]
    after: dict[int, str] = {}
    last: dict[int, str] = {}
    for instruction in plan.instructions:
        if isinstance(instruction, Launch):
            last[instruction.lane] = instruction.name
        elif isinstance(instruction, Record):
            after[instruction.event] = last.get(instruction.lane, "")
    found = []
    for number in waits:
        wait = plan.instructions[number]
        assert isinstance(wait, Wait)  # for the type checker
        rest = (*plan.instructions[:number], *plan.instructions[number + 1 :])
        without = total_ns(msgspec.structs.replace(plan, instructions=rest), pg, costs)
        reader = next(
            (
                i.name
                for i in plan.instructions[number:]
                if isinstance(i, Launch) and i.lane == wait.lane
            ),
            "the end",
        )
        text = f"the wait of lane {wait.lane} for {after.get(wait.event, '')!r}, before {reader!r}"
        found.append(Ablation("wait", text, without - total))
    return found


def _moves(
    plan: Plan, pg: PartitionedGraph, costs: Costs | None, total: int, times: Times
) -> list[Ablation]:
    """The longest regions, each on the lane where the plan would be shortest, if that is another one."""
    decisions = _decisions(plan)
    longest = sorted(
        (n for n, d in enumerate(decisions) if d.lane >= 0),
        key=lambda n: -times.alone[decisions[n].region],
    )[:_MOST_MOVES]
    lanes = sorted(range(plan.lanes), key=_busy(plan, times))
    found = []
    for number in longest:
        old = decisions[number]
        best, where = math.inf, -1
        for lane in [n for n in lanes if n != old.lane][:_MOST_OTHERS]:
            moved = [*decisions]
            moved[number] = Decision(old.region, lane)
            took = _total(pg, plan, moved, costs)
            if took < best:
                best, where = took, lane
        if best < total:
            name = pg.regions[old.region].name
            found.append(
                Ablation(
                    "move",
                    f"{name!r} on lane {old.lane} and not on lane {where}",
                    round(best - total),
                )
            )
    return found
