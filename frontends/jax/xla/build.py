"""From a validated plan to one XLA program: its order, gates, and where results are put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dynaflow_xla.batch.expansion.specs import MergeSpec
from dynaflow_xla.frontends.jax.batch.split import SplitCapture
from dynaflow_xla.frontends.jax.regions.functions import Second, region_function
from dynaflow_xla.frontends.jax.xla import collectives, placed_results
from dynaflow_xla.frontends.jax.xla.gate_placement import Gate, overwritten, place_gates
from dynaflow_xla.frontends.jax.xla.region_order import RegionOrder
from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.instructions import Merge
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.recording import Decision


def build(**made: Any) -> XlaEntry:
    """Makes the entry of a validated plan, from the fields of ``Planned``."""
    pg, split, functions = made["pg"], made["split"], made["functions"]
    chained = collectives.in_graph(made["options"].compiler_options)
    order = RegionOrder(pg, made["plan"], chained=chained)
    opaque = frozenset[int]() if split is None else split.joint_regions()
    placed = place_gates(pg, order, opaque, inside=split is None)
    gates = {gate.region: gate for gate in placed}
    inside = _given_to_gates(pg, placed)
    captured = made["captured"]
    for region in pg.regions:
        gate = gates.get(region.id)
        second = None
        if gate is not None and (gate.beside or gate.products):
            deps = tuple(captured.avals[d] for d in gate.deps) if gate.products else ()
            second = Second(gate.beside, gate.starts, gate.paths, gate.products, deps)
        if second is not None and split is not None:
            functions[region.id] = split.function(region.id, Decision(region.id, 0), second)
        elif second is not None or region.id in inside:
            outputs = (*region.outputs, *inside.get(region.id, ()))
            functions[region.id] = region_function(
                captured, replace(region, outputs=outputs), second
            )
    waiting: dict[int, list[int]] = {}
    for gate in gates.values():
        for dep in gate.deps:
            waiting.setdefault(dep, []).append(gate.region)
    witnessed = overwritten(pg, order, gates.values())
    whole = (m for m in _merges(pg, made["plan"], split) if witnessed.isdisjoint(m[1]))
    places = placed_results.places(pg, whole, order.before, waiting)
    entry = XlaEntry(
        order=order, gates=gates, inside=inside, witnessed=witnessed, places=places, **made
    )
    if chained:
        collectives.require_chain(entry)
    return entry


def _given_to_gates(pg: PartitionedGraph, gates: Sequence[Gate]) -> dict[int, tuple[int, ...]]:
    """Values inside of regions that gates wait for, by region."""
    given: dict[int, tuple[int, ...]] = {}
    owner = {index: region for region in pg.regions for index in region.ops}
    for value in dict.fromkeys(d for gate in gates for d in gate.deps):
        producer = pg.graph.values[value].producer
        region = owner.get(producer)
        if region is not None and value not in region.outputs:
            given[region.id] = (*given.get(region.id, ()), value)
    return given


def _merges(
    pg: PartitionedGraph, plan: Plan, split: SplitCapture | None
) -> Iterator[tuple[int, list[int], int]]:
    """Results that are put together from whole values: the result, its parts, the axis."""
    for merge in plan.instructions:
        if isinstance(merge, Merge):
            parts = [plan.buffers[part].value for part in merge.srcs]
            yield plan.buffers[merge.out].value, parts, merge.axis
    if split is None:
        return
    for launch in plan.launches:
        if launch.region in split.expanded.merge_reads:
            origin = split.expanded.origins[launch.region]
            reads = split.expanded.merge_reads[launch.region]
            if isinstance(origin, MergeSpec) and origin.how == "concat" and not origin.weights:
                if origin.runs == 1 and not origin.offsets and all(cut is None for _, cut in reads):
                    (whole,) = pg.regions[launch.region].outputs
                    yield whole, [value for value, _ in reads], origin.axis
