"""Random numbers that are drawn and not used: the random state has to move all the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

_DRAWS = re.compile(
    "dropout|rand|bernoulli|multinomial|normal|poisson|rrelu|exponential|uniform|geometric|cauchy|"
    "gumbel|gamma|binomial|scaled_dot_product|multi_head_attention"
)


def keep(gm: Any) -> int:
    """Makes unused results of random operators results of a Dynamo graph; returns how many.

    AOTAutograd leaves out what nobody reads, so later numbers would be others than the original's.
    """
    graph = gm.graph
    output = next(node for node in graph.nodes if node.op == "output")
    used = {output}
    for node in reversed(graph.nodes):
        if node in used:
            used.update(node.all_input_nodes)
    unused = [
        node
        for node in graph.nodes
        if node.op in ("call_function", "call_method")
        and node not in used
        and _DRAWS.search(getattr(node.target, "__name__", str(node.target)))
        and isinstance(node.meta.get("example_value"), torch.Tensor)
    ]
    if not unused:
        return 0
    with graph.inserting_before(output):
        # Detached, so that nobody asks for their gradients.
        extra = [graph.call_method("detach", (node,)) for node in unused]
    output.args = ((*output.args[0], *extra),)
    return len(extra)


def without_last(fn: Callable[..., Sequence[Any]], count: int) -> Callable[..., Sequence[Any]]:
    """The function without its last ``count`` results."""

    def call(*args: Any) -> Sequence[Any]:
        return fn(*args)[:-count]

    return call
