"""Random numbers that are drawn and not used: the random state has to move all the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError

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


def without_saved_states(gm: Any) -> None:
    """Takes checkpointed operators that could draw, but do not, as plain ones: attention without dropout.

    For ``torch.utils.checkpoint`` AOTAutograd saves the generator's state before such an operator and
    puts it back where the backward runs it again.

    Raises:
        UnsupportedError: an operator that does draw.
    """
    graph = gm.graph
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name not in _SAVED:
            continue
        state, op, *args = node.args if name == "run_with_rng_state" else (None, *node.args)
        given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | node.kwargs
        if "scaled_dot_product" not in str(op) or given.get("dropout_p"):
            raise UnsupportedError(
                f"{op} draws random numbers under torch.utils.checkpoint, and its state cannot be put back "
                "inside a schedule; schedule the module inside of the checkpoint, or set its dropout to 0"
            )
        with graph.inserting_before(node):
            plain = graph.call_function(op, tuple(args), dict(node.kwargs))
            examples = torch.fx.node.map_arg((plain.args, plain.kwargs), lambda n: n.meta["val"])
            plain.meta = dict(node.meta, val=op(*examples[0], **examples[1]))
            if state is not None:
                node.replace_all_uses_with(plain)
            else:
                for user in list(node.users):
                    kept = plain
                    if user.args[1] == 0:  # an empty state: nobody reads it
                        kept = graph.call_function(
                            torch.ops.aten.new_empty.default, (node.all_input_nodes[0], [0])
                        )
                        kept.meta = dict(
                            plain.meta, val=node.all_input_nodes[0].meta["val"].new_empty([0])
                        )
                    user.replace_all_uses_with(kept)
                    graph.erase_node(user)
        graph.erase_node(node)
    gm.recompile()


_SAVED = ("run_and_save_rng_state", "run_with_rng_state")
