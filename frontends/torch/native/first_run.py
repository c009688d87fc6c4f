"""Whether operators of the user's draw random numbers: a plan of several lanes finds out at its first call.

PyTorch knows it of operators tagged ``nondeterministic_seeded``, which keep their order on lanes. Of others
that are not PyTorch's nobody knows. So the first call runs operator by operator, in the program's order, and
looks at the generators before and after each of these. Those that drew are ordered from there on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import step_failed
from dynaflow_xla.frontends.torch.capture import own
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload
from dynaflow_xla.frontends.torch.capture.random import states
from dynaflow_xla.frontends.torch.native.memory import Memory, results_of
from dynaflow_xla.ir.graph import Operator, Value

_drew: Recent[Hashable, bool] = Recent(1024)
"""Operators of the user's that were seen to draw."""


def _unknown(op: Operator) -> list[Any]:
    """Operators of the user's that this one runs and of which nobody knows whether they draw."""
    if not isinstance(op.payload, Payload):
        return []
    seeded = torch.Tag.nondeterministic_seeded
    return [x for x in own.targets(op.payload) if seeded not in x.tags]


def _drawing(op: Operator) -> bool:
    return any(_drew.get(x) for x in _unknown(op))


def to_be_watched(captured: Captured) -> bool:
    """Whether another order may draw other numbers, as far as is known before a call."""
    tokens = {v.id for v in captured.graph.values if v.dtype == "token"}
    unknown = [
        op for op in captured.graph.ops if _unknown(op) and not tokens.intersection(op.outputs)
    ]
    return len(unknown) + bool(tokens) > 1 and bool(unknown)


def ordered(captured: Captured) -> Captured:
    """The graph with all that is known to draw in the program's order, by tokens as ``capture`` has them."""
    graph = captured.graph
    tokens = {v.id for v in graph.values if v.dtype == "token"}
    if not any(_drawing(op) and not tokens.intersection(op.outputs) for op in graph.ops):
        return captured
    values, ops = list(graph.values), list(graph.ops)
    examples = dict(captured.examples)
    last: int | None = None
    for index, op in enumerate(ops):
        made = [v for v in op.outputs if v in tokens]
        if not made and not _drawing(op):
            continue
        if not made:
            made = [len(values)]
            values.append(Value(made[0], (), "token", 0, index))
            examples[made[0]] = None
        inputs = tuple(v for v in op.inputs if v not in tokens)
        ops[index] = replace(
            op,
            inputs=inputs if last is None else (*inputs, last),
            outputs=tuple(v for v in op.outputs if v not in made) + tuple(made),
            once=True,
        )
        (last,) = made
        tokens.add(last)
    graph = replace(graph, values=tuple(values), ops=tuple(ops))
    return replace(captured, graph=graph, examples=examples)


def run(captured: Captured, memory: Memory, inputs: Sequence[Any]) -> tuple[list[Any], bool]:
    """Runs a graph in the program's order; the results, and whether operators drew that were not known to."""
    env = memory.environment(inputs)
    generators = states.Generators((), {})
    kept = {v for v in (*memory.results, *captured.graph.outputs) if isinstance(v, int)}
    kept.update(v for pair in memory.written for v in pair)
    last = {v: op.index for op in captured.graph.ops for v in op.inputs}
    news = False
    with torch.no_grad():
        for op in captured.graph.ops:
            payload: Payload = op.payload
            args, kwargs = payload.mapped(lambda ref: env[ref.value])
            watched = [x for x in _unknown(op) if not _drew.get(x)]
            before = generators.of_torch() if watched else {}
            try:
                made = payload.target(*args, **kwargs)
            except Exception as error:
                where = "" if op.source is None else f" (from {op.source})"
                raise step_failed(
                    f"operator {op.kind!r} of {captured.graph.name!r}{where} failed: "
                    f"{type(error).__name__}: {error}",
                    error,
                ) from error
            if watched and states.changed(before, generators.of_torch()):
                news = True
                for target in watched:
                    _drew[target] = True
            results = made if payload.multiple else (made,)
            for value, result in zip(payload.outputs, results, strict=False):
                if value is not None:
                    env[value] = result
            del args, kwargs, made, results
            for value in op.inputs:
                if last[value] == op.index and value not in kept:
                    env[value] = None
    return results_of(memory, env), news
