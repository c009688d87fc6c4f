"""Regions compiled by Inductor: each becomes one function, compiled once for each structure."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch import _compat
from dynaflow_xla.frontends.torch.capture import Captured, Payload
from dynaflow_xla.ir import PartitionedGraph, Region

_lock = threading.Lock()
_compiled: dict[Any, Callable[..., Sequence[Any]]] = {}


def compile_regions(
    captured: Captured,
    pg: PartitionedGraph,
    lanes_used: int,
    made: dict[int, Callable[..., Sequence[Any]]],
    options: Mapping[str, Any] | None,
) -> None:
    """Adds a compiled function to ``made`` for each region that can have one.

    Regions that draw random numbers run operator by operator: Inductor's random numbers are not the
    original's. So do those without a tensor among their results.

    Raises:
        UnsupportedError: sizes are symbolic.
    """
    if captured.symbolic:
        raise UnsupportedError(
            "compiler='inductor' compiles for fixed sizes, and this graph was captured with sizes that "
            "may change; leave dynamic out of torch's settings, or use compiler='eager'"
        )
    settings = {**(options or {})}
    if lanes_used > 1:
        settings["cpp.threads"] = 1  # Inductor writes the number of threads into its kernels
    for region in pg.regions:
        if region.id in made or region.outer or not _compilable(captured, region):
            continue
        module, key = _module(captured, region)
        full_key = (key, tuple(sorted(settings.items())))
        with _lock:
            if full_key not in _compiled:
                examples = [_concrete(captured.examples[v]) for v in region.inputs]
                _compiled[full_key] = _compat.inductor(module, examples, settings)
            made[region.id] = _compiled[full_key]


def _compilable(captured: Captured, region: Region) -> bool:
    tensors = all(
        isinstance(captured.examples[v], torch.Tensor) for v in (*region.inputs, *region.outputs)
    )
    ops = [captured.graph.ops[i] for i in region.ops]
    return bool(tensors and region.outputs and not any(op.once for op in ops))


def _concrete(example: torch.Tensor) -> torch.Tensor:
    """A real tensor like a fake one."""
    return torch.empty_strided(
        example.size(), example.stride(), dtype=example.dtype, device=example.device
    )


def _module(captured: Captured, region: Region) -> tuple[Any, Any]:
    """The region as a graph module, and a key that equal structures share."""
    graph = torch.fx.Graph()
    root = torch.nn.Module()
    values: dict[int, Any] = {}
    key: list[Any] = []
    for value in region.inputs:
        values[value] = graph.placeholder(f"v{len(values)}")
        example = captured.examples[value]
        key.append((tuple(example.size()), tuple(example.stride()), example.dtype))
    for index in region.ops:
        payload: Payload = captured.graph.ops[index].payload

        def read(node: Any, payload: Payload = payload) -> Any:
            if node in payload.constants:
                constant = payload.constants[node]
                if not isinstance(constant, torch.Tensor | torch.nn.Module):
                    return constant
                name = f"constant{len(key)}"
                setattr(root, name, constant)
                key.append(id(constant))
                return graph.get_attr(name)
            return values[captured.ids[node]]

        args = torch.fx.node.map_arg(payload.args, read)
        kwargs = torch.fx.node.map_arg(payload.kwargs, read)
        node = graph.call_function(payload.target, args, kwargs)
        key.append((str(payload.target), str(args), str(kwargs)))
        if payload.multiple:
            for position, part in enumerate(payload.outputs):
                if part is not None:
                    values[part] = graph.call_function(operator.getitem, (node, position))
        elif payload.outputs and payload.outputs[0] is not None:
            values[payload.outputs[0]] = node
    graph.output(tuple(values[v] for v in region.outputs))
    key.append(str([values[v].name for v in region.outputs]))
    return torch.fx.GraphModule(root, graph), tuple(key)
