"""A captured graph split over its batch: expansion, and the functions of regions that need their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dynaflow_xla.batch import expand
from dynaflow_xla.batch.split import Arrays, SplitGraph
from dynaflow_xla.batch.states import Rows, State
from dynaflow_xla.frontends.torch.batch import handed
from dynaflow_xla.frontends.torch.capture.captured import (
    Captured,
    Payload,
    Placed,
    Ref,
    overlapping,
)
from dynaflow_xla.frontends.torch.capture.sizes import Evaluator, Layout, Sized
from dynaflow_xla.frontends.torch.native import regions
from dynaflow_xla.ir.graph import Op, Region
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.recording import Decision, Recording

Function = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Split(SplitGraph):
    """A graph of all nano-batches.

    Attributes:
        captured: The expanded graph in the form that running takes.
        whole: The graph at full size.
        at: The graph by size.
        sized: Makes the graph at another size.
        weighted: Positions among the whole's inputs of gradients handed out in shares.
        taken: By such a position: what the forward kept in parts.
        kept_parts: For each result of a call how the parts lie that the backward gets, if it is such.
        drawn: Adds the random numbers of the whole batch to the inputs of a call.
    """

    captured: Captured
    whole: Sized
    at: dict[int, Sized]
    sized: Callable[[int], Sized] = field(repr=False)
    kept: tuple[int, ...] = ()
    weighted: frozenset[int] = frozenset()
    taken: Mapping[int, handed.Taken] = field(default_factory=dict)
    kept_parts: tuple[handed.Joined | None, ...] = ()
    drawn: Callable[[Sequence[Any]], Sequence[Any]] = field(default=lambda given: given, repr=False)

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        """Inputs of the expanded graph from those of the captured one."""
        made: list[Any] = []
        batch = sum(self.sizes)
        given = self.drawn(given)
        for position, number in enumerate(self.kept):
            if position in self.weighted:
                made += [given[number] * (size / batch) for size in self.sizes]
            elif (how := self.taken.get(position)) is not None:
                made += how.parts(given[number], self.sizes)
            else:
                made.append(handed.whole(given[number]))
        return taken(given, made)

    def grouped(self, recording: Recording) -> tuple[Split, Recording]:
        """The same with the recording's groups as one region each.

        Raises:
            PlanError: a region that cannot run several nano-batches as one.
        """
        groups = recording.groups()
        if not groups:
            return self, recording
        expanded, new = self.grouped_graph(groups, lambda size: self._at(size).graph)
        return replace(self, expanded=expanded), recording.renumbered(new)

    def _at(self, size: int) -> Captured:
        """The graph at another size."""
        if size not in self.at:
            self.at[size] = self.sized(size)
        return self.at[size].captured

    def functions(self, recording: Recording) -> dict[int, Function]:
        """Functions of the regions that do not run operator by operator.

        Raises:
            PlanError: a region that cannot run several nano-batches as one.
        """
        made: dict[int, Function] = {}
        decisions = {d.region: d for d in recording.decisions}
        for region, origin in zip(self.pg.regions, self.expanded.origins, strict=True):
            if isinstance(origin, expand.MergeSpec):
                made[region.id] = self._merge(region, origin)
            elif len(origin.nanos) > 1:
                made[region.id] = self._batched(region, origin, decisions[region.id])
            elif decisions[region.id].replace is not None:
                made[region.id] = self._replaced(region, origin, decisions[region.id])
        return made

    def _merge(self, region: Region, spec: expand.MergeSpec) -> Function:
        reads = [region.inputs.index(v) for v, _ in self.expanded.merge_reads[region.id]]
        cuts = [cut for _, cut in self.expanded.merge_reads[region.id]]
        (value,) = self.pg.graph.ops[region.ops[0]].outputs
        how = _joined(
            self.captured.examples[value], self.states, self.expanded.sources[value][1], spec.axis
        )

        if spec.how == "sum" and reads == [0, 1] and cuts == [None, None]:
            return _sum_of_two

        def run(*args: Any) -> list[Any]:
            parts = [_ARRAYS.read(args[n], cut) for n, cut in zip(reads, cuts, strict=True)]
            if spec.how == "concat":
                return [how.whole(parts)]
            return [_ARRAYS.total(parts, spec)]

        return run

    def _replaced(self, region: Region, origin: expand.Origin, decision: Decision) -> Function:
        number = origin.nanos[0]
        local = self.cuts[number].regions[origin.region]
        assert decision.replace is not None
        captured = self.at[self.sizes[number]].captured
        fn = regions.replacement(decision.replace, captured, local, str(decision.source))
        return self.single(fn, region, local, _ARRAYS)

    def _batched(self, region: Region, origin: expand.Origin, decision: Decision) -> Function:
        captured = self._at(self.joint_size(origin.nanos))
        cut = self.joint_cut(origin.nanos, captured.graph)
        local = cut.regions[origin.region]
        if decision.replace is None:
            fn = region_function(captured, cut, local)
        else:
            fn = regions.replacement(decision.replace, captured, local, str(decision.source))
        return self.several(fn, region, local, _ARRAYS)


def taken(given: Sequence[Any], made: list[Any]) -> list[Any]:
    """``made``, after the list it was taken from was emptied: who runs it owns the inputs."""
    if isinstance(given, list):
        given.clear()
    return made


def _layout(example: torch.Tensor) -> Layout:
    return Layout.of(example, Evaluator({}))


def _sum_of_two(a: Any, b: Any) -> tuple[Any]:
    """The most frequent total, of a parameter's gradient; rounded once, whatever the type."""
    return (torch.add(a, b),)


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
    stretch = regions.build_stretch(
        captured, pg, [region.id], set(region.outputs), set(region.inputs), {}
    )
    size = len(captured.graph.values)

    def run(*args: Any) -> list[Any]:
        env: list[Any] = [None] * size
        for value, x in zip(region.inputs, args, strict=True):
            env[value] = x
        del args
        stretch.run(env)
        return [env[v] for v in region.outputs]

    return run


def split(
    whole: Sized,
    at: dict[int, Sized],
    cuts: Sequence[PartitionedGraph],
    sizes: tuple[int, ...],
    in_specs: Mapping[int, expand.InSpec],
    out_specs: Mapping[int, expand.OutSpec],
    states: Sequence[State],
    kept: Sequence[int],
    sized: Callable[[int], Sized],
    between: handed.Handed,
) -> Split:
    """Puts the nano-batches into one graph.

    Args:
        whole: The graph at full size.
        at: The graph by size, for each of ``sizes``.
        cuts: For each nano-batch its regions.
        sizes: Rows of each nano-batch.
        in_specs: By value id of the inputs.
        out_specs: By value id of the outputs.
        states: What is proved of each value.
        kept: For each input of ``whole`` its position among the inputs of a call.
        sized: Makes the graph at another size, for several nano-batches that run as one.
        between: What goes from a forward to its backward without being put together.

    Raises:
        UnsupportedError: effects under a split.
        PlanError: a result cannot be put together as asked.
    """
    graph = whole.captured.graph
    unique = tuple(dict.fromkeys(v for v in graph.outputs if v not in between.same))
    taken = {v: name for v, name in between.taken.items() if isinstance(in_specs.get(v), int)}
    specs = [expand.PARTS if v in taken else in_specs[v] for v in graph.inputs]
    ways = [expand.PARTS if v in between.parts else out_specs[v] for v in unique]
    slim = [replace(c, graph=replace(c.graph, outputs=unique)) for c in cuts]
    # Equal nano-batches share one graph, by which regions that run once for all are known.
    shared = {id(c.graph): s.graph for c, s in zip(cuts, slim, strict=True)}
    slim = [replace(s, graph=shared[id(c.graph)]) for c, s in zip(cuts, slim, strict=True)]
    expanded = expand.expand(
        replace(graph, outputs=unique), slim, sizes, specs, ways, strided=True,
    )  # fmt: skip
    parts = [at[size].captured for size in sizes]
    made = expanded.pg.graph
    rest = iter(made.outputs)
    result = {
        v: list(itertools.islice(rest, len(sizes) if v in between.parts else 1)) for v in unique
    }
    position = 0
    input_of: dict[int, int] = {}
    weighted = set()
    parted: dict[int, handed.Taken] = {}
    for number, (value, spec) in enumerate(zip(graph.inputs, specs, strict=True)):
        input_of[value] = made.inputs[position]
        if value in taken:
            axis = in_specs[value]
            assert isinstance(axis, int)
            parted[number] = handed.Taken(
                taken[value],
                _joined(whole.captured.examples[value], states, value, axis),
                tuple(_layout(part.examples[value]) for part in parts),
            )
        elif isinstance(spec, expand.Parts):
            weighted.add(number)
        position += len(sizes) if isinstance(spec, expand.Parts) else 1
    captured = Captured(
        graph=replace(made, ops=_payloads(expanded, parts, cuts)),
        ids={},
        examples=_Examples(expanded, whole.captured, parts),
        outputs=[
            one
            for o in whole.captured.outputs
            for one in (result[between.same.get(o, o)] if isinstance(o, int) else [o])
        ],
        epilogue=[(input_of[w], result[v][0]) for w, v in whole.captured.epilogue],
        module=whole.captured.module,
        device=whole.captured.device,
    )
    captured.placed = _placed(expanded, captured, states)
    for view in made.views:
        example = captured.examples[view.value]
        runs = _runs(states, expanded.sources[view.value][1])
        whole_strides = captured.examples[made.inputs[view.input]].stride()
        lies = all(
            a == b
            for a, b, n in zip(whole_strides, example.stride(), example.shape, strict=True)
            if n > 1
        )
        if runs > 1 or not lies:
            # Operators of the graph count on the strides it was captured with.
            captured.copied[view.value] = (runs, _layout(example).empty)
    expanded = replace(expanded, pg=replace(expanded.pg, graph=captured.graph))
    joined = [_kept(out, whole, out_specs, states, between) for out in whole.captured.outputs]
    return Split(
        expanded, sizes, tuple(slim), states, captured, whole, at, sized, tuple(kept),
        frozenset(weighted), parted, tuple(joined),
    )  # fmt: skip


def _joined(example: torch.Tensor, states: Sequence[State], value: int, axis: int) -> handed.Joined:
    """How parts of a value of the captured graph lie in the whole."""
    runs = _runs(states, value)
    return handed.Joined(_layout(example), axis, runs, _shared(example, axis, runs))


def _kept(
    out: Any,
    whole: Sized,
    out_specs: Mapping[int, expand.OutSpec],
    states: Sequence[State],
    between: handed.Handed,
) -> handed.Joined | None:
    """How parts of a result lie that stays in parts."""
    axis = out_specs[out] if out in between.parts else None
    return (
        _joined(whole.captured.examples[out], states, out, axis) if isinstance(axis, int) else None
    )


def _payloads(
    expanded: expand.Expanded, parts: Sequence[Captured], cuts: Sequence[PartitionedGraph]
) -> tuple[Op, ...]:
    """The expanded operators with calls over the expanded graph's values."""
    ops = list(expanded.pg.graph.ops)
    for region, origin in zip(expanded.pg.regions, expanded.origins, strict=True):
        if not isinstance(origin, expand.Origin):
            continue
        (number,) = origin.nanos
        local = cuts[number].regions[origin.region]
        for index, inner in zip(region.ops, local.ops, strict=True):
            old, new = parts[number].graph.ops[inner], ops[index]
            ids = dict(zip(old.inputs, new.inputs, strict=True))
            ids.update(zip(old.outputs, new.outputs, strict=True))
            payload: Payload = old.payload

            def put(ref: Ref, ids: dict[int, int] = ids) -> Ref:
                return Ref(ids[ref.value])

            args, kwargs = payload.mapped(put)
            outputs = tuple(None if v is None else ids[v] for v in payload.outputs)
            made = replace(payload, args=args, kwargs=kwargs, outputs=outputs)
            ops[index] = replace(new, payload=made)
    return tuple(ops)


def _runs(states: Sequence[State], value: int) -> int:
    """How many runs of the batch a value holds one after the other."""
    state = states[value]
    return state.runs if isinstance(state, Rows) else 1


def _shared(example: torch.Tensor, axis: int, runs: int) -> tuple[int, ...]:
    """Dimensions of a part (its runs apart) along which the memory is the same."""
    made = overlapping(example)
    if runs == 1:
        return made
    return tuple(d + n for d in made for n in ((0, 1) if d == axis else (int(d > axis),)))


def _placed(
    expanded: expand.Expanded, captured: Captured, states: Sequence[State]
) -> tuple[Placed, ...]:
    """Where the parts of joined results go."""
    placed = []
    slot = len(captured.graph.values)
    for join in captured.graph.joins:
        rows = [captured.graph.values[v].shape[join.axis] for v in join.parts]
        starts = [sum(rows[:n]) for n in range(len(rows))]
        places = tuple(
            (value, slot + n, start, count)
            for n, (value, start, count) in enumerate(zip(join.parts, starts, rows, strict=True))
        )
        slot += len(rows)
        layout = _layout(captured.examples[join.value])
        runs = _runs(states, expanded.sources[join.value][1])
        shared = _shared(captured.examples[join.value], join.axis, runs)
        placed.append(Placed(join.value, layout.empty, join.axis, runs, places, shared))
    return tuple(placed)


class _Examples(dict[int, Any]):
    """Example values of the expanded graph, made when asked for."""

    def __init__(
        self, expanded: expand.Expanded, whole: Captured, parts: Sequence[Captured]
    ) -> None:
        super().__init__()
        self._sources, self._whole, self._parts = expanded.sources, whole, parts

    def __missing__(self, value: int) -> Any:
        number, local = self._sources[value]
        made = (self._whole if number < 0 else self._parts[number]).examples[local]
        self[value] = made
        return made
