"""From a recording to a plan: buffers, events, scratch."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dynaflow_xla.ir.graph import Join
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.instructions import (
    Instruction,
    Launch,
    Merge,
    PlanBuffer,
    Record,
    Slice,
    Wait,
)
from dynaflow_xla.planning.memory import Request, assign_offsets
from dynaflow_xla.planning.order import HappensBefore
from dynaflow_xla.planning.plan import PLAN_VERSION, Plan
from dynaflow_xla.planning.recording import Recording
from dynaflow_xla.watching import telling


@dataclass
class _Place:
    lane: int
    stage: int
    order: int


def build_plan(
    pg: PartitionedGraph,
    recording: Recording,
    *,
    lanes: int,
    strategy_text: str,
    cores: int = 0,
    width: int = 1,
    counted: bool = True,
) -> Plan:
    """Builds the plan of a recording.

    A value gets a scratch buffer if another lane reads it in the same stage, a stage buffer if an
    outer region or a later stage reads it, a result buffer for each place among the outputs, a
    local buffer if its own lane reads it. Waits that earlier waits imply are left out. Views of
    arguments and parts of results are buffers with an offset, declared by Slice and Merge.

    Args:
        pg: The regions.
        recording: What was decided.
        lanes: Number of lanes.
        strategy_text: Text form of the strategy.
        cores: What wide launches have; 0: there are none.
        width: Cores of a lane of which the recording says nothing else.
        counted: False for a plan that is only looked at.
    """
    graph = pg.graph
    places = _places(pg, recording)
    waits, recorded = _events(pg, recording, places, lanes)
    buffers = _Buffers(pg, places)
    instructions: list[Instruction] = [*buffers.slices()]
    for decision in recording.decisions:
        region = pg.regions[decision.region]
        instructions += [Wait(recorded[p], decision.lane) for p in waits.get(region.id, ())]
        replace = ""
        if decision.replace is not None:
            replace = getattr(decision.replace, "__qualname__", type(decision.replace).__name__)
        instructions.append(
            Launch(
                region.id,
                region.name,
                decision.lane,
                region.nano,
                tuple(buffers.read_by(v, region.id) for v in region.inputs),
                tuple(b for v in region.outputs for b in buffers.written_for(v)),
                replace,
                recording.widths.get(decision.lane, width) if decision.lane >= 0 else 0,
            )
        )
        if region.id in recorded:
            instructions.append(Record(recorded[region.id], decision.lane))
    instructions += buffers.merges()
    used = [b for b in buffers.all if b.kind == "scratch"]
    accesses: dict[int, list[int]] = {b.id: [] for b in used}
    for number, instruction in enumerate(instructions):
        if isinstance(instruction, Launch):
            for buffer in (*instruction.ins, *instruction.outs):
                if buffer in accesses:
                    accesses[buffer].append(number)
    offsets, peak = assign_offsets(
        [Request(b.id, b.bytes, tuple(accesses[b.id])) for b in used], HappensBefore(instructions)
    )
    final = tuple(
        b if b.kind != "scratch" else msgspec.structs.replace(b, offset=offsets[b.id])
        for b in buffers.all
    )
    # What lanes hand over to the caller or to a later stage; outer regions write where they should.
    results = {b.value for b in final if b.kind == "result"}
    on_lanes = {v for d in recording.decisions if d.lane >= 0 for v in pg.regions[d.region].outputs}
    copied = sum(
        b.bytes
        for b in final
        if b.value in on_lanes
        and (
            (b.kind == "result" and b.id not in buffers.joined)
            or (b.kind == "stage" and b.value not in results)
        )
    )
    copied += sum(b.bytes * (1 + len(buffers.reader_lanes[b.value])) for b in used)
    notes = list(recording.notes)
    made = pg.producer_region()
    names = dict(zip(graph.inputs, graph.input_names, strict=False))
    passed = [names.get(v, str(v)) for v in graph.outputs if v in graph.inputs and v not in made]
    if passed:
        notes.append(
            f"returned as they are, or kept for a backward: inputs {', '.join(dict.fromkeys(passed))}; no "
            "lane touches them"
        )
    if counted:
        telling.count("plans")
        telling.told(
            "plan", f"{graph.name}: {len(pg.regions)} regions on {lanes} lanes by {strategy_text}",
            function=graph.name, strategy=strategy_text, regions=len(pg.regions), lanes=lanes,
            events=len(recorded), scratch_bytes=peak, copied_bytes=copied,
        )  # fmt: skip
    return Plan(
        version=PLAN_VERSION,
        graph=graph.name,
        strategy=strategy_text,
        lanes=lanes,
        events=len(recorded),
        buffers=final,
        instructions=tuple(instructions),
        scratch_bytes=peak,
        copied_bytes=copied,
        notes=tuple(notes),
        cores=cores,
    )


def _places(pg: PartitionedGraph, recording: Recording) -> dict[int, _Place]:
    places = {}
    stage = 0
    for order, decision in enumerate(recording.decisions):
        if decision.lane < 0:
            places[decision.region] = _Place(-1, stage, order)
            stage += 1
        else:
            places[decision.region] = _Place(decision.lane, stage, order)
    return places


def _events(
    pg: PartitionedGraph, recording: Recording, places: dict[int, _Place], lanes: int
) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Waits by region (producing regions), and event number by recorded region."""
    preds = pg.predecessors()
    known = [[-1] * lanes for _ in range(lanes)]  # known[a][b]: last order on b that a has seen end
    after: dict[int, list[int]] = {}
    waits: dict[int, list[int]] = {}
    recorded: dict[int, int] = {}
    for decision in recording.decisions:
        me = places[decision.region]
        if me.lane < 0:
            for row in known:
                row[:] = [me.order] * lanes
            continue
        mine = known[me.lane]
        # Later producers first: waiting for one of them may imply the others.
        for pred in sorted(preds[decision.region], key=lambda p: -places[p].order):
            other = places[pred]
            if other.lane in (-1, me.lane) or mine[other.lane] >= other.order:
                continue
            waits.setdefault(decision.region, []).append(pred)
            recorded.setdefault(pred, len(recorded))
            for lane, seen in enumerate(after[pred]):
                mine[lane] = max(mine[lane], seen)
        mine[me.lane] = me.order
        after[decision.region] = list(mine)
    return waits, recorded


class _Buffers:
    def __init__(self, pg: PartitionedGraph, places: dict[int, _Place]):
        self.pg = pg
        self.places = places
        self.made = pg.producer_region()
        self.all: list[PlanBuffer] = []
        self.reader_lanes: dict[int, set[int]] = {}
        self._by_kind: dict[tuple[str, int], int] = {}
        self._written: dict[int, list[int]] = {}
        self.joined: dict[int, Join] = {}  # by whole result buffer
        graph = pg.graph
        used = {v for region in pg.regions for v in region.inputs}
        used |= {graph.inputs[view.input] for view in graph.views if view.value in used}
        for index, value in enumerate(graph.inputs):
            if value in used:
                self._add("arg", value, index)
        for view in graph.views:
            if view.value in used:
                self._add("arg", view.value, view.input, view.offset)
        joins = {join.value: join for join in graph.joins}
        for index, value in enumerate(graph.outputs):
            if value in joins:
                self.joined[len(self.all)] = joins[value]
                self._add("result", value, index)
        readers: dict[int, list[int]] = {}
        for region in pg.regions:
            for value in region.inputs:
                readers.setdefault(value, []).append(region.id)
        for region in pg.regions:
            me = places[region.id]
            for value in region.outputs:
                there = [places[r] for r in readers.get(value, ())]
                inner = [p for p in there if p.stage == me.stage and p.lane >= 0 and me.lane >= 0]
                crossing = {p.lane for p in inner if p.lane != me.lane}
                self.reader_lanes[value] = crossing
                if any(p.lane == me.lane for p in inner):
                    self._add("local", value)
                if crossing:
                    self._add("scratch", value)
                if len(inner) < len(there):
                    self._add("stage", value)
                for index, output in enumerate(graph.outputs):
                    if output == value:
                        self._add("result", value, index)
                    elif output in joins and value in joins[output].parts:
                        join = joins[output]
                        offset = join.offsets[join.parts.index(value)]
                        self._add("result", value, index, offset)

    def _add(self, kind: str, value: int, index: int = -1, offset: int = -1) -> None:
        v = self.pg.graph.values[value]
        number = len(self.all)
        self.all.append(
            PlanBuffer(number, kind, value, v.shape, v.dtype, v.bytes, index, offset)  # type: ignore[arg-type]
        )
        self._by_kind.setdefault((kind, value), number)
        if kind != "arg":
            self._written.setdefault(value, []).append(number)

    def slices(self) -> list[Slice]:
        """Where the views among the arguments lie."""
        views = {view.value: view for view in self.pg.graph.views}
        return [
            Slice(
                self._by_kind["arg", self.pg.graph.inputs[b.index]], b.id, view.axis, view.start, view.stop,
            )
            for b in self.all
            if b.kind == "arg" and (view := views.get(b.value)) is not None
        ]  # fmt: skip

    def merges(self) -> list[Merge]:
        """Where the parts of joined results lie."""
        return [
            Merge(
                tuple(
                    next(
                        b.id
                        for b in self.all
                        if (b.kind, b.value, b.index) == ("result", part, self.all[whole].index)
                    )
                    for part in join.parts
                ),
                whole,
                join.axis,
            )
            for whole, join in self.joined.items()
        ]

    def written_for(self, value: int) -> list[int]:
        """Buffers that the producer of a value writes."""
        return self._written.get(value, [])

    def read_by(self, value: int, reader: int) -> int:
        """The buffer a region reads a value from."""
        if value not in self.made:
            return self._by_kind["arg", value]
        me, producer = self.places[reader], self.places[self.made[value]]
        if me.lane < 0 or producer.lane < 0 or me.stage != producer.stage:
            return self._by_kind["stage", value]
        return self._by_kind["local" if me.lane == producer.lane else "scratch", value]
