"""Numbers that a function hands on without computing tensors from them: a module that counts its calls.

Dynamo makes them results of its graph. There they would be a part of the plan, which would be made anew for
each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Run = Callable[..., Sequence[Any]]


def without(gm: Any) -> Callable[[Run], Run] | None:
    """Takes results out of a Dynamo graph that follow from its numbers alone.

    Args:
        gm: The graph, which is changed.

    Returns:
        Makes of what runs the graph a function with all results again; None if nothing was taken out.
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
    count = _only_numbers(graph, numeric, [results[n] for n in taken])
    kept = [n for n in range(len(results)) if n not in taken]
    output.args = (tuple(results[n] for n in kept),)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node in numeric and not node.users:
            graph.erase_node(node)

    def with_all(run: Run) -> Run:
        def call(*args: Any) -> Sequence[Any]:
            values: list[Any] = [None] * len(results)
            for places, made in ((kept, run(*args)), (taken, count(*args))):
                for n, x in zip(places, made, strict=True):
                    values[n] = x
            return values

        return call

    return with_all


def _only_numbers(graph: Any, numeric: set[Any], wanted: Sequence[Any]) -> Run:
    """The function of a graph's inputs that computes some of its numbers."""
    small = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = small.placeholder(node.name)
        elif node in numeric:
            copies[node] = small.node_copy(node, copies.__getitem__)
    small.output(tuple(copies[x] for x in wanted))
    small.eliminate_dead_code()
    return torch.fx.GraphModule({}, small).forward  # type: ignore[no-any-return]
