"""The order of regions that a plan asks of one XLA program."""

from __future__ import annotations

from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.instructions import Launch, Record, Wait
from dynaflow_xla.planning.plan import Plan


class RegionOrder:
    """The order of regions that a plan asks of one XLA program.

    Lane order, Record before Wait, data. An outer region has no lane and is no barrier here: data
    and effects alone order it, so that communication can run beside what does not need it.

    Args:
        pg: The regions.
        plan: The plan.
        chained: Whether each region that communicates waits for the one before.

    Attributes:
        direct: Region id -> regions that must be over before it starts, by the plan's own edges.
        data: Region id -> regions that write the buffers that it reads, or whose effects come first.
    """

    def __init__(self, pg: PartitionedGraph, plan: Plan, *, chained: bool = False):
        self.chained = chained
        self.direct: dict[int, tuple[int, ...]] = {}
        writer = {b: i.region for i in plan.launches for b in i.outs}
        reads = {i.region: {writer[b] for b in i.ins if b in writer} for i in plan.launches}
        self.data = [
            sorted(reads.get(region, set()) | effects)
            for region, effects in enumerate(_effects(pg))
        ]
        self._before: dict[int, int] = {}
        self.launches: list[Launch] = []
        last: dict[int, int] = {}
        recorded: dict[int, int] = {}
        waited: dict[int, list[int]] = {}
        talked: list[int] = []
        for instruction in plan.instructions:
            if isinstance(instruction, Record):
                if instruction.lane in last:
                    recorded[instruction.event] = last[instruction.lane]
            elif isinstance(instruction, Wait):
                if instruction.event in recorded:
                    waited.setdefault(instruction.lane, []).append(recorded[instruction.event])
            elif isinstance(instruction, Launch):
                preds: list[int] = []
                if instruction.lane >= 0:
                    preds = waited.pop(instruction.lane, [])
                    if instruction.lane in last:
                        preds = [last[instruction.lane], *preds]
                    last[instruction.lane] = instruction.region
                if chained and pg.regions[instruction.region].resource == "network":
                    preds = [*preds, *talked]
                    talked = [instruction.region]
                self._add(instruction, preds)

    def _add(self, launch: Launch, preds: list[int]) -> None:
        region = launch.region
        self.launches.append(launch)
        self.direct[region] = tuple(dict.fromkeys(p for p in preds if p != region))
        bits = 0
        for pred in (*self.direct[region], *self.data[region]):
            bits |= self._before.get(pred, 0) | 1 << pred
        self._before[region] = bits

    def before(self, first: int, second: int) -> bool:
        """Whether region ``first`` is over before region ``second`` starts."""
        return bool(self._before[second] >> first & 1)


def _effects(pg: PartitionedGraph) -> list[set[int]]:
    """For each region those that are before it for their effects alone."""
    made = pg.producer_region()
    return [
        before - {made[v] for v in region.inputs if v in made}
        for region, before in zip(pg.regions, pg.predecessors(), strict=True)
    ]
