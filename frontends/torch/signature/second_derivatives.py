"""What autograd refuses of a scheduled call, by errors that say the way out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
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

    def watch(gradients: Any) -> bool:
        recorded = {g.grad_fn for g in gradients if g is not None and g.grad_fn is not None}
        for node in recorded:  # none, unless the backward is recorded (create_graph=True)
            node.register_prehook(refuse)
        return bool(recorded)

    def note(gradients: Any, _: Any) -> None:
        watch(gradients)

    def tie(held: weakref.ref[Any], inputs: list[weakref.ref[Any]], gradients: Any, _: Any) -> Any:
        if not watch(gradients):
            return None
        between = [x for given in inputs if (x := given()) is not None]
        return _tied([*_leaves_behind(held()), *between], gradients, refuse)

    places: list[int] | None = None  # of inputs that may be results of something

    def call(*args: Any) -> Sequence[Any]:
        nonlocal places
        results = run(*args)
        if places is None:
            plain = [
                isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter) for x in args
            ]
            places = [n for n, is_plain in enumerate(plain) if is_plain]
        # Weakly, as a graph keeps no more of its inputs than it needs: whoever asks for one has it.
        inputs = [weakref.ref(args[n]) for n in places if args[n].grad_fn is not None]
        nodes = {
            x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn is not None
        }
        before = None if watched is None else watched()
        for made in {aot.node_of_graph(node) for node in nodes} - {None}:
            made.register_hook(partial(tie, weakref.ref(made), inputs))  # the node has the hook
        for node in nodes:
            node.register_hook(note)
            if before is not None:
                node.register_prehook(before)
            # What is made a view after the graph has autograd's own node, before the graph's.
            if len(results) > 1 and isinstance(node, torch.autograd.function.BackwardCFunction):
                node.register_prehook(_second(node, name))
        return results

    return call


class _Tied(torch.autograd.Function):
    """Gradients as they are, which depend on other tensors in a way that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, refuse: Callable[[Any], None], count: int, *given: Any) -> Any:
        """The first ``count`` tensors; the others are what these depend on."""
        ctx.refuse = refuse
        return given[:count]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuses."""
        ctx.refuse(gradients)


def _tied(behind: Sequence[Any], gradients: Sequence[Any], refuse: Callable[[Any], None]) -> Any:
    """The recorded gradients of a node, tied to leaves behind it and to its inputs.

    AOTAutograd's own node knows only those inputs that the forward kept. Autograd would leave it out where
    others are asked for (``torch.autograd.grad(..., allow_unused=True)``, ``backward(inputs=...)``), and
    what it returns would lack a part, without a word.
    """
    made = iter(
        _Tied.apply(
            refuse,
            sum(g is not None for g in gradients),
            *(g for g in gradients if g is not None),
            *behind,
        )
    )
    return tuple(None if g is None else next(made) for g in gradients)


def _leaves_behind(node: Any) -> list[Any]:
    seen, waiting, found = {node}, [node], []
    while waiting:
        for other, _ in waiting.pop().next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
                if (leaf := getattr(other, "variable", None)) is not None:
                    found.append(leaf)
    return found


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
