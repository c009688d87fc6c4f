"""Orders in which a plan may run, drawn at random: of its lanes' instructions, or of its regions anew.

An order of the first kind keeps what the plan keeps: the order of each lane, Record before Wait, outer
regions as barriers. Of two launches that nothing orders, either may come first; so for each region there is
an order in which it runs *as early as it may*: after what must precede it, before all else. Whatever a region
reads or overwrites without an order that the plan keeps goes wrong in such an order, not by chance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.graph import ORDERED
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.instructions import Instruction, Launch, Merge, Record, Slice, Wait
from dynaflow_xla.planning.order import HappensBefore
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.recording import Decision, Recording
from dynaflow_xla.planning.validate import validate


class Deadlock(PlanError):
    """The lanes of a plan cannot go on.

    Attributes:
        launch: What would be next on the first lane that waits; None if nothing would.
    """

    def __init__(self, text: str, launch: Launch | None) -> None:
        super().__init__(text)
        self.launch = launch


def interleaved(plan: Plan, draw: random.Random, first: int | None = None) -> Plan:
    """The plan with its instructions in another order that it allows.

    Args:
        plan: A plan.
        draw: Chooses.
        first: A region that runs as early as it may.

    Raises:
        Deadlock: no lane can go on.
    """
    wanted = _needed(plan, first)
    order: list[Instruction] = [i for i in plan.instructions if isinstance(i, Slice)]
    recorded: set[int] = set()
    for numbers, barrier in _stages(plan.instructions):
        order += _stage(plan.instructions, numbers, wanted, recorded, draw)
        if barrier is not None:
            order.append(plan.instructions[barrier])
    order += [i for i in plan.instructions if isinstance(i, Merge)]
    return msgspec.structs.replace(plan, instructions=tuple(order))


def _needed(plan: Plan, region: int | None) -> set[int]:
    """Numbers of the instructions that come before a region's in every run, and its own."""
    for number, instruction in enumerate(plan.instructions):
        if isinstance(instruction, Launch) and instruction.region == region:
            before = HappensBefore(plan.instructions)
            return {n for n in range(len(plan.instructions)) if before(n, number)} | {number}
    return set()


def _stages(instructions: Sequence[Instruction]) -> Iterator[tuple[list[int], int | None]]:
    """Numbers of what runs between two outer launches, and of the outer launch behind it."""
    found: list[int] = []
    for number, instruction in enumerate(instructions):
        if isinstance(instruction, Launch) and instruction.lane < 0:
            yield found, number
            found = []
        elif isinstance(instruction, Launch | Record | Wait):
            found.append(number)
    yield found, None


def _stage(
    instructions: Sequence[Instruction],
    numbers: Sequence[int],
    wanted: set[int],
    recorded: set[int],
    draw: random.Random,
) -> list[Instruction]:
    lanes: dict[int, list[int]] = {}
    for number in numbers:
        lanes.setdefault(instructions[number].lane, []).append(number)  # type: ignore[union-attr]
    made: list[Instruction] = []
    favourite = -1
    while any(lanes.values()):
        able = [
            lane
            for lane, queue in lanes.items()
            if queue and not _blocked(instructions[queue[0]], recorded)
        ]
        if not able:
            raise _deadlock(instructions, lanes)
        needed = [lane for lane in able if lanes[lane][0] in wanted]
        # One lane far ahead of the others shows more than all of them in step.
        if favourite not in able or draw.random() < 0.15:
            favourite = draw.choice(able)
        lane = needed[0] if needed else favourite
        instruction = instructions[lanes[lane].pop(0)]
        if isinstance(instruction, Record):
            recorded.add(instruction.event)
        made.append(instruction)
    return made


def _blocked(instruction: Instruction, recorded: set[int]) -> bool:
    return isinstance(instruction, Wait) and instruction.event not in recorded


def _deadlock(instructions: Sequence[Instruction], lanes: dict[int, list[int]]) -> Deadlock:
    stuck = {lane: queue for lane, queue in lanes.items() if queue}
    waits = [
        f"lane {lane} for event {instructions[queue[0]].event}"  # type: ignore[union-attr]
        for lane, queue in stuck.items()
    ]
    queue = next(iter(stuck.values()))
    following = (i for n in queue if isinstance(i := instructions[n], Launch))
    return Deadlock(f"nothing can run: {', '.join(waits)} wait for ever", next(following, None))


def replanned(plan: Plan, pg: PartitionedGraph, draw: random.Random) -> Plan:
    """Another plan of the same regions, proved: lanes and order drawn at random.

    What a strategy may not move stays: outer regions, and regions that keep their order, follow each other as
    in the plan.
    """
    original = {i.region: i for i in plan.launches}
    fixed = [
        region
        for region in original
        if pg.regions[region].outer or ORDERED in pg.regions[region].tags
    ]
    before: dict[int, set[int]] = {region: set(preds) for region, preds in _preds(pg, original)}
    for earlier, later in zip(fixed, fixed[1:], strict=False):
        before[later].add(earlier)
    wide = any(i.lane < 0 and not pg.regions[i.region].outer for i in original.values())
    decisions = []
    done: set[int] = set()
    while len(done) < len(original):
        ready = [r for r in original if r not in done and before[r] <= done]
        region = draw.choice(ready)
        lane = draw.randrange(-1 if wide else 0, max(1, plan.lanes))
        lane = -1 if pg.regions[region].outer else lane
        decisions.append(Decision(region, lane))
        done.add(region)
    made = build_plan(
        pg,
        Recording(tuple(decisions), widths=plan.widths),
        lanes=plan.lanes,
        strategy_text="a random legal order",
        cores=plan.cores,
        width=plan.lane_width,
    )
    validate(made, pg)
    named = tuple(
        msgspec.structs.replace(i, replace=original[i.region].replace)
        if isinstance(i, Launch)
        else i
        for i in made.instructions
    )
    return msgspec.structs.replace(made, instructions=named)


def _preds(
    pg: PartitionedGraph, launched: dict[int, Launch]
) -> Iterator[tuple[int, Sequence[int]]]:
    preds = pg.predecessors()
    for region in launched:
        yield region, [p for p in preds[region] if p in launched]


def crossing(plan: Plan) -> list[int]:
    """The regions that read or write memory which other lanes use."""
    shared = {b.id for b in plan.buffers if b.kind == "scratch"}
    launches = [i for i in plan.launches if i.lane >= 0]
    return [i.region for i in launches if shared.intersection((*i.ins, *i.outs))]
