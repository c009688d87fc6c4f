"""Equinox: leaves of modules that are no arrays are static, as for ``eqx.filter_jit``."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.adapters.wrapper import Axes, Wrapper

NAME = "equinox"


def loaded() -> bool:
    """Whether anybody can have objects of this library."""
    return sys.modules.get("equinox") is not None


def is_node(x: Any) -> bool:
    """Whether something is a module."""
    eqx: Any = sys.modules.get("equinox")
    return eqx is not None and isinstance(x, eqx.Module)


def jitted(fn: Callable[..., Any]) -> Any:
    """The library's jit."""
    return sys.modules["equinox"].filter_jit(fn)


def wrapper_of(fn: Any) -> Wrapper | None:
    """What ``eqx.filter_jit`` made, taken apart; None for anything else.

    Raises:
        UnsupportedError: it is theirs, but made in a way that is not known here.
    """
    if not loaded() or type(fn).__module__ != "equinox._jit":
        return None
    pure: Any = getattr(fn, "_cached", None)
    if not _compat.is_jitted(pure):
        raise UnsupportedError(
            f"schedule cannot look into what equinox made ({type(fn).__name__}); schedule the function "
            "itself, dfx.schedule(f): modules among its arguments are filtered as by eqx.filter_jit."
        )

    def around(seat: Any) -> Callable[..., Any]:
        again = copy.copy(fn)
        object.__setattr__(again, "_cached", seat)  # modules are frozen
        return again  # type: ignore[no-any-return]

    return Wrapper("eqx.filter_jit", pure, around, _axes)


def _axes(in_axes: Any, out_axes: Any) -> Axes:
    """Axes of what ``filter_jit`` makes of a call: the first argument and the others in dictionaries."""
    if in_axes is None:
        return in_axes, out_axes
    raise UnsupportedError(
        "in_axes of a function that is filtered as by eqx.filter_jit is not in this version: schedule a "
        "function of arrays, with eqx.partition(model, eqx.is_array) outside and eqx.combine inside."
    )


def traced_floats(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As ``jax.jit``: another floating point number among the arguments is no other function."""

    def traced(x: Any) -> Any:
        return jnp.asarray(x) if type(x) in (float, complex) else x

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree_util.tree_map(traced, (args, kwargs), is_leaf=is_node)
        return fn(*args, **kwargs)

    return call
