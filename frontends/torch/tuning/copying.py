"""Copies of arguments, for calls that are only tried."""

from __future__ import annotations

import copy
import enum
import types
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
"""Types that are not copied: code, and what ``keeping`` puts back."""


def is_object(leaf: Any) -> bool:
    """Whether an argument is an object that a call may change, say a cache of keys and values."""
    return not isinstance(leaf, (torch.Tensor, *PLAIN, *_SHARED))


def _object_copied(leaf: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(leaf, memo)
    except Exception as error:
        raise UnsupportedError(
            f"an argument of type {type(leaf).__qualname__} cannot be copied ({error}), and this runs "
            "the function several times, which may change it. Pass tensors and containers that "
            "torch.utils._pytree knows, or give the type a __deepcopy__"
        ) from error


def objects_copied(tree: Any) -> Any:
    """The same with every object copied deeply that a call may change; tensors are as they are.

    Raises:
        UnsupportedError: an object cannot be copied.
    """
    memo: dict[int, Any] = {}
    return pytree.tree_map(lambda x: _object_copied(x, memo) if is_object(x) else x, tree)


class Copies:
    """Copies of arguments for several calls, each of which finds them as the first one would have.

    Every call has containers of its own, and copies of its own of objects that it may change: a list that
    a call lets grow would be a longer one for the next. Tensors are cloned once, and again where a call
    wrote into the clone. What autograd computed is so in the copy, too: a leaf that needs gradients cannot
    be written in place. A tensor that is there twice is so in the copy: a call would be captured anew for
    two that differ.

    Args:
        tree: The arguments, which nothing here changes.
    """

    def __init__(self, tree: Any) -> None:
        self._leaves, self._spec = pytree.tree_flatten(tree)
        self._clones: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._written = False
        for x in self._leaves:
            if isinstance(x, torch.Tensor):
                self._clone(x)

    @property
    def wanted(self) -> list[torch.Tensor]:
        """What gradients of calls lead to: the clones, and those that computed ones are made of."""
        return [x for x in self._clones.values() if x.requires_grad and x.is_leaf]

    @property
    def written(self) -> bool:
        """Whether a call wrote into its arguments, as far as that is counted."""
        return self._written or any(
            _version(x) != self._versions[k] for k, x in self._clones.items()
        )

    def anew(self) -> Any:
        """Arguments for one call.

        Raises:
            UnsupportedError: an object cannot be copied.
        """
        memo: dict[int, Any] = {}
        made: dict[int, Any] = {}

        def copied(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return _object_copied(x, memo) if is_object(x) else x
            if id(x) not in made:
                made[id(x)] = self._tensor(x)
            return made[id(x)]

        return pytree.tree_unflatten([copied(x) for x in self._leaves], self._spec)

    def _clone(self, x: torch.Tensor) -> None:
        made = self._clones[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        self._versions[id(x)] = _version(made)

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        clone = self._clones[id(x)]
        if not clone.is_leaf and x.is_leaf:  # a call wrote into it what autograd computed
            self._written = True
            self._clone(x)
        elif _version(clone) != self._versions[id(x)]:
            self._written = True
            with torch.no_grad():
                clone.copy_(x)
            self._versions[id(x)] = _version(clone)
        clone = self._clones[id(x)]
        if x.is_leaf or torch.is_inference_mode_enabled():
            return clone
        with torch.enable_grad():
            return clone.clone()


def copies(tree: Any) -> Any:
    """Copies for one call, see :class:`Copies`.

    Raises:
        UnsupportedError: an object cannot be copied.
    """
    return Copies(tree).anew()


def _version(x: torch.Tensor) -> int:
    """How often it was written; tensors of inference do not count that."""
    return -1 if x.is_inference() else x._version
