"""Numbers that a function hands on without computing tensors from them: a module that counts its calls.

Dynamo makes them results of its graph. There they would be a part of the plan, which would be made anew for
each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def without(gm: Any) -> Callable[..., list[Any]] | None:
    """Takes results out of a Dynamo graph that follow from its numbers alone.

    Args:
        gm: The graph, which is changed.

    Returns:
        From the graph's inputs and its remaining results to all results; None if nothing was taken out.
    """
    graph = gm.graph
    output = next(node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    numeric: set[Any] = set()
    for node in graph.nodes:
        example = node.meta.get("example_value")
        if isinstance(example, torch.SymInt) and (
            node.op == "placeholder"
            or (node.op == "call_function" and numeric.issuperset(node.all_input_nodes))
        ):
            numeric.add(node)
    taken = [n for n, x in enumerate(results) if x in numeric]
    if not taken or len(taken) == len(results):
        return None
    count = _only_numbers(graph, [results[n] for n in taken])
    kept = [n for n in range(len(results)) if n not in taken]
    output.args = (tuple(results[n] for n in kept),)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node in numeric and not node.users:
            graph.erase_node(node)

    def put_in(inputs: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        values: list[Any] = [None] * len(results)
        for n, x in zip(kept, made, strict=True):
            values[n] = x
        for n, x in zip(taken, count(*inputs), strict=True):
            values[n] = x
        return values

    return put_in


def _only_numbers(graph: Any, wanted: Sequence[Any]) -> Callable[..., Sequence[int]]:
    """The function of a graph's inputs that computes some of its numbers."""
    needed = set(wanted)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    small = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = small.placeholder(node.name)
        elif node in needed:
            copies[node] = small.node_copy(node, copies.__getitem__)
    small.output(tuple(copies[x] for x in wanted))
    return torch.fx.GraphModule({}, small).forward  # type: ignore[no-any-return]


def counted(
    run: Callable[..., Sequence[Any]], put_in: Callable[..., list[Any]]
) -> Callable[..., Sequence[Any]]:
    """The function with the numbers among its results again."""

    def call(*args: Any) -> Sequence[Any]:
        return put_in(args, run(*args))

    return call
