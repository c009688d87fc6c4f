"""Whose an operator is, of several functions that are captured as one, and what these may not share.

A call at the begin and one at the end of each function stay in Dynamo's graph, as those of a mark do, and
become ``node.meta["custom"]`` of the nodes between, which the derived graphs inherit, backward included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dynaflow_xla.errors import PlanError
from dynaflow_xla.frontends.torch._compat import aot

KEY = "dynaflow_xla.function"


@torch.compiler.allow_in_graph
def begin(name: str) -> None:
    """What follows is the function's of this name."""
    return None


@torch.compiler.allow_in_graph
def end(name: str) -> None:
    """What follows is not."""
    return None


def settle(gm: Any) -> dict[Any, set[str]]:
    """Turns the begin and end calls of a Dynamo graph into annotations of the nodes between.

    Where the graph breaks inside of a function, which the user is warned of, it begins or ends in another.

    Returns:
        For each input of the graph the functions that use it.
    """
    nodes = list(gm.graph.nodes)
    edges = [n for n in nodes if n.op == "call_function" and n.target in (begin, end)]
    open_function = str(edges[0].args[0]) if edges and edges[0].target is end else ""
    users: dict[Any, set[str]] = {}
    for node in nodes:
        if node.op == "call_function" and node.target is begin:
            open_function = str(node.args[0])
            gm.graph.erase_node(node)
        elif node.op == "call_function" and node.target is end:
            open_function = ""
            gm.graph.erase_node(node)
        elif open_function and node.op not in ("placeholder", "output"):
            node.meta["custom"] = {**(node.meta.get("custom") or {}), KEY: open_function}
            for given in node.all_input_nodes:
                if given.op == "placeholder":
                    users.setdefault(given, set()).add(open_function)
    return users


def function_of(meta: Any) -> str:
    """The function that a node belongs to; "" if it is the only one."""
    return str((meta.get("custom") or {}).get(KEY, ""))


def check_apart(users: dict[Any, set[str]], names: Sequence[str], inputs: Sequence[Any]) -> None:
    """Called while a forward is compiled: that no function uses what another one writes into.

    Args:
        users: Of ``settle``.
        names: What the user calls each input of the Dynamo graph.
        inputs: Those inputs' nodes.

    Raises:
        PlanError: one does.
    """
    memory = [aot.storage_of(node) for node in inputs]
    for number in aot.written_inputs(memory) if users else ():
        mine = memory[number]
        same = [n for n, m in enumerate(memory) if n == number or (m is not None and m == mine)]
        found = sorted(set().union(*(users.get(inputs[n], set()) for n in same)))
        if len(found) > 1:
            called = names[number] if number < len(names) and names[number] else str(inputs[number])
            raise PlanError(
                f"{' and '.join(map(repr, found))} share {called!r}, and one of them writes into it. "
                "Functions of one plan run beside each other, so each needs its own: pass a copy, use eval() "
                "where it is the state of a batch norm, or write one function that calls them in order and "
                "schedule that"
            )
