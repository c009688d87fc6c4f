"""A captured graph split over its batch: expansion, and the functions of regions that need their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynaflow_xla.batch.expansion.specs import WHOLE, CutSpec, MergeSpec, RegionOrigin
from dynaflow_xla.batch.expansion.split import Arrays, SplitGraph
from dynaflow_xla.batch.states import ORDERED, Rows, State
from dynaflow_xla.frontends.torch.batch import handed
from dynaflow_xla.frontends.torch.batch.nano import NanoBatches, taken
from dynaflow_xla.frontends.torch.capture.captured import Captured, overlapping
from dynaflow_xla.frontends.torch.capture.sizes import Evaluator, StridedLayout
from dynaflow_xla.frontends.torch.native.stretches import regions
from dynaflow_xla.ir.graph import Region
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.recording import Decision, Recording

Function = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class SplitCapture(SplitGraph):
    """A graph of all nano-batches.

    Attributes:
        nano: What was asked for.
        captured: The expanded graph in the form that running takes.
        weighted: Positions among the whole's inputs of gradients handed out in shares.
        taken: By such a position: what the forward kept in parts.
        kept_parts: For each result of a call how the parts lie that the backward gets, if it is such.
        once: The cut of the whole graph, if some of its regions run once.
    """

    nano: NanoBatches
    captured: Captured
    weighted: frozenset[int]
    taken: Mapping[int, handed.Taken]
    kept_parts: tuple[handed.Joined | None, ...]
    once: PartitionedGraph | None = None

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        """Inputs of the expanded graph from those of the captured one."""
        given = self.nano.drawn(given)
        if self.nano.kind != "backward":  # whose inputs alone may have come in parts
            return taken(given, [given[number] for number in self.nano.kept])
        made: list[Any] = []
        batch = sum(self.sizes)
        for position, number in enumerate(self.nano.kept):
            if position in self.weighted:
                made += [given[number] * (size / batch) for size in self.sizes]
            elif (how := self.taken.get(position)) is not None:
                made += how.parts(given[number], self.sizes)
            else:
                made.append(handed.whole(given[number]))
        return taken(given, made)

    def grouped(self, recording: Recording) -> tuple[SplitCapture, Recording]:
        """The same with the recording's groups as one region each.

        Raises:
            PlanError: a region that cannot run several nano-batches as one.
        """
        groups = recording.groups()
        if not groups:
            return self, recording
        expanded, new = self.grouped_graph(groups, lambda size: self.nano.captured_at(size).graph)
        return replace(self, expanded=expanded), recording.renumbered(new)

    def functions(self, recording: Recording) -> dict[int, Function]:
        """Functions of the regions that do not run operator by operator.

        Raises:
            PlanError: a region that cannot run several nano-batches as one.
        """
        made: dict[int, Function] = {}
        decisions = {d.region: d for d in recording.decisions}
        for region, origin in zip(self.pg.regions, self.expanded.origins, strict=True):
            if isinstance(origin, MergeSpec):
                made[region.id] = self._merge(region, origin)
            elif isinstance(origin, CutSpec):
                made[region.id] = self._rows(region, origin)
            elif len(origin.nanos) > 1:
                made[region.id] = self._batched(region, origin, decisions[region.id])
            elif decisions[region.id].replace is not None:
                made[region.id] = self._replaced(region, origin, decisions[region.id])
        return made

    def _merge(self, region: Region, spec: MergeSpec) -> Function:
        reads = [region.inputs.index(v) for v, _ in self.expanded.merge_reads[region.id]]
        cuts = [cut for _, cut in self.expanded.merge_reads[region.id]]
        (value,) = self.pg.graph.ops[region.ops[0]].outputs
        how = joined_at(
            self.captured.examples[value], self.states, self.expanded.sources[value][1], spec.axis
        )

        plain = set(spec.weights) <= {1.0}
        if spec.how == "sum" and reads == [0, 1] and cuts == [None, None] and plain:
            return torch.ops.aten.add.Tensor  # the most frequent total: a parameter's gradient

        def run(*args: Any) -> list[Any]:
            parts = [_ARRAYS.read(args[n], cut) for n, cut in zip(reads, cuts, strict=True)]
            if spec.how == "concat":
                return [how.whole(_ARRAYS.weighed(parts, spec))]
            return [_ARRAYS.total(parts, spec)]

        return run

    def _rows(self, region: Region, spec: CutSpec) -> Function:
        """The nano-batches' rows of what was made once, lying as their operators expect them."""
        layouts = [layout_of(self.captured.examples[v]) for v in region.outputs]
        numbers = [self.pg.graph.ops[region.ops[0]].outputs.index(v) for v in region.outputs]
        cuts = [spec.cuts[n] for n in numbers]

        def run(x: Any) -> list[Any]:
            return [
                handed.lying(x.narrow(cut.axis, cut.start, cut.stop - cut.start), layout, cut.axis)
                for cut, layout in zip(cuts, layouts, strict=True)
            ]

        return run

    def _replaced(self, region: Region, origin: RegionOrigin, decision: Decision) -> Function:
        assert decision.replace is not None
        if origin.nanos == (WHOLE,):
            assert self.once is not None
            local, size = self.once.regions[origin.region], sum(self.sizes)
        else:
            number = origin.nanos[0]
            local, size = self.cuts[number].regions[origin.region], self.sizes[number]
        captured = self.nano.captured_at(size)
        fn = regions.replacement(decision.replace, captured, local, str(decision.source))
        return self.single(fn, region, local, _ARRAYS)

    def _batched(self, region: Region, origin: RegionOrigin, decision: Decision) -> Function:
        captured = self.nano.captured_at(self.joint_size(origin.nanos))
        cut = self.joint_cut(origin.nanos, captured.graph)
        local = cut.regions[origin.region]
        if decision.replace is None:
            fn = region_function(captured, cut, local)
        else:
            fn = regions.replacement(decision.replace, captured, local, str(decision.source))
        return self.several(fn, region, local, _ARRAYS)


def layout_of(example: torch.Tensor) -> StridedLayout:
    """How a tensor of fixed sizes lies in memory."""
    return StridedLayout.of(example, Evaluator({}))


def _widened(x: Any) -> Any:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


_ARRAYS = Arrays(
    cut=lambda x, cut: x.narrow(cut.axis, cut.start, cut.stop - cut.start),
    concatenate=torch.cat,
    zeros_like=torch.zeros_like,
    widened=_widened,
    as_type=lambda x, like: x.to(like.dtype),
)


def region_function(captured: Captured, pg: PartitionedGraph, region: Region) -> Function:
    """A region as a function of its inputs."""
    steps = regions.steps_of(captured, pg, [region.id], {})
    outputs, inputs = set(region.outputs), set(region.inputs)
    work = regions.StretchBody((region.id,), steps, outputs, inputs, outputs)
    stretch = regions.build_stretch(captured, pg, work)
    size = len(captured.graph.values)

    def run(*args: Any) -> list[Any]:
        env: list[Any] = [None] * size
        for value, x in zip(region.inputs, args, strict=True):
            env[value] = x
        del args
        stretch.run(env)
        return [env[v] for v in region.outputs]

    return run


def joined_at(
    example: torch.Tensor, states: Sequence[State], value: int, axis: int
) -> handed.Joined:
    """How parts of a value of the captured graph lie in the whole."""
    runs = runs_of(states, value)
    own = isinstance(states[value], ORDERED)
    return handed.Joined(layout_of(example), axis, runs, shared_in(example, axis, runs), own)


def runs_of(states: Sequence[State], value: int) -> int:
    """How many runs of the batch a value holds one after the other."""
    state = states[value]
    return state.runs if isinstance(state, Rows) else 1


def shared_in(example: torch.Tensor, axis: int, runs: int) -> tuple[int, ...]:
    """Dimensions of a part (its runs apart) along which the memory is the same."""
    made = overlapping(example)
    if runs == 1:
        return made
    return tuple(d + n for d in made for n in ((0, 1) if d == axis else (int(d > axis),)))
