"""What a function does to its arguments, and to the object that it belongs to, while it is traced.

A traced function gets its arguments as new lists, dictionaries and objects: what it changes in them is lost
when the trace ends, and happens once for each trace, not for each call. ``jax.jit`` says nothing.
A schedule has to have the original's values and effects, so it refuses such a function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import jax

from dynaflow_xla.errors import UnsupportedError, checks
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.adapters import libraries


def watched(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, refused if a trace of it changes an argument or its own object.

    Args:
        fn: A plain function, a bound method or an object that can be called.
    """
    if inspect.isgeneratorfunction(fn):
        return fn  # JAX says what is wrong with it
    owner = _owner(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = _contents((args, kwargs))
        own, held = _attributes(owner), dict(getattr(owner, "__dict__", ()))
        result = fn(*args, **kwargs)
        if not _compat.under_disable_jit():  # else everything happened as it is written
            if place := _changed(given, _contents((args, kwargs))):
                _refuse(fn, f"its arguments ({_argument(place)})")
            if name := _changed_attribute(owner, own, _attributes(owner)):
                _put_back(owner, held)
                _refuse(fn, f"the attribute {name!r} of its {type(owner).__name__}")
        return result

    if not hasattr(fn, "__name__"):
        call.__name__ = checks.name_of(getattr(fn, "func", fn))
    return call


def untraceable(name: str, args: Any, kwargs: Any) -> str:
    """What can be done about an argument that JAX cannot trace; "" if it can trace all.

    Args:
        name: Of the function.
        args: Those that are not static.
        kwargs: As ``args``.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        try:
            jax.typeof(leaf)
        except TypeError:
            return (
                f"schedule: {_argument(path)} of {name!r} is a {type(leaf).__name__}, which JAX cannot "
                "trace. Make it static (dfx.schedule(jax.jit(f, static_argnums=...)); for a method whose "
                "self it is, @dfx.schedule above @functools.partial(jax.jit, static_argnums=0)), a pytree "
                "(jax.tree_util.register_dataclass), or a module of flax.nnx or equinox."
            )
    return ""


def _owner(fn: Any) -> Any:
    """The object that a bound method or a callable object carries along."""
    if isinstance(fn, type | functools.partial) or libraries.is_node(fn):
        return None
    owner = getattr(fn, "__self__", None if hasattr(fn, "__code__") else fn)
    return None if isinstance(owner, type | ModuleType) or libraries.is_node(owner) else owner


def _contents(tree: Any) -> tuple[list[Any], Any]:
    """Leaves with their paths, and the structure around them.

    Of leaves that a class computes whenever it is flattened, the types: they are others each time.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=libraries.is_node)
    again = jax.tree_util.tree_leaves(tree, is_leaf=libraries.is_node)
    if len(again) != len(leaves):
        return leaves, structure
    pairs = zip(leaves, again, strict=True)
    return [(p, leaf if leaf is other else type(leaf)) for (p, leaf), other in pairs], structure


def _changed(before: tuple[list[Any], Any], after: tuple[list[Any], Any]) -> Any:
    """The path of a leaf that is another now, or is there no more, or is new; else None."""
    olds, news = [{jax.tree_util.keystr(p): (p, leaf) for p, leaf in t[0]} for t in (before, after)]
    for key in {**olds, **news}:
        if key not in olds or key not in news or olds[key][1] is not news[key][1]:
            return (olds.get(key) or news[key])[0]
    return None if before[1] == after[1] else ()


def _attributes(owner: Any) -> dict[str, Any]:
    """Attributes of an object, with what they hold."""
    if owner is None or not hasattr(owner, "__dict__"):
        return {}
    return {name: (value, _contents(value)) for name, value in vars(owner).items()}


def _default_of(owner: Any, name: str) -> Any:
    """What a class has for an attribute of its objects; None where it has nothing, or code."""
    value = inspect.getattr_static(type(owner), name, None)
    return None if callable(value) or hasattr(value, "__get__") else value


def _put_back(owner: Any, held: dict[str, Any]) -> None:
    """Attributes that were assigned, as they were: what a refused trace puts there would break the object."""
    attributes = vars(owner)
    attributes.clear()
    attributes.update(held)


def _changed_attribute(owner: Any, before: dict[str, Any], after: dict[str, Any]) -> str:
    """The name of an attribute whose change is an effect; one that is filled in once is a cache."""
    for name, (value, contents) in after.items():
        old, old_contents = before.get(name, (None, None))
        if name not in before and _default_of(owner, name) is not None:
            return name  # the class had a value for it
        if old is None:
            leaves = [leaf for _, leaf in contents[0]]
            if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                return name
        elif old is not value or _changed(old_contents, contents) is not None:
            return name
    return next((name for name in before if name not in after), "")


def _argument(path: Any) -> str:
    """An argument, and the place in it."""
    if len(path) < 2:
        return "their structure"
    first = path[1]
    which = getattr(first, "idx", getattr(first, "key", first))
    return f"argument {which!r}{jax.tree_util.keystr(path[2:])}"


def _refuse(fn: Any, what: str) -> NoReturn:
    name = checks.name_of(fn)
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    raise UnsupportedError(
        f"schedule takes functions whose only effect is their result; {name!r}{where} changes {what} "
        "while it is traced, and a compiled call would not. Return the new value and assign it outside, or, "
        "if the change may be lost, schedule jax.jit(f)."
    )
