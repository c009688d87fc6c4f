"""Lazy modules, whose first call makes their parameters.

Dynamo makes them while it captures, and puts the random generators back afterwards: the next model would
draw the same weights. So the original makes that call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import UnsupportedError


def uninitialized(original: Any) -> bool:
    """Whether a parameter or buffer of what a callable holds has no shape yet."""
    return any(
        torch.nn.parameter.is_lazy(tensor)
        for module in held_modules(original)
        for tensor in itertools.chain(module.parameters(), module.buffers())
    )


def why_unplanned(original: Any, name: str) -> str:
    """Why there is no plan yet; "" if nothing is uninitialized."""
    if not uninitialized(original):
        return ""
    return (
        f"{name!r} has lazy modules, whose parameters have no shape before the first call. The original "
        "makes that call, and what comes after is scheduled: call it once, then ask again"
    )


def check(original: Any, name: str) -> None:
    """Refuses to plan what is uninitialized.

    Raises:
        UnsupportedError: there are lazy modules that were not called yet.
    """
    if why := why_unplanned(original, name):
        raise UnsupportedError(why)


def held_modules(original: Any) -> Iterator[torch.nn.Module]:
    """The module that is scheduled; of a function those that it is bound to, closes over or names."""
    if isinstance(original, torch.nn.Module):
        yield original
        return
    if isinstance(original, functools.partial):
        yield from held_modules(original.func)
        given = pytree.tree_leaves((original.args, original.keywords))
        yield from (x for x in given if isinstance(x, torch.nn.Module))
        return
    function = getattr(original, "__func__", original)
    held = [getattr(original, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # nothing is there yet
            continue
    code = getattr(function, "__code__", None)
    if code is not None:
        held += [function.__globals__.get(name) for name in code.co_names]
    yield from (x for x in held if isinstance(x, torch.nn.Module))
