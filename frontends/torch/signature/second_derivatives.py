"""What autograd refuses of a scheduled call, by errors that say the way out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch._compat import aot


def refused(
    run: Callable[..., Sequence[Any]],
    name: str,
    watched: Callable[[], Callable[[Any], None] | None] | None = None,
) -> Callable[..., Sequence[Any]]:
    """A compiled graph whose backward can run, and be differentiated no further.

    AOTAutograd makes a node for that, too, which raises an error of its own. Ours comes before it.

    Args:
        run: The graph.
        name: Of the scheduled callable.
        watched: Asked at each call for what is called with the gradients before its backward runs.
    """

    def refuse(_: Any) -> None:
        raise UnsupportedError(
            f"double backward: {name!r} is scheduled, and a scheduled call has first derivatives only. "
            "Call the original for what is differentiated twice: fast.original(...)"
        )

    def watch(gradients: Any, _: Any) -> None:
        nodes = {g.grad_fn for g in gradients if g is not None and g.grad_fn is not None}
        for node in nodes:  # none, unless the backward is recorded (create_graph=True)
            node.register_prehook(refuse)

    def call(*args: Any) -> Sequence[Any]:
        results = run(*args)
        nodes = {
            x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn is not None
        }
        before = None if watched is None else watched()
        for node in nodes:
            node.register_hook(watch)
            if before is not None:
                node.register_prehook(before)
            # What is made a view after the graph has autograd's own node, before the graph's.
            if len(results) > 1 and isinstance(node, torch.autograd.function.BackwardCFunction):
                node.register_prehook(_second(node, name))
        return results

    return call


def _second(node: Any, name: str) -> Callable[[Any], None]:
    """Before a backward: if its forward's values are gone, autograd's error, and whose backward ran."""
    seen = False
    held = weakref.ref(node)  # the node has the hook

    def check(_: Any) -> None:
        nonlocal seen
        node = held()
        if seen and node is not None and (error := aot.freed(node)) is not None:
            raise RuntimeError(
                f"{error}\nAll results of a call of {name!r} share one backward, as it is scheduled: add up "
                "the losses and call backward once, or use retain_graph=True in all but the last, or call "
                "fast.original(...)"
            ) from error
        seen = True

    return check
