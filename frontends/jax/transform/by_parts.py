"""A split function without schedule, as its nano-batches define it: for derivatives of it.

The graph of a plan will not do: a capture looks through the rules of ``custom_jvp`` and ``custom_vjp``
functions, which a derivative has to follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynaflow_xla.batch.expansion.specs import PARTS, Cut, MergeSpec, OutSpec, Parts
from dynaflow_xla.batch.proof import Mean, Sum
from dynaflow_xla.frontends.jax.batch.split import SplitCapture
from dynaflow_xla.frontends.jax.batch.split_functions import ARRAYS
from dynaflow_xla.frontends.jax.capture import dependence
from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.frontends.jax.capture.dependence import Reads


class ByParts:
    """The function of its inputs and results; those that stay in parts are one for each nano-batch.

    Args:
        split: The split, in which nothing runs once.
        whole: The function at its full size.
        flat_function: A captured function without schedule.
    """

    def __init__(
        self,
        split: SplitCapture,
        whole: Captured,
        flat_function: Callable[[Captured], Callable[..., list[Any]]],
    ):
        self._split, self._whole = split, whole
        self.parts = [split.part(nano) for nano in range(len(split.sizes))]
        self._functions = [flat_function(part) for part in self.parts]

    def __call__(self, *flat: Any) -> list[Any]:
        """The function's inputs to the plan's results."""
        given = self._given(self._split.inputs(flat), ARRAYS.cut)
        results = [fn(*mine) for fn, mine in zip(self._functions, given, strict=True)]
        made: list[Any] = []
        for number, spec in enumerate(self._split.resolved.out_specs):
            if not self._whole.output_is_value[number] and spec is not PARTS:
                made.append(self._whole.outputs[number])
            else:
                made += self._merged(spec, [outs[number] for outs in results])
        return made

    def depends(self, positions: Sequence[Reads]) -> list[Reads]:
        """What each result depends on, given what the plan's inputs do."""
        given = self._given(positions, lambda reads, _: reads)
        results = [
            dependence.of_results(part.jaxpr, mine)
            for part, mine in zip(self.parts, given, strict=True)
        ]
        made: list[Reads] = []
        for number, spec in enumerate(self._split.resolved.out_specs):
            reads = [outs[number] for outs in results]
            made += reads if spec is PARTS else [frozenset[int]().union(*reads)]
        return made

    def _given(self, flat: Sequence[Any], cut: Callable[[Any, Cut], Any]) -> list[list[Any]]:
        """The inputs of each nano-batch."""
        made: list[list[Any]] = [[] for _ in self.parts]
        values = iter(flat)
        for number, axis in enumerate(self._split.resolved.in_specs):
            start = 0
            whole_value = None if isinstance(axis, Parts) else next(values)
            for part, mine in zip(self.parts, made, strict=True):
                if isinstance(axis, Parts):
                    mine.append(next(values))
                elif axis is None:
                    mine.append(whole_value)
                else:
                    rows = part.avals[part.graph.inputs[number]].shape[axis]
                    mine.append(cut(whole_value, Cut(axis, start, start + rows)))
                    start += rows
        return made

    def _merged(self, spec: OutSpec, outs: Sequence[Any]) -> list[Any]:
        sizes = self._split.sizes
        if spec is PARTS:
            return list(outs)
        if isinstance(spec, Sum):
            return [ARRAYS.total(outs, MergeSpec("sum", 0, (1.0,) * len(sizes)))]
        if isinstance(spec, Mean):
            shares = tuple(size / sum(sizes) for size in sizes)
            return [ARRAYS.total(outs, MergeSpec("mean", 0, shares))]
        if isinstance(spec, int):
            return [ARRAYS.joined(outs, MergeSpec("concat", spec, ()))]
        return [outs[0]]  # they are equal
