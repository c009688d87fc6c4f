"""Gradients of a call that is only tried: to whatever it leads, without touching ``grad``."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.frontends.torch.capture.leaves import leaves_of
from dynaflow_xla.frontends.torch.capture.names import leaves_with_paths


def of(result: Any, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors that a call's results depend on, each with its gradient; none if there are none.

    A number is differentiated as ``backward`` does, other results with random gradients: equal ones would
    hide that two were exchanged. The backward runs on this thread, and what autograd keeps stays, for it
    may be the caller's: a graph that went into the call. Hooks on gradients run.
    """
    made = [
        x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad
    ]
    made = list({id(x): x for x in made}.values())
    wanted = list(leaves_of(made))
    if not wanted:
        return []
    drawn = torch.Generator().manual_seed(seed)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 0 or x.layout is not torch.strided or type(x) is not torch.Tensor:
            return torch.ones_like(x)
        of_type = torch.complex64 if x.dtype.is_complex else torch.float32
        random = torch.randn(x.shape, generator=drawn, dtype=of_type)
        return random.to(device=x.device, dtype=x.dtype)

    with torch.autograd.set_multithreading_enabled(False):
        found = torch.autograd.grad(
            made, wanted, [gradient(x) for x in made], allow_unused=True, retain_graph=True
        )
    return [(leaf, g) for leaf, g in zip(wanted, found, strict=True) if g is not None]


def names(original: Any, args: Any, kwargs: Any) -> dict[int, str]:
    """By identity the names of tensors among the arguments (of ``copying``) and of parameters."""
    found: dict[int, str] = {}
    for said, tree in (("argument", args), ("argument ", kwargs)):
        for path, x in leaves_with_paths(tree):
            if isinstance(x, torch.Tensor):
                # The copy of a computed one is computed, from a leaf of its own.
                found |= dict.fromkeys(map(id, (x, *leaves_of([x]))), said + pytree.keystr(path))
    if isinstance(original, torch.nn.Module):
        found |= {id(p): f"parameter {name!r}" for name, p in original.named_parameters()}
    return found


_DEPTH = 3
"""Objects in attributes of objects in attributes: so far an argument's graph is looked for in a module."""


def held_by(original: Any) -> list[str]:
    """Names of a module's attributes, and of those of modules in it, that hold what autograd computed.

    The backward of a call goes on into the graph of such a tensor, which is not the call's own: a weight that
    another network makes, a state that is kept from call to call.
    """
    if not isinstance(original, torch.nn.Module):
        return []  # gradients of a function's trial end at its arguments
    found: list[str] = []
    seen: set[int] = set()
    for path, module in original.named_modules():
        held = vars(module) | dict(module.named_buffers(recurse=False))
        for name, value in held.items():
            if _holds_graph(value, seen, _DEPTH):
                found.append(f"{path}.{name}" if path else name)
    return found


def _holds_graph(value: Any, seen: set[int], depth: int) -> bool:
    for x in pytree.tree_leaves(value):
        if isinstance(x, torch.Tensor):
            if not x.is_leaf:
                return True
        elif depth and id(x) not in seen and type(getattr(x, "__dict__", None)) is dict:
            seen.add(id(x))
            if _holds_graph(vars(x), seen, depth - 1):
                return True
    return False
