"""What a lane calls for an operator: PyTorch's own Python function where that is the same operator.

An overload of ``torch.ops`` reads its arguments against a schema at each call, which costs more than
most views and small operators themselves. The functions that Python code calls (``torch.mm``,
``Tensor.view``) have readers of their own, made at PyTorch's build, but choose the overload by the
arguments. So each is asked once for each kind of arguments which operator it would call, and with what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.frontends.torch._compat import modes, operators
from dynaflow_xla.frontends.torch.capture.captured import Payload, Ref
from dynaflow_xla.frontends.torch.rewrite import recurrent, strides

_made: Recent[Any, Callable[..., Any]] = Recent(2048)
"""By operator and kinds of arguments: what to call, the operator itself if nothing else is known to be it."""


def call_of(payload: Payload, examples: Mapping[int, Any]) -> tuple[Callable[..., Any], Any, Any]:
    """What to call for an operator: function, arguments and keyword arguments, with ``Ref`` for values.

    Args:
        payload: The operator and its arguments.
        examples: Of values, by id.
    """
    target = payload.target
    if strides.by_values(target) is not target:
        return torch.reshape, _tuples(payload.args), _tuples(payload.kwargs)
    if (of_rows := strides.in_format(target)) is not target:
        return of_rows, payload.args, payload.kwargs
    ours = recurrent.direct(target)
    if ours is not target or type(target) is not operators.Operator:
        return ours, payload.args, payload.kwargs
    made = None
    if target.namespace == "aten":
        key = (target, _kind(payload.args, examples), _kind(payload.kwargs, examples))
        made = _made.get(key)
        if made is None:
            with modes.apart():
                made = _made[key] = _asked(target, payload, examples)
    if made is None or made is target:
        return operators.bare(target), payload.args, payload.kwargs
    return made, _tuples(payload.args), _tuples(payload.kwargs)


def _tuples(arg: Any) -> Any:
    """The same with tuples for lists: a tuple of numbers is a constant of the code."""
    if isinstance(arg, (list, tuple)):
        return tuple(map(_tuples, arg))
    if isinstance(arg, dict):
        return {k: _tuples(v) for k, v in arg.items()}
    return arg


def _kind(arg: Any, examples: Mapping[int, Any]) -> Any:
    """What a reader of arguments may look at: types, and whether a tensor could be a number."""
    if isinstance(arg, Ref):
        example = examples[arg.value]
        if isinstance(example, torch.Tensor):
            return ("tensor", example.dim() == 0, example.dtype)
        return type(example)
    if isinstance(arg, (list, tuple)):
        return ("list", bool(arg), frozenset(_kind(x, examples) for x in arg))
    if isinstance(arg, dict):
        return tuple((k, _kind(v, examples)) for k, v in arg.items())
    return type(arg)


class _Ends(Exception):
    pass


class _Asks(modes.DispatchMode):
    """Ends the first operator that is called, and remembers it."""

    told: tuple[Any, ...] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.told = (func, args, kwargs or {})
        raise _Ends


def _told(call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """The operator that a call begins with, and its arguments; None if it does not come that far."""
    mode = _Asks()
    try:
        with mode:
            call(*args, **kwargs)
    except _Ends:
        return mode.told
    except Exception:  # whatever it is: these arguments are not for this function
        return None
    return None


def _asked(target: Any, payload: Payload, examples: Mapping[int, Any]) -> Callable[..., Any]:
    standing: dict[int, Any] = {}

    def stand_in(ref: Ref) -> Any:
        example = examples[ref.value]
        if not isinstance(example, torch.Tensor):
            return 1 if isinstance(example, (int, torch.SymInt)) else example
        if ref.value not in standing:
            shape = (1,) * example.dim()
            standing[ref.value] = torch.empty(shape, dtype=example.dtype, device="meta")
        return standing[ref.value]

    args, kwargs = payload.mapped(stand_in)
    wanted = _told(target, args, kwargs)
    # What takes no tensor may have its device changed by a mode that knows the Python function.
    if wanted is None or wanted[0] is not target or not standing:
        return target  # type: ignore[no-any-return]
    for candidate in operators.python_functions(target):
        found = _told(candidate, _tuples(args), _tuples(kwargs))
        if found is not None and _equal(found, wanted):
            return candidate
    return target  # type: ignore[no-any-return]


def _equal(a: Any, b: Any) -> bool:
    """Whether two calls are the same; tensors are equal if they are one."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor) or not isinstance(a, (int, float, complex, str)):
        return a is b or (not isinstance(a, torch.Tensor) and bool(a == b))
    return bool(a == b)
