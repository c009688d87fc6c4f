"""flax.nnx: modules, optimizers and variables are split before a call and merged behind it.

``nnx.jit`` holds a ``jax.jit`` function of what it splits its arguments into. Its own code stays
around that function, so that shared references, new variables and updates are treated as it does.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.adapters.wrapper import Axes, Wrapper, array_copies

NAME = "flax.nnx"


def loaded() -> bool:
    """Whether anybody can have objects of this library."""
    return sys.modules.get("flax.nnx") is not None


def is_node(x: Any) -> bool:
    """Whether something is a module, an optimizer, a variable, ..."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    return isinstance(x, (nnx.Variable, getattr(nnx, "Pytree", nnx.Object)))


def jitted(fn: Callable[..., Any]) -> Any:
    """The library's jit."""
    return sys.modules["flax.nnx"].jit(fn)


def wrapper_of(fn: Any) -> Wrapper | None:
    """What ``nnx.jit`` and its relatives made, taken apart; None for anything else.

    Raises:
        UnsupportedError: it is theirs, but made in a way that is not known here.
    """
    if not loaded() or not type(fn).__module__.startswith("flax.nnx.transforms"):
        return None
    pure: Any = getattr(fn, "jitted_fn", None)
    if not _compat.is_jitted(pure):
        raise UnsupportedError(
            f"schedule cannot look into what flax.nnx made ({type(fn).__name__}); schedule the function "
            "itself, dfx.schedule(f): modules among its arguments are split and merged as by nnx.jit."
        )
    again = copy.copy(fn)
    function: Any = pure.__wrapped__
    # Updates find their way back by a tag, which is the wrapper.
    tagged = getattr(function, "ctxtag", None) is fn
    if tagged:
        function = dataclasses.replace(function, ctxtag=again)
        given = {"compiler_options": _compat.compiler_options(pure) or None}
        pure = jax.jit(function, **given, **_compat.jit_options(pure))

    def around(seat: Any) -> Callable[..., Any]:
        again.jitted_fn = seat
        return again  # type: ignore[no-any-return]

    def axes(in_axes: Any, out_axes: Any) -> Axes:
        # What comes back besides the result are the states of the arguments' nodes.
        return in_axes, (None, None, out_axes) if tagged else (out_axes, None)

    return Wrapper("nnx.jit", pure, around, axes, copies, values)


def copies(tree: Any) -> Any:
    """The same nodes, shared references included, with variables and arrays of their own."""
    nnx = sys.modules["flax.nnx"]
    definition, state = nnx.split(tree)
    return nnx.merge(definition, array_copies(state))


def values(tree: Any) -> Any:
    """The states of all nodes, beside the other leaves."""
    nnx: Any = sys.modules["flax.nnx"]

    def state(x: Any) -> Any:
        if isinstance(x, nnx.Variable):
            return x[...] if hasattr(x, "__getitem__") else x.value
        return nnx.to_pure_dict(nnx.state(x)) if is_node(x) else x

    return jax.tree_util.tree_map(state, tree, is_leaf=is_node)
