"""Nano-batches of torch graphs on XLA: the proof is the torch frontend's, the rest the JAX frontend's.

The graph becomes a jaxpr at each size. Tensors are cut as they lie in memory, so the axes of what was
proved are those of the permuted arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynaflow_xla.batch.expansion.specs import PARTS, InSpec, Parts
from dynaflow_xla.batch.joins import AUTOMATIC, Wanted
from dynaflow_xla.batch.states import ORDERED, Rows, State
from dynaflow_xla.errors import SeparabilityError, UnsupportedError
from dynaflow_xla.frontends.jax.batch.split import Resolved
from dynaflow_xla.frontends.torch.batch.nano import NanoBatches
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.on_xla import to_jax
from dynaflow_xla.frontends.torch.on_xla.entry import JaxProgram, Way, XlaEntry, program_of, traced
from dynaflow_xla.frontends.torch.on_xla.to_jax import DimensionOrder, JaxFunction


@dataclass
class _Traced:
    """A function at the sizes of a split; see ``frontends.jax.batch.split.Splittable``."""

    batch: int
    sizes: tuple[int, ...]
    resolved: Resolved | None = None

    def resolve(
        self,
        sizes: Sequence[int],
        *,
        assume_separable: bool,
        also: Sequence[int] = (),
        joins: Wanted = AUTOMATIC,
    ) -> Resolved:
        """What was made of the torch frontend's proof."""
        assert self.resolved is not None and not also, "nano-batches run one by one"
        return self.resolved


def rows(batch: int) -> _Traced:
    """What tells a strategy how many rows there are, for a function that is not split."""
    return _Traced(batch, ())


def whole_entry(captured: Captured, way: Way, kind: str, batch: int) -> XlaEntry:
    """Plans a graph with fixed sizes whose batch is known and stays whole."""
    program = program_of(to_jax.jax_function(captured), way, kind, batched=rows(batch))
    return _entry(program, way, kind, captured)


def split_entry(nano: NanoBatches, way: Way) -> XlaEntry:
    """Plans a graph split over its batch.

    Raises:
        UnsupportedError: a result holds the batch several times over.
        SeparabilityError: the graph has other constants at another size.
    """
    whole, at, sizes, fit = nano.whole, nano.at, nano.sizes, nano.fit
    function = to_jax.jax_function(whole.captured)
    batch = sum(sizes)
    parts = {size: _like(function, at[size].captured) for size in dict.fromkeys(sizes)}
    traces = {batch: traced(function), **{size: traced(part) for size, part in parts.items()}}
    consts = {size: closed.consts for size, (closed, _) in traces.items()}
    if len({len(values) for values in consts.values()}) > 1:
        raise SeparabilityError(
            f"{whole.captured.graph.name!r} has other constants when its batch size is another"
        )
    const_specs: list[InSpec] = []
    const_parts: dict[int, tuple[Any, ...]] = {}
    for number, value in enumerate(consts[batch]):
        others = [consts[size][number] for size in sizes]
        if all(np.array_equal(value, other) for other in others):
            const_specs.append(None)
        else:
            const_specs.append(PARTS)
            const_parts[number] = tuple(others)
    graph = whole.captured.graph
    in_specs: list[InSpec] = []
    shares: dict[int, tuple[float, ...]] = {}
    for number, (place, layout) in enumerate(zip(function.tensors, function.layouts, strict=True)):
        value = graph.inputs[place]
        in_specs.append(_lying(fit.in_specs[value], layout, fit.states[value]))
        if isinstance(fit.in_specs[value], Parts):
            shares[number] = tuple(size / batch for size in sizes)
    out_specs = [
        _lying(fit.out_specs[value], layout, fit.states[value])
        for value, layout in zip(function.results, function.result_layouts, strict=True)
    ]
    resolved = Resolved(
        at={size: found for size, (_, found) in traces.items()},
        in_specs=(*const_specs, *in_specs),
        out_specs=tuple(out_specs),
        const_parts=const_parts,
    )
    program = program_of(
        function, way, nano.kind, traces[batch], _Traced(batch, sizes, resolved), shares
    )
    entry = _entry(program, way, nano.kind, whole.captured)
    entry.prepare = lambda given: nano.chosen(nano.drawn(given))
    return entry


def _entry(program: JaxProgram, way: Way, kind: str, captured: Captured) -> XlaEntry:
    seconds = program.call.made.seconds
    return XlaEntry(way, kind, captured.module, captured.graph.name, program, seconds)


def _like(whole: JaxFunction, captured: Captured) -> JaxFunction:
    """The function at another size, with its tensors lying in memory as the whole's do.

    A batch of one row would seem to lie anywhere.
    """
    made = to_jax.jax_function(captured)

    def lying(
        mine: Sequence[DimensionOrder], given: Sequence[DimensionOrder]
    ) -> list[DimensionOrder]:
        return [
            replace(a, order=b.order, inverse=b.inverse) for a, b in zip(mine, given, strict=True)
        ]

    return replace(
        made,
        layouts=lying(made.layouts, whole.layouts),
        result_layouts=lying(made.result_layouts, whole.result_layouts),
    )


def _lying(spec: Any, layout: DimensionOrder, state: State) -> Any:
    """A cut of a tensor as one of the array it lies in."""
    if not isinstance(spec, int):
        return spec
    if isinstance(state, ORDERED):
        raise UnsupportedError(
            f"a tensor of shape {list(layout.shape)} that the forward keeps for its backward holds rows as "
            "each nano-batch sorted its own; nano-batches of such need backend='torch'"
        )
    if isinstance(state, Rows) and state.fill is None and state.outer > 1:
        raise UnsupportedError(
            f"a tensor of shape {list(layout.shape)} that crosses the graph's border holds the batch "
            f"{state.outer} times over; nano-batches of such need backend='torch'"
        )
    return layout.inverse[spec]
