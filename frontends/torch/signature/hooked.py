"""Results of a scheduled call that the user watches the gradients of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch


def made_of_results(gm: Any) -> dict[int, list[int]]:
    """Of a graph of Dynamo's: by its number, a result and the results that it is made of.

    Only what gradients flow through counts.
    """
    (output,) = gm.graph.find_nodes(op="output")
    bits: dict[Any, int] = {}
    for number, node in enumerate(output.args[0]):
        # A result that is an argument is the user's own tensor, whose gradient is whole.
        if isinstance(node, torch.fx.Node) and node.op != "placeholder" and _has_gradient(node):
            bits.setdefault(node, 1 << number)
    made_of: dict[Any, int] = {}
    if len(bits) > 1:
        for node in gm.graph.nodes:
            if node is not output and _has_gradient(node):
                made_of[node] = 0
                for used in node.all_input_nodes:
                    made_of[node] |= made_of.get(used, 0) | bits.get(used, 0)
    return {
        bit.bit_length() - 1: [n for n in range(len(output.args[0])) if made_of[node] >> n & 1]
        for node, bit in bits.items()
        if made_of.get(node)
    }


def _has_gradient(node: Any) -> bool:
    example = node.meta.get("example_value")
    if isinstance(example, (tuple, list)):  # of an operator with several results
        return any(getattr(x, "requires_grad", False) for x in example)
    return getattr(example, "requires_grad", False)


def telling(
    run: Callable[..., Sequence[Any]],
    made_of: dict[int, list[int]],
    name: str,
    warn: Callable[[str], None],
) -> Callable[..., Sequence[Any]]:
    """A graph that tells if a hook on a result does not see, or change, all of its gradient.

    All results share one backward, so a gradient goes from a result to the arguments, past the results that
    it is made of.

    Args:
        run: The graph.
        made_of: Of :func:`made_of_results`.
        name: Of the scheduled callable.
        warn: Is called once at most.
    """
    told = False
    watched: set[int] = set().union(*made_of.values())

    def tell() -> None:
        nonlocal told
        if not told:
            told = True
            warn(
                f"a result of {name!r} has a hook, or retain_grad(), and another result is made of it: all "
                "results of a scheduled call share one backward, so what comes by way of the other is not "
                "in its gradient, and no hook changes it. Call register_hook inside of the function, or "
                "call fast.original(...)"
            )

    def call(*args: Any) -> Sequence[Any]:
        results = run(*args)
        if not told:
            used = {n: weakref.ref(results[n]) for n in watched}
            for number, behind in made_of.items():
                if results[number].requires_grad:
                    # Comes before the user's hooks: those of one node run as they were registered.
                    results[number].register_hook(_Look([used[n] for n in behind], tell))
        return results

    return call


class _Look:
    """A hook on a result that looks for the user's hooks on those it is made of."""

    __torch_unserializable__ = True  # PyTorch warns where a tensor with other hooks is pickled

    def __init__(self, behind: list[weakref.ref[Any]], tell: Callable[[], None]) -> None:
        self.behind, self.tell = behind, tell

    def __call__(self, gradient: Any) -> None:
        if gradient is not None and any(_is_hooked(ref()) for ref in self.behind):
            self.tell()


def _is_hooked(x: Any) -> bool:
    if x is None:
        return False
    hooks = (x._backward_hooks or {}).values()
    return x.retains_grad or any(not isinstance(hook, _Look) for hook in hooks)
