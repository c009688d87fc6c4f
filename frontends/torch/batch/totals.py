"""What is computed from totals over the batch: once, when the nano-batches have made these complete.

A loss that is a ratio of two sums (a mean over those rows whose label counts), the norm of a sum, a
penalty added to one: no nano-batch can compute them, and all that they need is small. So the split
graph ends with the totals, and these operators run on the caller's thread behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dynaflow_xla.batch.expansion.specs import OutSpec
from dynaflow_xla.batch.proof import Mean, Sum
from dynaflow_xla.batch.states import Late, Partial, State
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref
from dynaflow_xla.frontends.torch.capture.sizes import Sized
from dynaflow_xla.ir.graph import Operator


@dataclass(frozen=True)
class Tail:
    """Operators behind the split graph.

    Attributes:
        ops: In order.
        outputs: Of the original graph.
        made: For each result of the split graph: its value, or None for a constant.
    """

    ops: tuple[Operator, ...]
    outputs: tuple[Any, ...]
    made: tuple[int | None, ...]

    def finisher(self, whole: Sized) -> Callable[[list[Any]], list[Any]]:
        """From the results of the split graph to those of the original one.

        Args:
            whole: The split graph at the size of the whole batch, for the numbers.
        """
        numbers = whole.numbers
        calls: list[tuple[Any, Any, Any, Payload]] = []
        for op in self.ops:
            payload: Payload = op.payload

            def put(ref: Ref) -> Any:
                return numbers.get(ref.value, ref)

            calls.append((payload.target, *payload.mapped(put), payload))

        def run(results: list[Any]) -> list[Any]:
            env = {v: r for v, r in zip(self.made, results, strict=True) if v is not None}
            kept = iter([r for v, r in zip(self.made, results, strict=True) if v is None])
            with torch.no_grad():
                for target, args, kwargs, payload in calls:
                    given = Payload(target, args, kwargs, (), False).mapped(lambda r: env[r.value])
                    out = target(*given[0], **given[1])
                    if not payload.outputs:
                        continue  # a check
                    for value, made in zip(
                        payload.outputs, out if payload.multiple else [out], strict=True
                    ):
                        if value is not None:
                            env[value] = made
            return [env[out] if isinstance(out, int) else next(kept) for out in self.outputs]

        return run

    def describe(self) -> str:
        """A line for ``explain``."""
        kinds = ", ".join(dict.fromkeys(op.kind for op in self.ops))
        return f"{len(self.ops)} operators ({kinds}) run behind the nano-batches, on totals over the batch"


def behind(
    captured: Captured, states: Sequence[State], specs: dict[int, OutSpec]
) -> tuple[Captured, dict[int, OutSpec], Tail | None]:
    """Takes what is computed from totals out of a graph.

    Args:
        captured: The graph with its open sizes.
        states: By value id.
        specs: How its outputs are put together.

    Returns:
        The graph that ends with the totals, how its outputs are put together, and what runs behind it.
    """
    late = {n for n, state in enumerate(states) if isinstance(state, Late)}
    if not late:
        return captured, specs, None
    graph = captured.graph
    wanted = {out for out in captured.outputs if isinstance(out, int) and out in late}
    ops: list[Operator] = []
    read: dict[int, None] = {}
    for op in reversed(graph.ops):
        # A check that makes nothing belongs to what it reads.
        checks = not op.outputs and not late.isdisjoint(op.inputs)
        if not checks and wanted.isdisjoint(op.outputs):
            continue
        ops.append(op)
        for value in op.inputs:
            if value in late:
                wanted.add(value)
            elif isinstance(captured.examples[value], torch.Tensor):
                read[value] = None
    specs = {v: spec for v, spec in specs.items() if v not in late}
    for value in read:
        state = states[value]
        total: OutSpec = None
        if isinstance(state, Partial):
            total = Mean() if state.power else Sum()
        specs.setdefault(value, total)
    kept = [out for out in captured.outputs if not (isinstance(out, int) and out in late)]
    more = [value for value in read if value not in kept]
    outputs = [*kept, *more]
    ids = dict.fromkeys(v for v in (*graph.outputs, *more) if v not in late)
    behind_it = {op.index for op in ops}
    left = [op for op in graph.ops if late.isdisjoint(op.outputs) and op.index not in behind_it]
    producers = {v: n for n, op in enumerate(left) for v in op.outputs}
    slim = replace(
        graph,
        values=tuple(replace(v, producer=producers.get(v.id, -1)) for v in graph.values),
        ops=tuple(replace(op, index=n) for n, op in enumerate(left)),
        outputs=tuple(ids),
    )
    made = tuple(out if isinstance(out, int) else None for out in outputs)
    tail = Tail(tuple(reversed(ops)), tuple(captured.outputs), made)
    return replace(captured, graph=slim, outputs=outputs), specs, tail
