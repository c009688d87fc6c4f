"""Attributes of classes while Dynamo captures: what is read there is guarded, and what is written is seen.

Dynamo keeps what a function writes to a class until its graph ends, and reads of the same class find it
there; reads through a derived class or an instance, ``hasattr`` and the class's ``__dict__`` get what was
there before. A graph ends at an instance that has no such attribute of its own, and at ``__dict__``, so that
the write is done. The others are mended here.
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
    """A method that reads an attribute, which knows what classes got in this graph."""
    asks = "hasattr" in plain.__name__

    @functools.wraps(plain)
    def read(self: Any, tx: Any, name: Any, *more: Any, **options: Any) -> Any:
        effects = tx.output.side_effects
        if getattr(effects, "store_attr_mutations", None):
            value = getattr(self, "value", None)
            if isinstance(value, type):
                made = _of_class(tx, effects, value, name, asks)
                if made is not None:
                    return made
            else:
                kind = _written(effects, type(value), name)
                if kind is not None and not _hidden(effects, kind, self, value, name):
                    _end_graph(kind, f"then {name!r} is read through an instance")
        return plain(self, tx, name, *more, **options)

    read._dynaflow = True  # type: ignore[attr-defined]
    return read


def _of_class(tx: Any, effects: Any, of: type, name: Any, asks: bool) -> Any:
    """What this graph wrote and a class is read for, or asked whether it has it; None: nothing is known."""
    from torch._dynamo.variables import ConstantVariable

    if name == "__dict__" and of in effects and effects.store_attr_mutations.get(effects[of]):
        _end_graph(of, "then the class's __dict__ is read", tx)
    kind = _written(effects, of, name)
    if kind is None or (kind is of and not asks) or _comes_first(_static(type(of), name)):
        return None
    written = _pending(effects, effects[kind], name)
    if written is None:
        _end_graph(kind, f"then {name!r} is read, which was deleted", tx)
    return ConstantVariable.create(True) if asks else written


def _written(effects: Any, of: type, name: Any) -> type | None:
    """The class at which a lookup ends, if this graph wrote it there."""
    for kind in of.__mro__:
        if kind in effects and effects.has_pending_mutation_of_attr(effects[kind], name):
            return kind
        if name in kind.__dict__:
            return None
    return None


def _pending(effects: Any, of: Any, name: Any) -> Any:
    """What this graph wrote to a variable of Dynamo's, as another; None if it deleted it."""
    from torch._dynamo.variables import DeletedVariable

    made = effects.load_attr(of, name, deleted_ok=True)
    return None if isinstance(made, DeletedVariable) else made


def _hidden(effects: Any, kind: type, instance: Any, value: Any, name: Any) -> bool:
    """Whether what was written to the class is not what a lookup finds: the instance has its own.

    Not where the class has, or had, a descriptor that comes before the instance's own.
    """
    if effects.has_pending_mutation_of_attr(instance, name):
        found = _pending(effects, instance, name) is not None
    elif effects.has_pending_mutation_of_attr(instance, "__dict__"):
        found = False
    else:
        found = name in getattr(value, "__dict__", ())
    written = _pending(effects, effects[kind], name)
    if not found or written is None or _comes_first(_static(type(value), name)):
        return False
    try:
        return not _comes_first(written.python_type())
    except NotImplementedError:
        return False


def _static(of: type, name: Any) -> type:
    """The type of a class's attribute, as it is."""
    return type(inspect.getattr_static(of, name, None))


def _comes_first(kind: type) -> bool:
    """Whether an attribute of a class that is of this type comes before those of its instances."""
    return hasattr(kind, "__set__") or hasattr(kind, "__delete__")


def _end_graph(kind: type, then: str, tx: Any = None) -> NoReturn:
    """Ends the graph; given ``tx``, so that Dynamo does not read a constant of the class by itself instead.

    Under ``fullgraph`` no graph may end, and Dynamo reads what it can.
    """
    from torch._dynamo import exc

    made = exc.Unsupported
    if tx is not None and not (tx.one_graph or getattr(tx, "error_on_graph_break", False)):
        made = getattr(exc, "StepUnsupported", made)
    raise made(f"the class {kind.__qualname__} is written, {then}")


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
