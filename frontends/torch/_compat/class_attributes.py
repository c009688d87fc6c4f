"""Attributes of classes while Dynamo captures: what is read there is guarded, and what is written is seen.

Dynamo keeps what a function writes to a class until its graph ends, and reads of the same class find it
there; reads through a derived class or an instance get the value from before. The former are mended here. A
graph ends at the latter, so that the write is done.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch

_lock = threading.Lock()
_READS = ("var_getattr", "tp_getattro_impl", "call_obj_hasattr")
"""Methods of Dynamo's variables that read an attribute, by version."""


@functools.cache
def mend() -> None:
    """Called before the first capture; holds for the whole process, so for ``torch.compile`` too."""
    from torch._dynamo.variables import nn_module, user_defined

    with _lock:
        if torch.__version__.startswith("2.11."):
            _guard_reads(user_defined.UserDefinedClassVariable)
            _track()
        kinds = [
            kind
            for module in (user_defined, nn_module)
            for kind in vars(module).values()
            if inspect.isclass(kind) and kind.__module__ == module.__name__
        ]
        for kind in kinds:
            for name in _READS:
                plain = vars(kind).get(name)
                if inspect.isfunction(plain) and not hasattr(plain, "_dynaflow"):
                    setattr(kind, name, _after_writes(plain))


def _after_writes(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reads an attribute, which knows what base classes got in this graph."""

    @functools.wraps(plain)
    def read(self: Any, tx: Any, name: Any, *more: Any, **options: Any) -> Any:
        effects = tx.output.side_effects
        if getattr(effects, "store_attr_mutations", None):
            value = getattr(self, "value", None)
            of = value if isinstance(value, type) else type(value)
            kind = _written(effects, of, name)
            if kind is not None and kind is not value:
                if of is value and "hasattr" not in plain.__name__:
                    return effects.load_attr(effects[kind], name)
                _end_graph(kind, name)
        return plain(self, tx, name, *more, **options)

    read._dynaflow = True  # type: ignore[attr-defined]
    return read


def _written(effects: Any, of: type, name: Any) -> type | None:
    """The class at which a lookup ends, if this graph wrote it there."""
    for kind in of.__mro__:
        if kind in effects and effects.has_pending_mutation_of_attr(effects[kind], name):
            return kind
        if name in kind.__dict__:
            return None
    return None


def _end_graph(kind: type, name: Any) -> NoReturn:
    from torch._dynamo.exc import Unsupported

    raise Unsupported(
        f"the attribute {name!r} of the class {kind.__qualname__} is written, then read through an instance"
    )


def _guard_reads(of_class: Any) -> None:
    """PyTorch 2.11 takes numbers and strings of classes for constants, and does not notice a change."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable

    plain = of_class.var_getattr

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        effects = tx.output.side_effects
        if effects.has_pending_mutation_of_attr(self, name):
            return effects.load_attr(self, name)
        if self.source is not None and _is_users(self.value) and not name.startswith("__"):
            found = inspect.getattr_static(self.value, name, of_class)
            if ConstantVariable.is_literal(found):
                return VariableTracker.build(tx, found, AttrSource(self.source, name))
        return plain(self, tx, name)

    of_class.var_getattr = var_getattr


def _track() -> None:
    """Has torch 2.11 keep what a graph writes to a class until the graph ends, as newer versions do."""
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    plain = VariableBuilder._wrap

    def wrap(self: Any, value: Any) -> Any:
        made = plain(self, value)
        effects = self.tx.output.side_effects
        if type(made) is UserDefinedClassVariable and _is_users(value) and value not in effects:
            return effects.track_object_existing(value, made)
        return made

    VariableBuilder._wrap = wrap


def _is_users(kind: type) -> bool:
    return not (getattr(kind, "__module__", None) or "").startswith(("torch.", "torch_"))
