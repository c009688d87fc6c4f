"""Splitting the batch: one graph that holds every nano-batch's regions.

Each nano-batch is a graph of its own, captured at its own size. Here they become one: inputs are cut
(as views where rows lie contiguous and aligned, else inside the regions that read them), regions
that do not depend on the batch run once for all, and outputs are put together (in place where that
is contiguous, else by a merge region). All later stages see an ordinary partitioned graph.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Literal, TypeAlias

from dynaflow_xla import machine
from dynaflow_xla.batch.proof import Mean, Sum
from dynaflow_xla.errors import PlanError, UnsupportedError
from dynaflow_xla.ir.graph import Graph, Join, Op, Region, Value, View
from dynaflow_xla.ir.partitioned import PartitionedGraph


class Parts(enum.Enum):
    """For inputs and outputs that stay in parts, one for each nano-batch (residuals of a backward)."""

    PARTS = "parts"


PARTS = Parts.PARTS

InSpec: TypeAlias = int | None | Parts
OutSpec: TypeAlias = int | Sum | Mean | None | Parts
"""How an output is put together: an axis, a sum, a weighted mean, None (equal in all), or not at all."""


@dataclass(frozen=True)
class Cut:
    """A region input that is rows ``start:stop`` along ``axis`` of a whole value."""

    axis: int
    start: int
    stop: int


Reads: TypeAlias = tuple[tuple[int, Cut | None], ...]


@dataclass(frozen=True)
class MergeSpec:
    """What a merge region computes: its inputs along ``axis``, or their sum weighted by ``weights``."""

    how: Literal["concat", "sum", "mean"]
    axis: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Origin:
    """Where a region of the expanded graph comes from.

    Attributes:
        nanos: Its nano-batch; several if it runs them as one batch.
        region: Number of the region in the nano-batch's graph.
        reads: For each of that region's inputs (nano-batch by nano-batch): a value and how it is cut.
    """

    nanos: tuple[int, ...]
    region: int
    reads: tuple[Reads, ...]


@dataclass(frozen=True)
class Expanded:
    """The graph of all nano-batches.

    Attributes:
        pg: Regions of every nano-batch, then merge regions.
        sizes: Rows of each nano-batch.
        origins: For each region where it comes from, or what it merges.
        sources: For each value the nano-batch it is taken from (-1: the whole graph) and its id there.
        merge_reads: For each merge region what it puts together, in order: a value and how it is cut.
    """

    pg: PartitionedGraph
    sizes: tuple[int, ...]
    origins: tuple[Origin | MergeSpec, ...]
    sources: tuple[tuple[int, int], ...]
    merge_reads: dict[int, Reads]


def even_sizes(batch: int, count: int) -> tuple[int, ...]:
    """``count`` sizes that differ by one at most, larger ones first."""
    small, more = divmod(batch, count)
    return tuple(small + (k < more) for k in range(count))


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
    ):
        self.whole, self.parts, self.sizes, self.in_axes = whole, parts, sizes, in_axes
        self.strided = strided
        self.starts = [sum(sizes[:k]) for k in range(len(sizes))]
        self.values: list[Value] = []
        self.sources: list[tuple[int, int]] = []
        self.ops: list[Op] = []
        self.regions: list[Region] = []
        self.views: list[View] = []
        self.origins: list[Origin | MergeSpec] = []
        self.merge_reads: dict[int, Reads] = {}
        self.ids: list[dict[int, int]] = [{} for _ in parts]
        self.cuts: list[dict[int, Cut]] = [{} for _ in parts]
        self.inputs: list[int] = []
        self.names: list[str] = []
        self.shared_regions: set[int] = set()
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
        """Whether nano-batch 0 computes the same: the same program on inputs that are not cut."""
        if nano == 0 or region.outer:
            return False
        if self.parts[nano].graph is not self.parts[0].graph:
            return False
        return all(
            v not in self.cuts[nano] and self.ids[nano].get(v) == self.ids[0].get(v)
            for v in region.inputs
        )

    def add_region(self, nano: int, region: Region) -> None:
        part, ids = self.parts[nano].graph, self.ids[nano]
        if self._shared(nano, region):
            ids.update((v, self.ids[0][v]) for v in region.outputs)
            self.shared_regions.add(region.id)
            return
        first = len(self.ops)
        inner: dict[int, int] = {}  # operators may be repeated in several regions
        for index in region.ops:
            op = part.ops[index]
            number = len(self.ops)
            made = tuple(self.value(nano, v, number) for v in op.outputs)
            read = tuple(dict.fromkeys(inner[v] if v in inner else ids[v] for v in op.inputs))
            inner.update(zip(op.outputs, made, strict=True))
            self.ops.append(replace(op, index=number, inputs=read, outputs=made))
        ids.update((v, inner[v]) for v in region.outputs)
        reads = tuple((ids[v], self.cuts[nano].get(v)) for v in region.inputs)
        self.origins.append(Origin((nano,), region.id, (reads,)))
        self.regions.append(
            replace(
                region,
                id=len(self.regions),
                name=f"{region.name}@{nano}",
                ops=tuple(range(first, len(self.ops))),
                inputs=tuple(dict.fromkeys(v for v, _ in reads)),
                outputs=tuple(inner[v] for v in region.outputs),
                nano=nano,
            )
        )

    def merge(self, number: int, reads: Reads, spec: MergeSpec) -> int:
        """Adds a region that makes output ``number``; returns the value."""
        index = len(self.ops)
        value = self.value(-1, self.whole.outputs[number], index)
        read = tuple(dict.fromkeys(v for v, _ in reads))
        moved = 2 * self.values[value].bytes
        cost = moved / machine.COPY_BYTES_PER_NS
        self.ops.append(
            Op(index, f"merge_{spec.how}", read, (value,), bytes_moved=moved, cost_ns=cost)
        )
        self.origins.append(spec)
        self.merge_reads[len(self.regions)] = reads
        self.regions.append(
            Region(
                id=len(self.regions),
                name=f"merge_{number}",
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

    Raises:
        UnsupportedError: effects or callbacks under a split.
        PlanError: an output cannot be put together as asked.
    """
    for cut, region in [(one, region) for one in parts for region in one.regions]:
        if region.outer and region.resource != "network":
            op = cut.graph.ops[region.ops[0]]
            raise UnsupportedError(
                f"{op.kind} at {op.source} {op.outer_reason}: a split would run it once a "
                "nano-batch. Keep it out of the scheduled function, or do not split"
            )
    made = _Expansion(whole, parts, sizes, in_axes, strided)
    # Region by region, not nano-batch by nano-batch: collectives of all nano-batches alternate.
    for number in range(max(len(part.regions) for part in parts)):
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
        elif (passed := _passed(made, number, local, spec)) is not None:
            outputs.append(passed)
        elif spec is None and reads[0][1] is None:
            outputs.append(reads[0][0])
        elif spec is None:
            outputs.append(made.merge(number, reads[:1], MergeSpec("concat", 0, ())))
        else:
            outputs.append(_put_together(made, number, reads, spec, joins, in_place=not outer))
    graph = Graph(
        whole.name, tuple(made.values), tuple(made.ops), tuple(made.inputs), tuple(outputs),
        tuple(made.names), tuple(made.views), tuple(joins),
    )  # fmt: skip
    pg = PartitionedGraph(graph, _live_outputs(graph, made.regions), _notes(made))
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
    sizes = made.sizes
    if isinstance(spec, Sum):
        return made.merge(number, reads, MergeSpec("sum", 0, tuple(1.0 for _ in sizes)))
    if isinstance(spec, Mean):
        weights = tuple(size / sum(sizes) for size in sizes)
        return made.merge(number, reads, MergeSpec("mean", 0, weights))
    like = made.whole.values[made.whole.outputs[number]]
    ids = tuple(v for v, _ in reads)
    produced = all(made.values[v].producer >= 0 for v in ids)
    contiguous = math.prod(like.shape[:spec]) == 1 or made.strided
    contiguous = contiguous and not like.dtype.startswith("key<")
    if not (in_place and produced and contiguous and len(set(ids)) == len(ids) and like.bytes):
        return made.merge(number, reads, MergeSpec("concat", spec, ()))
    value = made.value(-1, made.whole.outputs[number])
    row = like.bytes // max(1, sum(sizes))
    joins.append(Join(value, ids, tuple(start * row for start in made.starts), spec))
    return value


def _live_outputs(graph: Graph, regions: list[Region]) -> tuple[Region, ...]:
    """Leaves out region outputs that nobody reads any more (a shared region's, a result's at 0)."""
    read = {v for r in regions for v in r.inputs} | set(graph.outputs)
    read |= {part for join in graph.joins for part in join.parts}
    return tuple(replace(r, outputs=tuple(v for v in r.outputs if v in read)) for r in regions)


def _notes(made: _Expansion) -> tuple[str, ...]:
    sizes = made.sizes
    notes = list(made.parts[0].notes)
    notes.append(f"the batch of {sum(sizes)} rows is split into nano-batches of {list(sizes)}")
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


def group(
    expanded: Expanded, groups: Sequence[tuple[int, ...]], costs: Sequence[Region]
) -> tuple[Expanded, dict[int, int]]:
    """Makes each group of regions (one region of several nano-batches) one region.

    Args:
        expanded: The graph of all nano-batches.
        groups: Ids of the regions to join, none of which reads another of its group.
        costs: For each group its region as it is at the joint size, for the estimates.

    Returns:
        The graph with the groups as regions, in a topological order, and old id -> new id.
    """
    regions = expanded.pg.regions
    first_of = {r: members[0] for members in groups for r in members}
    joint: dict[int, tuple[Region, Origin | MergeSpec]] = {
        r.id: (r, expanded.origins[r.id]) for r in regions if first_of.get(r.id, r.id) == r.id
    }
    for members, cost in zip(groups, costs, strict=True):
        parts = [regions[m] for m in members]
        origins = [o for m in members if isinstance(o := expanded.origins[m], Origin)]
        nanos = tuple(n for o in origins for n in o.nanos)
        name = parts[0].name.removesuffix(f"@{parts[0].nano}")
        region = replace(
            parts[0],
            name=f"{name}@{'+'.join(map(str, nanos))}",
            ops=tuple(sorted(i for p in parts for i in p.ops)),
            inputs=tuple(dict.fromkeys(v for p in parts for v in p.inputs)),
            outputs=tuple(v for p in parts for v in p.outputs),
            flops=cost.flops,
            bytes_moved=cost.bytes_moved,
            cost_ns=cost.cost_ns,
        )
        reads = tuple(r for o in origins for r in o.reads)
        joint[members[0]] = (region, Origin(nanos, origins[0].region, reads))
    before = {r: set[int]() for r in joint}
    for reader, preds in enumerate(expanded.pg.predecessors()):
        me = first_of.get(reader, reader)
        before[me] |= {first_of.get(p, p) for p in preds} - {me}
    order = list(TopologicalSorter(before).static_order())
    new = {old: position for position, old in enumerate(order)}
    renumber = {r.id: new[first_of.get(r.id, r.id)] for r in regions}
    merge_reads = {renumber[r]: reads for r, reads in expanded.merge_reads.items()}
    made = tuple(replace(joint[old][0], id=position) for position, old in enumerate(order))
    pg = replace(expanded.pg, regions=made)
    origins_now = tuple(joint[old][1] for old in order)
    return (
        replace(expanded, pg=pg, origins=origins_now, merge_reads=merge_reads),
        renumber,
    )
