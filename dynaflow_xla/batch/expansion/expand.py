"""Splitting the batch: one graph that holds every nano-batch's regions.

Each nano-batch is a graph of its own, captured at its own size. Here they become one: inputs are cut
(as views where rows lie contiguous and aligned, else inside the regions that read them), regions
that do not depend on the batch run once for all, and outputs are put together (in place where that
is contiguous, else by a merge region). All later stages see an ordinary partitioned graph.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dynaflow_xla import machine
from dynaflow_xla.batch.expansion.specs import (
    PARTS,
    WHOLE,
    AsProved,
    Cut,
    CutSpec,
    InSpec,
    MergeSpec,
    OutSpec,
    Parts,
    Reads,
    RegionOrigin,
)
from dynaflow_xla.batch.joins import Joining, weights
from dynaflow_xla.batch.proof import Mean, Sum
from dynaflow_xla.batch.states import Partial, Position, Rows
from dynaflow_xla.errors import PlanError, UnsupportedError
from dynaflow_xla.ir.graph import Graph, Join, Operator, OuterKind, Region, Value, View
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.work import spread_over


@dataclass(frozen=True)
class Expanded:
    """The graph of all nano-batches.

    Attributes:
        pg: Regions of every nano-batch, then merge regions.
        sizes: Rows of each nano-batch.
        origins: For each region where it comes from, what it merges, or what it cuts.
        sources: For each value the nano-batch it is taken from (-1: the whole graph) and its id there.
        merge_reads: For each merge region what it puts together, in order: a value and how it is cut.
    """

    pg: PartitionedGraph
    sizes: tuple[int, ...]
    origins: tuple[RegionOrigin | MergeSpec | CutSpec, ...]
    sources: tuple[tuple[int, int], ...]
    merge_reads: dict[int, Reads]


def transfer(cut: PartitionedGraph, graph: Graph) -> PartitionedGraph | None:
    """The same cut of another nano-batch's graph, or None if that has other operators.

    Code may branch on the batch size, and JAX itself does: it leaves out broadcasts and reductions of
    axes with one element.
    """
    if graph is cut.graph:
        return cut

    def program(g: Graph) -> tuple[object, ...]:
        return [(op.kind, op.inputs, op.outputs) for op in g.ops], g.inputs, g.outputs

    if program(cut.graph) != program(graph):
        return None
    regions = tuple(
        replace(
            region,
            flops=sum(graph.ops[i].flops for i in region.ops),
            bytes_moved=sum(graph.ops[i].bytes_moved for i in region.ops),
            cost_ns=sum(graph.ops[i].cost_ns for i in region.ops),
            spread=spread_over(graph.ops[i].spread for i in region.ops),
        )
        for region in cut.regions
    )
    return PartitionedGraph(graph, regions, cut.notes)


class _Expansion:
    def __init__(
        self,
        whole: Graph,
        parts: Sequence[PartitionedGraph],
        sizes: Sequence[int],
        in_axes: Sequence[InSpec],
        strided: bool,
        joining: Joining | None,
        same: frozenset[int],
    ):
        self.whole, self.parts, self.sizes, self.in_axes = whole, parts, sizes, in_axes
        self.strided, self.joining, self.same = strided, joining, same
        self.completed = frozenset[int]() if joining is None else frozenset(joining.completed)
        self.starts = [sum(sizes[:k]) for k in range(len(sizes))]
        self.values: list[Value] = []
        self.sources: list[tuple[int, int]] = []
        self.ops: list[Operator] = []
        self.regions: list[Region] = []
        self.views: list[View] = []
        self.origins: list[RegionOrigin | MergeSpec | CutSpec] = []
        self.merge_reads: dict[int, Reads] = {}
        self.ids: list[dict[int, int]] = [{} for _ in parts]
        self.cuts: list[dict[int, Cut]] = [{} for _ in parts]
        self.inputs: list[int] = []
        self.names: list[str] = []
        self.shared_regions: set[int] = set()
        self.wholes: dict[int, int] = {}  # a value of the whole batch, by its id in the whole graph
        self._inputs()

    def value(self, nano: int, local: int, producer: int = -1) -> int:
        graph = self.whole if nano < 0 else self.parts[nano].graph
        self.values.append(replace(graph.values[local], id=len(self.values), producer=producer))
        self.sources.append((nano, local))
        return len(self.values) - 1

    def _inputs(self) -> None:
        for number, axis in enumerate(self.in_axes):
            name = self.whole.input_names[number] if self.whole.input_names else f"arg_{number}"
            if isinstance(axis, Parts):
                for nano, part in enumerate(self.parts):
                    local = part.graph.inputs[number]
                    self.ids[nano][local] = self.value(nano, local)
                    self.inputs.append(self.ids[nano][local])
                    self.names.append(f"{name}@{nano}")
                continue
            position = len(self.inputs)
            self.inputs.append(self.value(-1, self.whole.inputs[number]))
            self.names.append(name)
            self.wholes[self.whole.inputs[number]] = self.inputs[position]
            for nano in range(len(self.parts)):
                self._cut_input(nano, number, position, axis)

    def _cut_input(self, nano: int, number: int, position: int, axis: int | None) -> None:
        part = self.parts[nano].graph
        local = part.inputs[number]
        self.ids[nano][local] = self.inputs[position]
        if axis is None:
            return
        like = part.values[local]
        # The axis may hold several elements for each row of the batch.
        lengths = [p.graph.values[p.graph.inputs[number]].shape[axis] for p in self.parts]
        start = sum(lengths[:nano])
        stop = start + lengths[nano]
        row = like.bytes // max(1, lengths[nano])
        contiguous = math.prod(like.shape[:axis]) == 1
        aligned = start * row % machine.ALIGNMENT == 0
        in_place = (contiguous and aligned and like.bytes) or self.strided
        if in_place and not like.dtype.startswith("key<"):
            view = self.value(nano, local)
            self.views.append(View(view, position, axis, start, stop, start * row))
            self.ids[nano][local] = view
        else:
            self.cuts[nano][local] = Cut(axis, start, stop)

    def _shared(self, nano: int, region: Region) -> bool:
        """Whether nano-batch 0 computes the same: the same program on inputs that are not cut.

        Nano-batches of another size have another program, of whose results the proof may know.
        """
        if nano == 0 or region.outer:
            return False
        first = self.parts[0]
        if self.parts[nano].graph is not first.graph and not (
            self.same.issuperset(region.outputs)
            and region.id < len(first.regions)
            and first.regions[region.id].ops == region.ops
            and first.regions[region.id].outputs == region.outputs
        ):
            return False
        return all(
            v not in self.cuts[nano] and self.ids[nano].get(v) == self.ids[0].get(v)
            for v in region.inputs
            if v not in self.completed
        )

    def add_region(self, nano: int, region: Region) -> None:
        part, ids = self.parts[nano].graph, self.ids[nano]
        if self._shared(nano, region):
            ids.update((v, self.ids[0][v]) for v in region.outputs)
            self.shared_regions.add(region.id)
            return
        reads = tuple(
            (self.whole_value(v), None) if v in self.completed else (ids[v], self.cuts[nano].get(v))
            for v in region.inputs
        )
        ids.update(self._add(nano, part, region, reads, f"{region.name}@{nano}"))

    def add_once(self, region: Region, part: Graph) -> None:
        """Adds a region that runs once, on all rows; nano-batches get their rows of what it makes."""
        assert self.joining is not None
        reads = tuple((self.whole_value(v), None) for v in region.inputs)
        region = replace(region, rule="joined", tags=region.tags | {"joined"})
        made = self._add(WHOLE, part, region, reads, region.name)
        self.wholes.update(made)
        for local, value in made.items():
            state = self.joining.states[local]
            cuts: list[Cut] = []
            for nano, size in enumerate(self.sizes):
                self.ids[nano][local] = value
                if isinstance(state, Rows):
                    start = cuts[-1].stop if cuts else 0
                    cuts.append(Cut(state.axis, start, start + size * state.inner))
                    self.cuts[nano][local] = cuts[-1]
            if cuts and self.strided:
                self._cut_once(local, value, tuple(cuts))

    def _cut_once(self, local: int, whole: int, cuts: tuple[Cut, ...]) -> None:
        """Adds a region that takes the nano-batches' rows of a value that was made once."""
        index = len(self.ops)
        made = tuple(self.value(nano, local, index) for nano in range(len(cuts)))
        self.ops.append(Operator(index, "rows", (whole,), made))
        for nano, value in enumerate(made):
            self.ids[nano][local] = value
            del self.cuts[nano][local]
        self.origins.append(CutSpec(cuts))
        self.regions.append(
            Region(
                id=len(self.regions),
                name=f"rows_{local}",
                ops=(index,),
                inputs=(whole,),
                outputs=made,
                resource="memory",
                rule="split",
                merge=True,
            )
        )

    def _add(
        self, nano: int, part: Graph, region: Region, reads: Reads, name: str
    ) -> dict[int, int]:
        """Adds a region; its outputs' new ids."""
        first = len(self.ops)
        new = dict(zip(region.inputs, (v for v, _ in reads), strict=True))
        for index in region.ops:  # operators may be repeated in several regions
            op = part.ops[index]
            number = len(self.ops)
            read = tuple(dict.fromkeys(new[v] for v in op.inputs))
            made = tuple(self.value(nano, v, number) for v in op.outputs)
            new.update(zip(op.outputs, made, strict=True))
            self.ops.append(replace(op, index=number, inputs=read, outputs=made))
        self.origins.append(RegionOrigin((nano,), region.id, (reads,)))
        self.regions.append(
            replace(
                region,
                id=len(self.regions),
                name=name,
                ops=tuple(range(first, len(self.ops))),
                inputs=tuple(dict.fromkeys(v for v, _ in reads)),
                outputs=tuple(new[v] for v in region.outputs),
                nano=max(nano, 0),
            )
        )
        return {v: new[v] for v in region.outputs}

    def whole_value(self, local: int) -> int:
        """The whole batch's value, put together here if it is not there yet."""
        if local not in self.wholes:
            assert self.joining is not None
            state = self.joining.state(local)
            reads = tuple(
                (ids[local], cuts.get(local)) for ids, cuts in zip(self.ids, self.cuts, strict=True)
            )
            weighed = weights(state, self.sizes)
            if isinstance(state, Rows):
                spec = MergeSpec("concat", state.axis, weighed, state.runs)
                self.wholes[local] = self.merge(local, reads, spec, f"join_{local}")
            elif isinstance(state, Position):
                starts = tuple(self.starts)
                spec = MergeSpec("concat", state.axis, (), offsets=starts)
                self.wholes[local] = self.merge(local, reads, spec, f"join_{local}")
            elif isinstance(state, Partial):
                how: Literal["sum", "mean"] = "mean" if state.power else "sum"
                self.wholes[local] = self.merge(
                    local, reads, MergeSpec(how, 0, weighed), f"total_{local}"
                )
            elif weighed or reads[0][1] is not None:
                spec = MergeSpec("mean", 0, weighed[:1] or (1.0,))
                self.wholes[local] = self.merge(local, reads[:1], spec, f"join_{local}")
            else:
                self.wholes[local] = reads[0][0]
        return self.wholes[local]

    def merge(self, local: int, reads: Reads, spec: MergeSpec, name: str) -> int:
        """Adds a region that makes a value of the whole graph; returns its id here."""
        index = len(self.ops)
        value = self.value(WHOLE, local, index)
        read = tuple(dict.fromkeys(v for v, _ in reads))
        moved = 2 * self.values[value].bytes
        cost = moved / machine.numbers().copy_bytes_per_ns
        self.ops.append(
            Operator(index, f"merge_{spec.how}", read, (value,), bytes_moved=moved, cost_ns=cost)
        )
        self.origins.append(spec)
        self.merge_reads[len(self.regions)] = reads
        self.regions.append(
            Region(
                id=len(self.regions),
                name=name,
                ops=(index,),
                inputs=read,
                outputs=(value,),
                resource="memory",
                bytes_moved=moved,
                cost_ns=cost,
                rule="split",
                merge=True,
            )
        )
        return value


def expand(
    whole: Graph,
    parts: Sequence[PartitionedGraph],
    sizes: Sequence[int],
    in_axes: Sequence[InSpec],
    out_specs: Sequence[OutSpec],
    *,
    strided: bool = False,
    joining: Joining | None = None,
    once: PartitionedGraph | None = None,
    same: frozenset[int] = frozenset(),
) -> Expanded:
    """Puts the nano-batches' graphs into one.

    Args:
        whole: The graph at full size: its inputs and outputs are the result's.
        parts: For each nano-batch its cut graph; equal sizes share one graph, others may have other
            operators and regions.
        sizes: Rows of each.
        in_axes: For each graph input the axis to cut, None (all read the same), or ``PARTS``.
        out_specs: For each graph output how to put it together. ``PARTS`` inputs and outputs become
            one for each nano-batch.
        strided: Rows are read and written in place whatever their strides and alignment.
        joining: What runs once, on all rows.
        once: With ``joining`` the cut of ``whole``, the same as of each of ``parts``.
        same: Values that are proved to be equal in all nano-batches, of whatever size.

    Raises:
        UnsupportedError: effects or callbacks under a split.
        PlanError: an output cannot be put together as asked.
    """
    for cut, region in [(one, region) for one in parts for region in one.regions]:
        if region.outer and region.resource != "network":
            op = cut.graph.ops[region.ops[0]]
            why = (
                "what nano-batches hand to each other is in memory that several programs read"
                if op.outer_reason is not None and op.outer_reason.kind is OuterKind.LAYOUT
                else "a split would run it once a nano-batch"
            )
            raise UnsupportedError(
                f"{op.kind}{op.at} {op.outer_reason}: {why}. Keep it out of the scheduled "
                "function, or do not split"
            )
    made = _Expansion(whole, parts, sizes, in_axes, strided, joining, same)
    joint = {} if joining is None else joining.phases(whole).once
    # Region by region, not nano-batch by nano-batch: collectives of all nano-batches alternate.
    for number in range(max(len(part.regions) for part in parts)):
        if once is not None and _runs_once(once, number, joint):
            made.add_once(once.regions[number], once.graph)
            continue
        for nano, part in enumerate(parts):
            if number < len(part.regions):
                made.add_region(nano, part.regions[number])
    outer = any(region.outer for region in made.regions)
    outputs: list[int] = []
    joins: list[Join] = []
    for number, spec in enumerate(out_specs):
        local = [part.graph.outputs[number] for part in parts]
        reads = tuple((made.ids[k][v], made.cuts[k].get(v)) for k, v in enumerate(local))
        if isinstance(spec, Parts):
            outputs += [v for v, _ in reads]
        elif isinstance(spec, AsProved) or local[0] in made.completed or _made_once(made, local[0]):
            outputs.append(made.whole_value(local[0]))
        elif (passed := _passed(made, number, local, spec)) is not None:
            outputs.append(passed)
        elif spec is None and reads[0][1] is None:
            outputs.append(reads[0][0])
        elif spec is None:
            outputs.append(
                made.merge(
                    whole.outputs[number], reads[:1], MergeSpec("concat", 0, ()), f"merge_{number}"
                )
            )
        else:
            outputs.append(_put_together(made, number, reads, spec, joins, in_place=not outer))
    graph = Graph(
        whole.name, tuple(made.values), tuple(made.ops), tuple(made.inputs), tuple(outputs),
        tuple(made.names), tuple(made.views), tuple(joins),
    )  # fmt: skip
    regions = _live_outputs(graph, made.regions)
    if joining is not None:
        regions = _read(made, graph, regions)
    pg = PartitionedGraph(graph, regions, _notes(made))
    return Expanded(pg, tuple(sizes), tuple(made.origins), tuple(made.sources), made.merge_reads)


def _passed(made: _Expansion, number: int, local: Sequence[int], spec: OutSpec) -> int | None:
    """The input that an output is as it is in every nano-batch; None if it is computed in one."""
    inputs = [part.graph.inputs for part in made.parts]
    if not all(v in of for v, of in zip(local, inputs, strict=True)):
        return None
    positions = {of.index(v) for v, of in zip(local, inputs, strict=True)}
    axes = {made.in_axes[position] for position in positions}
    if axes == {PARTS} or isinstance(spec, Sum | Mean):
        return None
    if len(positions) > 1 or axes != {spec}:
        raise PlanError(
            f"output {number} is input {min(positions)} as it is, so its out_axes must be that input's "
            f"in_axes, {made.in_axes[min(positions)]!r}; got {spec!r}"
        )
    before = made.in_axes[: min(positions)]
    return made.inputs[sum(len(made.parts) if isinstance(a, Parts) else 1 for a in before)]


def _put_together(
    made: _Expansion,
    number: int,
    reads: Reads,
    spec: int | Sum | Mean,
    joins: list[Join],
    *,
    in_place: bool,
) -> int:
    sizes, local, name = made.sizes, made.whole.outputs[number], f"merge_{number}"
    if isinstance(spec, Sum):
        return made.merge(local, reads, MergeSpec("sum", 0, tuple(1.0 for _ in sizes)), name)
    if isinstance(spec, Mean):
        shares = tuple(size / sum(sizes) for size in sizes)
        return made.merge(local, reads, MergeSpec("mean", 0, shares), name)
    like = made.whole.values[local]
    ids = tuple(v for v, _ in reads)
    produced = all(made.values[v].producer >= 0 for v in ids)
    contiguous = math.prod(like.shape[:spec]) == 1 or made.strided
    contiguous = contiguous and not like.dtype.startswith("key<")
    if not (in_place and produced and contiguous and len(set(ids)) == len(ids) and like.bytes):
        return made.merge(local, reads, MergeSpec("concat", spec, ()), name)
    value = made.value(WHOLE, local)
    row = like.bytes // max(1, sum(sizes))
    joins.append(Join(value, ids, tuple(start * row for start in made.starts), spec))
    return value


def _runs_once(once: PartitionedGraph, number: int, joint: Collection[int]) -> bool:
    return any(index in joint for index in once.regions[number].ops)


def _made_once(made: _Expansion, local: int) -> bool:
    if made.joining is None:
        return False  # nano-batches may have other operators than the whole
    return made.whole.values[local].producer >= 0 and local in made.wholes


def _live_outputs(graph: Graph, regions: list[Region]) -> tuple[Region, ...]:
    """Leaves out region outputs that nobody reads any more (a shared region's, a result's at 0)."""
    read = {v for r in regions for v in r.inputs} | set(graph.outputs)
    read |= {part for join in graph.joins for part in join.parts}
    return tuple(replace(r, outputs=tuple(v for v in r.outputs if v in read)) for r in regions)


def _read(made: _Expansion, graph: Graph, regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """Without the regions that nobody reads, since what would read them runs once on other values."""
    while True:
        acts = [r.outer or any(graph.ops[i].once for i in r.ops) for r in regions]
        kept = [n for n, r in enumerate(regions) if r.outputs or acts[n]]
        if len(kept) == len(regions):
            return regions
        new = {old: number for number, old in enumerate(kept)}
        made.origins = [made.origins[old] for old in kept]
        made.merge_reads = {new[r]: reads for r, reads in made.merge_reads.items() if r in new}
        left = [replace(regions[old], id=number) for old, number in new.items()]
        regions = _live_outputs(graph, left)


def _notes(made: _Expansion) -> tuple[str, ...]:
    sizes = made.sizes
    notes = list(made.parts[0].notes)
    notes.append(f"the batch of {sum(sizes)} rows is split into nano-batches of {list(sizes)}")
    if made.joining is not None:
        notes += made.joining.reasons
    if made.shared_regions:
        notes.append(
            f"{len(made.shared_regions)} regions do not depend on the batch and run once for all"
        )
    inside = {local for cuts in made.cuts for local in cuts}
    names = [
        made.names[n] for n, v in enumerate(made.parts[0].graph.inputs) if v in inside
        and n < len(made.names)
    ]  # fmt: skip
    if names:
        notes.append(
            f"{', '.join(names)} cut inside the regions that read them: their nano-batches are not "
            "contiguous, or do not begin at multiples of 64 bytes"
        )
    return tuple(notes)
