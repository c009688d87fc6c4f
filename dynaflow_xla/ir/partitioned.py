"""A graph and its cut into regions."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass

from dynaflow_xla import machine
from dynaflow_xla.ir.forms import graph_dot, graph_json, graph_text
from dynaflow_xla.ir.graph import NOT_OUTSIDE, ORDERED, Graph, Region


@dataclass(frozen=True)
class PartitionedGraph:
    """A graph and its cut into regions; ``regions`` is in topological order.

    ``notes`` are sentences for ``explain`` (what a default rule did, what was left out).
    """

    graph: Graph
    regions: tuple[Region, ...]
    notes: tuple[str, ...] = ()

    def producer_region(self) -> dict[int, int]:
        """Value id -> id of the region that makes it (graph inputs are absent)."""
        return {v: r.id for r in self.regions for v in r.outputs}

    def predecessors(self) -> list[set[int]]:
        """For each region, the regions whose outputs it reads.

        Consecutive outer regions also depend on each other, in program order, so that effects
        keep their order; so do regions with the tag "ordered" (every process has to start the same
        collectives in the same order, whatever its lanes).
        """
        made = self.producer_region()
        preds = [{made[v] for v in r.inputs if v in made} for r in self.regions]
        last_outer: Region | None = None
        for region in self.regions:
            if region.outer or ORDERED in region.tags:
                if last_outer is not None:
                    preds[region.id].add(last_outer.id)
                last_outer = region
        return preds

    def successors(self) -> list[set[int]]:
        """For each region, the regions that read its outputs (or follow it as an effect)."""
        succs: list[set[int]] = [set() for _ in self.regions]
        for region, preds in enumerate(self.predecessors()):
            for pred in preds:
                succs[pred].add(region)
        return succs

    def on_caller_ns(self) -> float:
        """Nanoseconds of the whole as one program on one core; inf where a lane is faster.

        It is where it has kernels of its own, and where BLAS's threads, which only lanes hold back,
        take longer than one by more than a lane costs.
        """
        if any(region.outside != NOT_OUTSIDE for region in self.regions):
            return math.inf
        in_vain = sum(max(0.0, -region.spread.blas_ns(machine.cores())) for region in self.regions)
        if in_vain > machine.numbers().lanes_ns:
            return math.inf
        return sum(region.cost_ns for region in self.regions)

    def to_text(self) -> str:
        """Readable listing, one region a paragraph."""
        return graph_text(self.graph, self.regions, self.notes)

    def to_json(self) -> str:
        """JSON form (stable key order; payloads are left out)."""
        return graph_json(self.graph, self.regions, self.notes)

    def to_dot(self) -> str:
        """Graphviz form: regions as nodes, cross-region values as edges."""
        return graph_dot(self.graph, self.regions, self.producer_region())

    def __str__(self) -> str:
        return self.to_text()

    @functools.cached_property
    def _contents(self) -> tuple[str, ...]:
        made = []
        for region in self.regions:
            local: dict[int, int] = {}
            parts: list[object] = []
            for value in region.inputs:
                local[value] = len(local)
                parts.append((self.graph.values[value].shape, self.graph.values[value].dtype))
            for index in region.ops:
                op = self.graph.ops[index]
                parts.append((op.kind, op.params, [local.get(v, -1) for v in op.inputs]))
                for value in op.outputs:
                    local[value] = len(local)
                    parts.append((self.graph.values[value].shape, self.graph.values[value].dtype))
            parts.append([local.get(v, -1) for v in region.outputs])
            made.append(hashlib.sha256(repr(parts).encode()).hexdigest()[:16])
        return tuple(made)


def contents(pg: PartitionedGraph) -> tuple[str, ...]:
    """What each region computes, apart from its number and name: equal texts, equal operators and sizes.

    Another cut of the same function has other regions under the same numbers.
    """
    return pg._contents
