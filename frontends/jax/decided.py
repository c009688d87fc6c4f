"""What ``Auto`` needs around its decisions: when they hold, and when a program steps back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from dynaflow_xla.ffi import _engine
from dynaflow_xla.frontends.jax import _compat


class Watched(_engine.FastCall):  # type: ignore[misc]
    """A program of lanes; calls step back to the original while another Python thread is busy.

    While another thread is busy with Python, lanes wait for the interpreter up to a switch interval
    each. The original waits less often.

    Args:
        program: The jitted program.
        original: The original.
    """

    def __init__(self, program: Any, original: Any):
        self._call = program
        self._settle(program, original)

    def _recover(self, error: BaseException, args: Any, kwargs: Any) -> Any:
        raise error


def settle(fast: Any, choices: Iterable[Any], programs: Mapping[bool, Any]) -> Watched | None:
    """Sends a function's calls straight to the program that serves all its decisions, if one does.

    Args:
        fast: The scheduled function.
        choices: What was decided, by signature.
        programs: What runs, by ``Choice.on_caller``.

    Returns:
        If two serve: that of the lanes.
    """
    lanes = any(made.child is not None for made in choices)
    here = {made.on_caller for made in choices}
    # What has compiler options cannot become a part of another program.
    alone = _compat.at_top_level if fast.jit_compiler_options or here == {True} else None
    if here == {True}:
        fast._settle(programs[True], None, alone)
    elif here == {False}:
        fast._settle(programs[False], fast.original if lanes else None, alone)
    else:
        fast._settle(None, None)
        return Watched(programs[False], fast.original) if lanes else None
    return None


def abstract(leaf: Any) -> Any:
    """What a decision depends on of an argument's leaf: the same for an array and for its shape."""
    if isinstance(leaf, jax.Array):
        return leaf.aval
    try:
        return jax.typeof(leaf)
    except TypeError:  # nothing that JAX takes: its own error comes with the call
        return type(leaf)
