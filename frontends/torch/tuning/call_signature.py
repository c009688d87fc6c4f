"""What a decision is made for: the signature of a call. It is read at every call, so it has to be cheap."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.ffi import _engine
from dynaflow_xla.frontends.torch.tuning import copying

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_VALUES = (bool, type(None), torch.dtype, torch.layout, torch.memory_format)
"""Types of which a value is one object."""

_NO_KEYWORDS = (dict, ())


def of(original: Any, args: Any, kwargs: Any) -> Any:
    """Structure, shapes, dtypes, devices and layouts other than usual, plain values, types of objects, modes.

    Floats are data, as for Dynamo: a step's rate or scale decides nothing. Integers are sizes.
    """
    return _part(args), _part(kwargs) if kwargs else _NO_KEYWORDS, _modes(original)


def _modes(original: Any) -> tuple[Any, bool, int]:
    training = getattr(original, "training", None)
    return training, torch.is_grad_enabled(), torch.get_num_threads()


class Known:
    """A call that ran the original: of the same again no signature need be read, which takes longer.

    Args:
        original: What is called.
        args: Of the call.
        kwargs: Of the call.
        changes: Of its decisions so far.
        narrow: Whether the original runs on one thread.
    """

    __slots__ = ("_look", "_modes", "_original", "changes", "narrow")

    def __init__(self, original: Any, args: Any, kwargs: Any, changes: int, narrow: bool) -> None:
        self.changes, self.narrow = changes, narrow
        self._original = original
        self._modes = _modes(original)
        self._look = _engine.CallMatch.of(args, kwargs, _TENSORS, _VALUES, narrow)

    def again(self, args: Any, kwargs: Any, changes: int) -> bool:
        """Whether a call is the same, and no decision changed meanwhile."""
        return (
            changes == self.changes
            and self._look is not None
            and _modes(self._original) == self._modes
            and self._look.matches(args, kwargs)
        )


def without_threads(signature: Any) -> Any:
    """The same whatever number of threads PyTorch has, which a backward's thread need not share."""
    args, kwargs, (training, grad, _) = signature
    return args, kwargs, training, grad


def without_sizes(signature: Any) -> Any:
    """What signatures have in common that differ in sizes only."""
    args, kwargs, modes = signature
    return _unsized(args), _unsized(kwargs), modes


def of_magnitude(signature: Any) -> Any:
    """What signatures have in common whose sizes lie between the same powers of two."""
    args, kwargs, modes = signature
    return _of_magnitude(args), _of_magnitude(kwargs), modes


def _part(value: Any) -> Any:
    """Of a tensor or number its sizes first; of a container what it is, then its members."""
    kind = type(value)
    if kind in _TENSORS:
        try:
            return _of_tensor(value)
        except RuntimeError:  # a nested one of strided tensors has none
            return _nested(value)
    if kind is tuple or kind is list:
        return (kind, None, *map(_part, value))
    if kind is dict:
        return (kind, tuple(value), *map(_part, value.values()))
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, int) and not isinstance(value, bool | enum.Enum):
        return (value,), kind, False  # as of a tensor's sizes
    if isinstance(value, copying.PLAIN) and not isinstance(value, float | complex):
        return kind, repr(value)
    members, tree = pytree.tree_flatten(value)
    if tree.is_leaf():
        return kind, None
    return (kind, tree, *map(_part, members))


def _of_tensor(x: torch.Tensor) -> Any:
    known = x.shape, x.dtype, x.requires_grad
    plain = x.is_cpu and x.layout is torch.strided
    return known if plain else (*known, x.device.type, x.layout)


def _nested(value: torch.Tensor) -> Any:
    shapes = tuple(member.shape for member in value.detach().unbind())
    return torch.Size((len(shapes),)), value.dtype, value.requires_grad, shapes


def _unsized(part: Any) -> Any:
    if isinstance(part[0], tuple):
        return (len(part[0]), *part[1:])
    return (*part[:2], *map(_unsized, part[2:]))


def _of_magnitude(part: Any) -> Any:
    if isinstance(part[0], tuple):
        # Nested tensors have a size that is no number.
        return (tuple([n.bit_length() if type(n) is int else n for n in part[0]]), *part[1:])
    return (*part[:2], *map(_of_magnitude, part[2:]))
