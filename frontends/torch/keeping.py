"""Calling without leaving a trace: copies of arguments, and what a call changes put back."""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import UnsupportedError

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, slice, range, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat,
    torch.SymBool,
)  # fmt: skip
"""Types whose values never change."""

_SHARED = (
    torch.nn.Module, torch.Generator, type, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, types.ModuleType,
)  # fmt: skip
"""Types that are not copied: code, and what ``preserved`` and ``random_kept`` know."""


def is_object(leaf: Any) -> bool:
    """Whether an argument is an object that a call may change, say a cache of keys and values."""
    return not isinstance(leaf, (torch.Tensor, *PLAIN, *_SHARED))


def objects_copied(tree: Any) -> Any:
    """The same with every object copied deeply that a call may change; tensors are as they are.

    Raises:
        UnsupportedError: an object cannot be copied.
    """
    memo: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if not is_object(leaf):
            return leaf
        try:
            return copy.deepcopy(leaf, memo)
        except Exception as error:
            raise UnsupportedError(
                f"an argument of type {type(leaf).__qualname__} cannot be copied ({error}), and this runs "
                "the function several times, which may change it. Pass tensors and containers that "
                "torch.utils._pytree knows, or give the type a __deepcopy__"
            ) from error

    return pytree.tree_map(copied, tree)


def copies(tree: Any) -> Any:
    """The same with every tensor cloned, and every object copied that a call may change.

    Raises:
        UnsupportedError: an object cannot be copied.
    """

    def cloned(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(cloned, objects_copied(tree))


@contextmanager
def random_kept(args: Any, kwargs: Any) -> Iterator[None]:
    """Puts the states of the default generators and of those among the arguments back at the end."""
    on_gpu = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    leaves = (torch.default_generator, *on_gpu, *pytree.tree_leaves((args, kwargs)))
    found = {id(x): x for x in leaves if isinstance(x, torch.Generator)}
    states = [(x, x.get_state()) for x in found.values()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def preserved(original: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Puts a module's parameters and buffers and the states of random generators back at the end."""
    tensors: list[torch.Tensor] = []
    if isinstance(original, torch.nn.Module):
        tensors = [*original.parameters(), *original.buffers()]
    with torch.no_grad():
        saved = [t.detach().clone() for t in tensors]
    try:
        with random_kept(args, kwargs):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                if not torch.equal(tensor, value):  # autograd counts writes, so none without need
                    tensor.copy_(value)
