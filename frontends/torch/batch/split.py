"""A captured graph split over its batch: expansion, and the functions of regions that need their own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dynaflow_xla.batch import expand
from dynaflow_xla.batch.states import Partial, Rows, Same, State, is_plain_same
from dynaflow_xla.errors import PlanError
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
class Split:
    """A graph of all nano-batches.

    Attributes:
        captured: The expanded graph in the form that running takes.
        expanded: The same, with where everything comes from.
        sizes: Rows of each nano-batch.
        whole: The graph at full size.
        at: The graph by size.
        cuts: The partitioned graph of each nano-batch.
        states: What is proved of each value of the graph.
        sized: Makes the graph at another size.
        weighted: Positions among the whole's inputs of gradients handed out in shares.
        taken: By such a position: what the forward kept in parts.
        kept_parts: For each result of a call how the parts lie that the backward gets, if it is such.
        drawn: Adds the random numbers of the whole batch to the inputs of a call.
    """

    captured: Captured
    expanded: expand.Expanded
    sizes: tuple[int, ...]
    whole: Sized
    at: dict[int, Sized]
    cuts: tuple[PartitionedGraph, ...]
    states: Sequence[State]
    sized: Callable[[int], Sized] = field(repr=False)
    kept: tuple[int, ...] = ()
    weighted: frozenset[int] = frozenset()
    taken: Mapping[int, handed.Taken] = field(default_factory=dict)
    kept_parts: tuple[handed.Joined | None, ...] = ()
    drawn: Callable[[Sequence[Any]], Sequence[Any]] = field(default=lambda given: given, repr=False)

    @property
    def pg(self) -> PartitionedGraph:
        """Regions of all nano-batches."""
        return self.expanded.pg

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
        groups = [d.group for d in recording.decisions if d.group]
        if not groups:
            return self, recording
        costs = []
        for members in groups:
            nanos = [self.pg.regions[m].nano for m in members]
            origin = self.expanded.origins[members[0]]
            assert isinstance(origin, expand.Origin)  # the recorder hides merges
            costs.append(self._joint(nanos)[1].regions[origin.region])
        expanded, new = expand.group(self.expanded, groups, costs)
        decisions = tuple(replace(d, region=new[d.region]) for d in recording.decisions)
        return replace(self, expanded=expanded), Recording(decisions)

    def _joint(self, nanos: Sequence[int]) -> tuple[Captured, PartitionedGraph]:
        """The graph at the joint size of several nano-batches, and its cut."""
        joint = sum(self.sizes[n] for n in nanos)
        if joint not in self.at:
            self.at[joint] = self.sized(joint)
        captured = self.at[joint].captured
        cut = expand.transfer(self.cuts[nanos[0]], captured.graph)
        if cut is None:
            raise PlanError(
                f"nano-batches {list(nanos)} of {captured.graph.name!r} cannot run as one batch: the "
                f"graph has other operators for {joint} rows"
            )
        return captured, cut

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
            parts = [_cut(args[n], cut) for n, cut in zip(reads, cuts, strict=True)]
            if spec.how == "concat":
                return [how.whole(parts)]
            return [_total(parts, spec)]

        return run

    def _replaced(self, region: Region, origin: expand.Origin, decision: Decision) -> Function:
        number = origin.nanos[0]
        local = self.cuts[number].regions[origin.region]
        assert decision.replace is not None
        fn = regions.replacement(
            decision.replace, self.at[self.sizes[number]].captured, local, str(decision.source)
        )
        reads = [region.inputs.index(v) for v, _ in origin.reads[0]]
        kept = [local.outputs.index(self.expanded.sources[v][1]) for v in region.outputs]

        def run(*args: Any) -> list[Any]:
            outs = fn(*[args[n] for n in reads])
            return [outs[n] for n in kept]

        return run

    def _batched(self, region: Region, origin: expand.Origin, decision: Decision) -> Function:
        captured, cut = self._joint(origin.nanos)
        local = cut.regions[origin.region]
        if decision.replace is None:
            fn = region_function(captured, cut, local)
        else:
            fn = regions.replacement(decision.replace, captured, local, str(decision.source))
        axes = [self._joined(v, region.name) for v in local.inputs]
        reads = [[region.inputs.index(v) for v, _ in each] for each in origin.reads]
        places = []
        for value in region.outputs:
            number, inner = self.expanded.sources[value]
            place = local.outputs.index(inner)
            places.append((place, *self._share(inner, number, origin.nanos, region.name)))

        def run(*args: Any) -> list[Any]:
            joined = []
            for position, axis in enumerate(axes):
                parts = [args[each[position]] for each in reads]
                joined.append(parts[0] if axis is None else torch.cat(parts, axis))
            outs = fn(*joined)
            return [
                torch.zeros_like(outs[n]) if zero else _cut(outs[n], rows)
                for n, rows, zero in places
            ]

        return run

    def _joined(self, value: int, name: str) -> int | None:
        """Along which axis nano-batches of a value lie, None if it is the same in all."""
        state = self.states[value]
        if isinstance(state, Rows) and state.power == 0 and _runs(self.states, value) == 1:
            return state.axis
        if isinstance(state, Same) and is_plain_same(state):
            return None
        raise PlanError(
            f"region {name!r} cannot run several nano-batches as one batch: along which axis value "
            f"{value} holds their rows must be proved; all that is proved is: {state}"
        )

    def _share(
        self, value: int, number: int, nanos: Sequence[int], name: str
    ) -> tuple[expand.Cut | None, bool]:
        """What a nano-batch gets of a value made for several: its rows, and whether it gets zeros."""
        state = self.states[value]
        if isinstance(state, Partial) and state.power in (0, -1):
            # Of a sum the first gets all; a mean is the mean of each.
            return None, state.power == 0 and number != nanos[0]
        axis = self._joined(value, name)
        if axis is None:
            return None, False
        each = state.inner if isinstance(state, Rows) else 1
        start = sum(self.sizes[n] for n in nanos[: list(nanos).index(number)])
        return expand.Cut(axis, start * each, (start + self.sizes[number]) * each), False


def taken(given: Sequence[Any], made: list[Any]) -> list[Any]:
    """``made``, after the list it was taken from was emptied: who runs it owns the inputs."""
    if isinstance(given, list):
        given.clear()
    return made


def _layout(example: torch.Tensor) -> Layout:
    return Layout.of(example, Evaluator({}))


def _cut(x: Any, cut: expand.Cut | None) -> Any:
    return x if cut is None else x.narrow(cut.axis, cut.start, cut.stop - cut.start)


def _sum_of_two(a: Any, b: Any) -> tuple[Any]:
    """The most frequent total, of a parameter's gradient; rounded once, whatever the type."""
    return (torch.add(a, b),)


def _total(parts: Sequence[Any], spec: expand.MergeSpec) -> Any:
    dtype = parts[0].dtype
    # Narrow floats are added up as float32: n roundings of a partial sum would add up.
    narrow = dtype in (torch.float16, torch.bfloat16)
    terms = [x.to(torch.float32) if narrow else x for x in parts]
    if spec.how == "mean":
        terms = [x * w for x, w in zip(terms, spec.weights, strict=True)]
    return functools.reduce(torch.add, terms).to(dtype)


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
        captured, expanded, sizes, whole, at, tuple(slim), states, sized, tuple(kept),
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
    # None at all (a repetition of none): then there is nothing to put in order.
    return max(1, state.outer) if isinstance(state, Rows) and state.fill is None else 1


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
