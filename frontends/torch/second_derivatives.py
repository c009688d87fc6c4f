"""Second derivatives of a scheduled call: refused, by an error that says the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynaflow_xla.errors import UnsupportedError


def refused(run: Callable[..., Sequence[Any]], name: str) -> Callable[..., Sequence[Any]]:
    """A compiled graph whose backward can run, and be differentiated no further.

    AOTAutograd makes a node for that, too, which raises an error of its own. Ours comes before it.
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
        for node in nodes:
            node.register_hook(watch)
        return results

    return call
