"""Which plans a CUDA graph can hold: a replay runs kernels, and nothing of the host's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dynaflow_xla.frontends.torch._compat import operators
from dynaflow_xla.frontends.torch.capture import own
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref
from dynaflow_xla.frontends.torch.opaque import regions as opaque

_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
"""By which an operator's author says that it cannot be captured."""

_BY_STRIDES = ("as_strided", "_reshape_alias")


def why_not(captured: Captured) -> str:
    """Why calls of a graph cannot be replays, or ""."""
    for op in captured.graph.ops:
        if not isinstance(op.payload, Payload):
            continue
        if op.kind in opaque.KINDS:
            return "it calls Python code, which a replay would leave out"
        for target in _targets(op.payload):
            if _UNSAFE is not None and _UNSAFE in getattr(target, "tags", ()):
                return f"{target} is marked as unsafe in CUDA graphs"
        if captured.device.type == "cpu" or _places(captured, op.outputs) != {"cpu"}:
            continue
        if torch.Tag.nondeterministic_seeded in getattr(op.payload.target, "tags", ()):
            return "it draws a random number of the CPU's, which a graph would keep"
        if captured.device.type in _places(captured, op.inputs):
            return "it copies a number to the CPU, where a replay would have it too late"
    return ""


def repeatable(captured: Captured) -> bool:
    """Whether a call that failed can be made again: nothing draws, nor runs code of the user's."""
    payloads = [op.payload for op in captured.graph.ops]
    if any(value.dtype == "token" for value in captured.graph.values):
        return False
    return all(isinstance(p, Payload) and not any(own.targets(p)) for p in payloads)


def read_by_strides(captured: Captured) -> set[int]:
    """Positions of inputs of which strides and offsets say what is read: memory beside them, too."""
    place = {value: {number} for number, value in enumerate(captured.graph.inputs)}
    found: set[int] = set()
    for op in captured.graph.ops:
        if not isinstance(op.payload, Payload) or not op.payload.args:
            continue
        target, (first, *_) = op.payload.target, op.payload.args
        read = place.get(first.value, set()) if isinstance(first, Ref) else set()
        if read and str(getattr(target, "__name__", "")).startswith(_BY_STRIDES):
            found |= read
        elif read and _may_be_view(target):
            place.update((value, read) for value in op.outputs)
    return found


def _targets(payload: Payload) -> Iterator[Any]:
    """What a call runs: itself, and what is in graphs that it is given."""
    yield payload.target
    for inner in payload.args:
        if isinstance(inner, torch.fx.GraphModule):
            yield from (n.target for n in inner.graph.nodes if n.op == "call_function")


def _places(captured: Captured, values: tuple[int, ...]) -> set[str]:
    # Not ``get``: those of nano-batches are made when asked for.
    examples = [captured.examples[value] for value in values]
    return {x.device.type for x in examples if isinstance(x, torch.Tensor)}


def _may_be_view(target: Any) -> bool:
    if not isinstance(target, operators.Operator):
        return False
    returns = target._schema.returns
    return operators.is_composite(target) or any(r.alias_info is not None for r in returns)
