"""Which library something belongs to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from dynaflow_xla.errors import UnsupportedError, checks
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.adapters import equinox, flax_nnx
from dynaflow_xla.frontends.jax.adapters.wrapper import Axes, Wrapper

_LIBRARIES = (flax_nnx, equinox)


def is_node(x: Any) -> bool:
    """Whether something is a library's object."""
    return any(library.is_node(x) for library in _LIBRARIES)


def wrapper_of(fn: Any) -> Wrapper | None:
    """A library's jit, or arguments bound to a function, taken apart; None for a function alone."""
    for library in _LIBRARIES:
        if (found := library.wrapper_of(fn)) is not None:
            return found
    found = objects_bound_to(fn)
    return None if found is None else _bound(*found)


def objects_bound_to(
    fn: Any,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """A function and arguments of it that a callable carries along and that have to stay arguments."""
    bound = getattr(fn, "__self__", None)
    if is_node(fn) and callable(fn):  # a module, or with equinox a method of one
        return _calling(fn), (fn,), {}
    if is_node(bound) and hasattr(fn, "__func__"):
        return fn.__func__, (bound,), {}
    if isinstance(fn, functools.partial) and _needs_arguments(fn):
        return fn.func, fn.args, fn.keywords
    return None


def _calling(module: Any) -> Callable[..., Any]:
    """A function of a module and of the arguments that the module is called with."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    call.__name__ = checks.name_of(module)
    return call


def _needs_arguments(fn: functools.partial[Any]) -> bool:
    """Whether what is bound has to stay an argument, because the function inside does more with it."""
    if _compat.is_jitted(fn.func) or wrapper_of(fn.func) is not None:
        return True
    leaves = jax.tree_util.tree_leaves((fn.args, fn.keywords), is_leaf=is_node)
    return any(map(is_node, leaves))


def _bound(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wrapper:
    def axes(in_axes: Any, out_axes: Any) -> Axes:
        if in_axes is None:
            return in_axes, out_axes
        if kwargs or not isinstance(in_axes, tuple | list):
            raise UnsupportedError(
                f"in_axes of a function with arguments bound to it must be a tuple with an entry for each "
                f"positional argument of a call, and none may be bound by keyword; got {in_axes!r}. "
                "Schedule the function without what is bound to it, and bind the scheduled one."
            )
        return (*[None] * len(args), *in_axes), out_axes

    return Wrapper(
        "bound arguments",
        fn,
        lambda seat: functools.partial(seat, *args, **kwargs),
        axes,
        compares=False,
    )


def owner_of(name: str, args: Any, kwargs: Any) -> Any:
    """The library that objects among the arguments belong to, or None.

    Args:
        name: Of the function that is called.
        args: Of a call.
        kwargs: Of a call.

    Raises:
        UnsupportedError: they belong to several.
    """
    if not any(library.loaded() for library in _LIBRARIES):
        return None
    leaves = jax.tree_util.tree_leaves((args, kwargs), is_leaf=is_node)
    mine = [library for library in _LIBRARIES if any(map(library.is_node, leaves))]
    if len(mine) > 1:
        raise UnsupportedError(
            f"{name!r} got objects of {' and of '.join(library.NAME for library in mine)} in one call, which "
            "take arguments apart in different ways. Schedule a function of arrays instead: nnx.split and "
            "eqx.partition take a model apart outside, nnx.merge and eqx.combine put it together inside."
        )
    return mine[0] if mine else None


def lifting(library: Any, fn: Callable[..., Any]) -> tuple[Wrapper, Callable[..., Any]]:
    """A plain function as a library's jit makes it, taken apart, and whole."""
    whole = library.jitted(fn)
    made: Wrapper = library.wrapper_of(whole)
    if library is not equinox:
        return made, whole
    inner = made.around
    filtered = replace(made, around=lambda seat: equinox.traced_floats(inner(seat)))
    return filtered, equinox.traced_floats(whole)
