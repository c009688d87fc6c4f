"""Which dimension of each tensor argument holds the rows of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.batch.arguments import call_axes, named_results
from dynaflow_xla.batch.proof import batch_of
from dynaflow_xla.errors import PlanError, PlanTypeError, checks
from dynaflow_xla.frontends.torch._compat import dynamo_graphs
from dynaflow_xla.frontends.torch.capture import names


def batch_dims(
    name: str,
    in_axes: Any,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[tuple[torch.Tensor, int]]:
    """The batched tensors of a call, each with its batch dimension.

    Args:
        name: Of the function, for messages.
        in_axes: See ``call_axes``. None: the first dimension of every tensor is offered, and the capture
            has to prove which hold the batch.
        function: The function or module, whose parameters ``in_axes`` may name.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        PlanError: axes that do not fit the arguments, or different numbers of rows.
    """
    if in_axes is None:
        return _offered(args, kwargs)
    # A module's call takes what its forward takes.
    named = function.forward if isinstance(function, torch.nn.Module) else function
    given = call_axes(name, in_axes, named, args, kwargs)
    found: list[tuple[str, Any, int]] = []
    for number, (axes, value) in enumerate(zip(given.positional, args, strict=True)):
        found += _spread(name, f"argument {number}", axes, value)
    for key, value in kwargs.items():
        found += _spread(name, f"keyword argument {key}", given.keyword[key], value)
    return _checked(name, found)


def check_results(name: str, out_axes: Any, result: Any) -> None:
    """That ``out_axes`` by name names what the result of a call has.

    Raises:
        PlanError: it does not.
    """
    if not isinstance(out_axes, Mapping):
        return
    if isinstance(result, Mapping):
        named_results(name, out_axes, list(result))
    elif dataclasses.is_dataclass(result):
        named_results(name, out_axes, [f.name for f in dataclasses.fields(result)])
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        named_results(name, out_axes, result._fields)
    else:
        raise PlanError(
            f"{name!r}: out_axes is a mapping by name; the result is a {type(result).__name__}, which has no "
            "names"
        )


def _spread(name: str, what: str, axes: Any, value: Any) -> list[tuple[str, Any, int]]:
    """Batched tensors of one argument; ``axes`` is an integer, None, or a tree prefix of it."""
    if isinstance(axes, (tuple, list)):
        if not isinstance(value, (tuple, list)) or len(value) != len(axes):
            raise PlanError(f"{name!r}: in_axes of {what} must be a prefix of it; got {axes!r}")
        parts = zip(axes, value, strict=True)
        return [f for n, (a, v) in enumerate(parts) for f in _spread(name, f"{what}[{n}]", a, v)]
    if isinstance(axes, Mapping):
        if not isinstance(value, Mapping) or set(axes) - set(value):
            raise PlanError(f"{name!r}: in_axes of {what} must be a prefix of it; got {axes!r}")
        return [f for k, a in axes.items() for f in _spread(name, f"{what}[{k!r}]", a, value[k])]
    if axes is None:
        return []
    axis = checks.integer(axes)
    if axis is None:
        raise PlanTypeError(f"{name!r}: in_axes of {what} must be an integer or None; got {axes!r}")
    if _is_tensor(value):
        return [(what, value, axis)]
    leaves = names.leaves_with_paths(value)
    return [(what + pytree.keystr(path), x, axis) for path, x in leaves if _is_tensor(x)]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _checked(name: str, found: list[tuple[str, Any, int]]) -> list[tuple[torch.Tensor, int]]:
    axes, _, _ = batch_of(name, ((what, tuple(tensor.shape), axis) for what, tensor, axis in found))
    return [(tensor, axis) for (_, tensor, _), axis in zip(found, axes, strict=True)]


def _offered(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """The first dimension of every tensor; the first tensor's is the batch, if there is a proof."""
    leaves = [x for x in pytree.tree_leaves((list(args), dict(kwargs))) if _is_tensor(x)]
    return [(x, 0) for x in leaves if x.ndim]


class Marks:
    """While open, the batch dimensions are open sizes for a capture that starts on this thread.

    Each may be fixed by what the function does with it. Marks that were there before stay.
    """

    def __init__(self, dims: Sequence[tuple[torch.Tensor, int]]) -> None:
        self.dims = dims
        self._saved: list[tuple[Any, dict[str, Any]]] = []

    def open(self) -> None:
        """Sets the marks."""
        for tensor, _ in self.dims:
            marks = {n: getattr(tensor, n) for n in dynamo_graphs.MARKS if hasattr(tensor, n)}
            copied = {n: set(x) if isinstance(x, set) else x for n, x in marks.items()}
            self._saved.append((tensor, copied))
        for tensor, dim in self.dims:
            dynamo_graphs.mark_open(tensor, dim)

    def close(self) -> None:
        """Takes them away."""
        for tensor, before in reversed(self._saved):
            for name in dynamo_graphs.MARKS:
                if name in before:
                    setattr(tensor, name, before[name])
                elif hasattr(tensor, name):
                    delattr(tensor, name)
        self._saved = []
