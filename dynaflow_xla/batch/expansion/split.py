"""A function split over its batch: all nano-batches in one graph, some of which may run as one batch.

The functions of regions are made here from a frontend's: what it needs of arrays is in ``Arrays``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynaflow_xla.batch.expansion import expand, joint
from dynaflow_xla.batch.expansion.specs import Cut, MergeSpec, RegionOrigin
from dynaflow_xla.batch.states import Partial, Rows, Same, State, is_plain_same
from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.graph import Graph, Region
from dynaflow_xla.ir.partitioned import PartitionedGraph

Function = Callable[..., list[Any]]
Given = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Arrays:
    """A framework's operations on arrays.

    Attributes:
        cut: The rows of an array that a ``Cut`` says.
        concatenate: Several along an axis.
        zeros_like: One of the same shape and type.
        widened: As wide as sums need to be: n roundings of a partial sum in a narrow type would add up.
        as_type: One array in the type of another.
    """

    cut: Callable[[Any, Cut], Any]
    concatenate: Callable[[Sequence[Any], int], Any]
    zeros_like: Callable[[Any], Any]
    widened: Callable[[Any], Any]
    as_type: Callable[[Any, Any], Any]

    def read(self, x: Any, cut: Cut | None) -> Any:
        """An array, or what is read of it."""
        return x if cut is None else self.cut(x, cut)

    def total(self, parts: Sequence[Any], spec: MergeSpec) -> Any:
        """The sum or the mean of what nano-batches gave."""
        terms = self._weighed([self.widened(x) for x in parts], spec)
        made = terms[0]
        for term in terms[1:]:
            made = made + term
        return self.as_type(made, parts[0])

    def joined(self, parts: Sequence[Any], spec: MergeSpec) -> Any:
        """What nano-batches gave, one after the other along an axis, run by run."""
        parts = self.weighed(parts, spec)
        if spec.runs == 1:
            return self.concatenate(parts, spec.axis)
        lengths = [part.shape[spec.axis] // spec.runs for part in parts]
        return self.concatenate(
            [
                self.cut(part, Cut(spec.axis, run * length, (run + 1) * length))
                for run in range(spec.runs)
                for part, length in zip(parts, lengths, strict=True)
            ],
            spec.axis,
        )

    def weighed(self, parts: Sequence[Any], spec: MergeSpec) -> list[Any]:
        """The parts, each times its weight, or plus its offset, if there are such."""
        if spec.offsets:
            return [x + offset for x, offset in zip(parts, spec.offsets, strict=True)]
        if not spec.weights:
            return list(parts)
        made = self._weighed([self.widened(x) for x in parts], spec)
        return [self.as_type(x, like) for x, like in zip(made, parts, strict=True)]

    @staticmethod
    def _weighed(parts: Sequence[Any], spec: MergeSpec) -> list[Any]:
        if not spec.weights or (spec.how == "sum" and set(spec.weights) == {1.0}):
            return list(parts)
        return [x * w for x, w in zip(parts, spec.weights, strict=True)]


@dataclass(frozen=True)
class SplitGraph:
    """A graph of all nano-batches.

    Attributes:
        expanded: The graph, with where everything comes from.
        sizes: Rows of each nano-batch.
        cuts: The partitioned graph of each nano-batch.
        states: What is proved of each value of the function's graph; () if nothing was.
    """

    expanded: expand.Expanded
    sizes: tuple[int, ...]
    cuts: tuple[PartitionedGraph, ...]
    states: Sequence[State]

    @property
    def pg(self) -> PartitionedGraph:
        """Regions of all nano-batches."""
        return self.expanded.pg

    def joint_size(self, nanos: Sequence[int]) -> int:
        """Rows of several nano-batches."""
        return sum(self.sizes[n] for n in nanos)

    def nanos_of(self, members: Sequence[int]) -> list[int]:
        """The nano-batches that regions belong to."""
        return [self.pg.regions[member].nano for member in members]

    def grouped_graph(
        self, groups: Sequence[tuple[int, ...]], graph_at: Callable[[int], Graph]
    ) -> tuple[expand.Expanded, dict[int, int]]:
        """See ``joint.group``; ``graph_at`` gives the function's graph at a size.

        Raises:
            PlanError: a region that cannot run several nano-batches as one.
        """
        costs = []
        for members in groups:
            nanos = self.nanos_of(members)
            origin = self.expanded.origins[members[0]]
            assert isinstance(origin, RegionOrigin)  # the recorder hides merges
            cut = self.joint_cut(nanos, graph_at(self.joint_size(nanos)))
            costs.append(cut.regions[origin.region])
        return joint.group(self.expanded, groups, costs)

    def joint_cut(self, nanos: Sequence[int], graph: Graph) -> PartitionedGraph:
        """The cut of the graph at the joint size of several nano-batches.

        Raises:
            PlanError: the function has other operators at one of these sizes.
        """
        cut = expand.transfer(self.cuts[nanos[0]], graph)
        for n in nanos:
            if cut is None or expand.transfer(cut, self.cuts[n].graph) is None:
                raise PlanError(
                    f"nano-batches {list(nanos)} of {graph.name!r} cannot run as one batch: the function "
                    f"has other operators for {self.sizes[n]} rows than for {self.joint_size(nanos)}"
                )
        assert cut is not None
        return cut

    def single(self, fn: Given, region: Region, local: Region, arrays: Arrays) -> Function:
        """A region of one nano-batch: ``fn`` of what it reads, and of its outputs those that are read.

        Args:
            fn: The function of ``local``.
            region: The region of all nano-batches' graph.
            local: The same in the nano-batch's own.
            arrays: Of the framework.
        """
        origin = self.expanded.origins[region.id]
        assert isinstance(origin, RegionOrigin)
        reads = [(region.inputs.index(v), cut) for v, cut in origin.reads[0]]
        kept = [local.outputs.index(self.expanded.sources[v][1]) for v in region.outputs]

        def run(*args: Any) -> list[Any]:
            outs = fn(*[arrays.read(args[n], cut) for n, cut in reads])
            return [outs[n] for n in kept]

        return run

    def several(self, fn: Given, region: Region, local: Region, arrays: Arrays) -> Function:
        """A region that runs several nano-batches as one: inputs joined, outputs cut; see ``single``.

        Raises:
            PlanError: it is not proved how values of nano-batches lie in those of all.
        """
        origin = self.expanded.origins[region.id]
        assert isinstance(origin, RegionOrigin)
        axes = [self._joined(v, region.name) for v in local.inputs]
        reads = [[(region.inputs.index(v), cut) for v, cut in each] for each in origin.reads]
        wanted = [self.expanded.sources[v] for v in region.outputs]
        places = [
            (local.outputs.index(v), *self._share(v, n, origin.nanos, region.name))
            for n, v in wanted
        ]

        def run(*args: Any) -> list[Any]:
            joined = []
            for position, axis in enumerate(axes):
                parts = [arrays.read(args[n], cut) for n, cut in (each[position] for each in reads)]
                joined.append(parts[0] if axis is None else arrays.concatenate(parts, axis))
            outs = fn(*joined)
            return [
                arrays.zeros_like(outs[n]) if zero else arrays.read(outs[n], cut)
                for n, cut, zero in places
            ]

        return run

    def _joined(self, value: int, name: str) -> int | None:
        """Along which axis nano-batches of a value lie, None if it is the same in all."""
        # The operators, hence the value ids, are the same at every size.
        state = self.states[value] if value < len(self.states) else None
        if isinstance(state, Rows) and state.power == 0 and state.runs == 1:
            return state.axis
        if isinstance(state, Same) and is_plain_same(state):
            return None
        known = "nothing is proved" if state is None else f"all that is proved is: {state}"
        raise PlanError(
            f"region {name!r} cannot run several nano-batches as one batch: along which axis value "
            f"{value} holds their rows must be proved; {known}"
        )

    def _share(
        self, value: int, nano: int, nanos: Sequence[int], name: str
    ) -> tuple[Cut | None, bool]:
        """What a nano-batch gets of a value made for several: its rows, and whether it gets zeros."""
        state = self.states[value] if value < len(self.states) else None
        if isinstance(state, Partial) and state.power in (0, -1):
            # Of a sum the first gets all; a mean is the mean of each.
            return None, state.power == 0 and nano != nanos[0]
        axis = self._joined(value, name)
        if axis is None:
            return None, False
        each = state.outer * state.inner if isinstance(state, Rows) else 1
        start = self.joint_size(nanos[: list(nanos).index(nano)])
        return Cut(axis, start * each, (start + self.sizes[nano]) * each), False
