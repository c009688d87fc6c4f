"""What ``schedule`` was given, and what it makes of it."""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import Any

import jax

from dynaflow_xla.errors import UnsupportedError, checks
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.adapters import libraries
from dynaflow_xla.frontends.jax.adapters.lifted import Lifted
from dynaflow_xla.frontends.jax.scheduled import ScheduledFunction
from dynaflow_xla.settings import Settings


def schedule(fn: Any, options: Settings) -> Any:
    """A scheduled function for anything that can be called and traced.

    Args:
        fn: A plain function, what ``jax.jit``, ``nnx.jit`` or ``eqx.filter_jit`` returns, a module, a
            method, a ``functools.partial`` of these.
        options: What the user asked for.

    Raises:
        UnsupportedError: it is compiled or spread over devices already.
    """
    if not _compat.is_jitted(fn):
        _refuse_compiled(fn)
        wrapper = libraries.wrapper_of(fn)
        if wrapper is not None:
            in_axes, out_axes = wrapper.axes(options.in_axes, options.out_axes)
            inner = replace(options, in_axes=in_axes, out_axes=out_axes)
            if not hasattr(fn, "__name__"):
                inner = replace(inner, name=wrapper.label)
            made = schedule(wrapper.inside, inner)
            return Lifted(wrapper, made, fn, (schedule, (fn, options)))
    return ScheduledFunction(fn, options)


def _refuse_compiled(fn: Any) -> None:
    """Refuses what no trace can look into, or should not."""
    name = checks.name_of(fn)
    if isinstance(fn, jax.stages.Compiled | jax.stages.Lowered | jax.stages.Traced):
        raise UnsupportedError(
            f"schedule cannot look into {type(fn).__name__}: a plan needs the function, not its program. "
            "Schedule the function and compile that: dfx.schedule(f).lower(*args).compile()."
        )
    if isinstance(fn, FunctionType) and hasattr(fn, "lower"):
        raise UnsupportedError(
            f"schedule cannot look into {name!r}, which something compiles already (jax.pmap?): a schedule "
            "belongs to one device. Schedule the function and map that over the devices: "
            "jax.shard_map(dfx.schedule(f), mesh=..., in_specs=..., out_specs=...)."
        )
