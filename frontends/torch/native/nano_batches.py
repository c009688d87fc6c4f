"""A graph split over its batch: all nano-batches in one graph, planned."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynaflow_xla.batch.expansion import expand
from dynaflow_xla.batch.expansion.specs import PARTS, WHOLE, OutSpec, Parts, RegionOrigin
from dynaflow_xla.batch.states import State, plainly_same
from dynaflow_xla.errors import PlanError
from dynaflow_xla.frontends.torch._compat.modes import with_data
from dynaflow_xla.frontends.torch.batch import handed
from dynaflow_xla.frontends.torch.batch.nano import NanoBatches
from dynaflow_xla.frontends.torch.capture.captured import Captured, JoinedLayout, Payload, Ref
from dynaflow_xla.frontends.torch.capture.context import context_of
from dynaflow_xla.frontends.torch.capture.sizes import Sized
from dynaflow_xla.frontends.torch.native.entry import NativeEntry, cut, planned_entry
from dynaflow_xla.frontends.torch.native.split import (
    SplitCapture,
    joined_at,
    layout_of,
    runs_of,
    shared_in,
)
from dynaflow_xla.ir.graph import Operator
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.phases import ONE_PHASE
from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.base import record


def split_entry(nano: NanoBatches, options: Settings) -> NativeEntry:
    """Plans a graph split over its batch.

    Raises:
        UnsupportedError: effects under a split.
        PlanError: the graph has other operators at another size, or cannot be run as decided.
    """
    split = split_graph(nano, *_cuts(nano, options))
    t1 = time.perf_counter()
    context = context_of(nano.captured, options, sum(nano.sizes), nano.kind)
    with with_data():
        recording = record(options.strategy, split.pg, context, joint=nano.kind != "backward")
    split, recording = split.grouped(recording)
    entry = planned_entry(
        split.captured, split.pg, recording, options, nano.kind, t1 - nano.began,
        split.functions(recording), cores=context.cores,
    )  # fmt: skip
    entry.prepare = split.inputs
    entry.finish = handed.packer(split.kept_parts, nano.sizes)
    return entry


def _cuts(
    nano: NanoBatches, options: Settings
) -> tuple[list[PartitionedGraph], PartitionedGraph | None]:
    """For each nano-batch its regions; those of the whole graph, if some of them run once."""
    joining = nano.fit.joining
    whole = nano.whole.captured.graph
    phases = ONE_PHASE if joining is None else joining.phases(whole)
    main = cut(nano.at[max(nano.sizes)].captured, options, phases)
    by_size = {}
    for size in nano.sizes if joining is None else (*nano.sizes, sum(nano.sizes)):
        moved = expand.transfer(main, nano.at[size].captured.graph)
        if moved is None:
            raise PlanError(f"{nano.captured.graph.name!r} has other operators for {size} rows")
        by_size[size] = moved
    cuts = [by_size[size] for size in nano.sizes]
    return cuts, None if joining is None else by_size[sum(nano.sizes)]


def split_graph(
    nano: NanoBatches,
    cuts: Sequence[PartitionedGraph],
    once: PartitionedGraph | None = None,
) -> SplitCapture:
    """Puts the nano-batches into one graph; ``cuts`` are the regions of each, ``once`` of the whole.

    Raises:
        UnsupportedError: effects under a split.
        PlanError: a result cannot be put together as asked.
    """
    whole, sizes, between = nano.whole, nano.sizes, nano.between
    in_specs, out_specs, states = nano.fit.in_specs, nano.fit.out_specs, nano.fit.states
    graph = whole.captured.graph
    unique = tuple(dict.fromkeys(v for v in graph.outputs if v not in between.same))
    taken = {v: name for v, name in between.taken.items() if isinstance(in_specs.get(v), int)}
    specs = [PARTS if v in taken else in_specs[v] for v in graph.inputs]
    ways = [PARTS if v in between.parts else out_specs[v] for v in unique]
    slim = [replace(c, graph=replace(c.graph, outputs=unique)) for c in cuts]
    # Equal nano-batches share one graph, by which regions that run once for all are known.
    shared = {id(c.graph): s.graph for c, s in zip(cuts, slim, strict=True)}
    slim = [replace(s, graph=shared[id(c.graph)]) for c, s in zip(cuts, slim, strict=True)]
    expanded = expand.expand(
        replace(graph, outputs=unique), slim, sizes, specs, ways, strided=True,
        joining=nano.fit.joining, once=once,
        same=plainly_same(states) if nano.fit.proof.status == "separable" else frozenset(),
    )  # fmt: skip
    parts = [nano.at[size].captured for size in sizes]
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
                joined_at(whole.captured.examples[value], states, value, axis),
                tuple(layout_of(part.examples[value]) for part in parts),
            )
        elif isinstance(spec, Parts):
            weighted.add(number)
        position += len(sizes) if isinstance(spec, Parts) else 1
    captured = Captured(
        graph=replace(made, ops=_payloads(expanded, whole.captured, parts, cuts, once)),
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
    for join in made.joins:
        example = captured.examples[join.value]
        runs = runs_of(states, expanded.sources[join.value][1])
        captured.joined[join.value] = JoinedLayout(
            layout_of(example).empty, runs, shared_in(example, join.axis, runs)
        )
    for view in made.views:
        example = captured.examples[view.value]
        runs = runs_of(states, expanded.sources[view.value][1])
        whole_strides = captured.examples[made.inputs[view.input]].stride()
        lies = all(
            a == b
            for a, b, n in zip(whole_strides, example.stride(), example.shape, strict=True)
            if n > 1
        )
        if runs > 1 or not lies:
            # Operators of the graph count on the strides it was captured with.
            captured.copied[view.value] = (runs, layout_of(example).empty)
    expanded = replace(expanded, pg=replace(expanded.pg, graph=captured.graph))
    joined = [_kept(out, whole, out_specs, states, between) for out in whole.captured.outputs]
    return SplitCapture(
        expanded,
        sizes,
        tuple(slim),
        states,
        nano,
        captured,
        frozenset(weighted),
        parted,
        tuple(joined),
        once,
    )


def _kept(
    out: Any,
    whole: Sized,
    out_specs: Mapping[int, OutSpec],
    states: Sequence[State],
    between: handed.Handed,
) -> handed.Joined | None:
    """How parts of a result lie that stays in parts."""
    axis = out_specs[out] if out in between.parts else None
    return (
        joined_at(whole.captured.examples[out], states, out, axis)
        if isinstance(axis, int)
        else None
    )


def _payloads(
    expanded: expand.Expanded,
    whole: Captured,
    parts: Sequence[Captured],
    cuts: Sequence[PartitionedGraph],
    once: PartitionedGraph | None,
) -> tuple[Operator, ...]:
    """The expanded operators with calls over the expanded graph's values."""
    ops = list(expanded.pg.graph.ops)
    for region, origin in zip(expanded.pg.regions, expanded.origins, strict=True):
        if not isinstance(origin, RegionOrigin):
            continue
        (number,) = origin.nanos
        of = once if number == WHOLE else cuts[number]
        part = whole if number == WHOLE else parts[number]
        assert of is not None
        local = of.regions[origin.region]
        for index, inner in zip(region.ops, local.ops, strict=True):
            old, new = part.graph.ops[inner], ops[index]
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
