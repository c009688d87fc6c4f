"""What a decision is made for: the signature of a call. It is read at every call, so it has to be cheap."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.frontends.torch.tuning import copying

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_CONTAINERS = frozenset((tuple, list, dict))
_MANY = 32
_NO_KEYWORDS = (dict, ())


def of(original: Any, args: Any, kwargs: Any) -> Any:
    """Structure, shapes, dtypes, plain values, types of objects, modes.

    Floats are data, as for Dynamo: a step's rate or scale decides nothing. Integers are sizes.
    """
    return _part(args), _part(kwargs) if kwargs else _NO_KEYWORDS, _modes(original)


def _modes(original: Any) -> tuple[Any, bool, int]:
    training = getattr(original, "training", None)
    return training, torch.is_grad_enabled(), torch.get_num_threads()


def of_objects(original: Any, args: Any, kwargs: Any) -> Any:
    """What is equal for calls with the very same tensors; None where these are few.

    Hundreds of tensors have their signature read in the time of as many operators. This takes a fifth of it.
    A tensor may get other sizes, and another one the number of one that is gone: it tells no more than that
    the original may run again.
    """
    for x in (*args, *kwargs.values()):
        if type(x) in _CONTAINERS and len(x) >= _MANY:
            return _objects(args), _objects(kwargs), _modes(original)
    return None


def _objects(value: Any) -> Any:
    kind = type(value)
    if kind in _TENSORS:
        return id(value)
    if kind not in _CONTAINERS:
        return _part(value)
    names = tuple(value) if kind is dict else None
    members = value.values() if kind is dict else value
    alike = _TENSORS.issuperset(map(type, members))
    return (kind, names, *map(id if alike else _objects, members))


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
        return value.shape, value.dtype, value.requires_grad
    if kind is tuple or kind is list:
        return (kind, None, *map(_part, value))
    if kind is dict:
        return (kind, tuple(value), *map(_part, value.values()))
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.requires_grad
    if isinstance(value, int) and not isinstance(value, bool | enum.Enum):
        return (value,), kind, False  # as of a tensor's sizes
    if isinstance(value, copying.PLAIN) and not isinstance(value, float | complex):
        return kind, repr(value)
    members, tree = pytree.tree_flatten(value)
    if tree.is_leaf():
        return kind, None
    return (kind, tree, *map(_part, members))


def _unsized(part: Any) -> Any:
    if isinstance(part[0], tuple):
        return (len(part[0]), *part[1:])
    return (*part[:2], *map(_unsized, part[2:]))


def _of_magnitude(part: Any) -> Any:
    if isinstance(part[0], tuple):
        # Nested tensors have a size that is no number.
        return (tuple([n.bit_length() if type(n) is int else n for n in part[0]]), *part[1:])
    return (*part[:2], *map(_of_magnitude, part[2:]))
