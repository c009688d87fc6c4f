"""What ``Auto`` needs around its decisions: when they hold, and when a program steps back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Trial:
    """Stands for a decision while the original is measured.

    Attributes:
        child: None, as in a decision for the original.
    """

    child: None = None


ORIGINAL = Trial()
ON_CALLER = Trial()


def settle(fast: Any, choices: Iterable[Any]) -> Watched | None:
    """Sends a function's calls straight to the program that serves all its decisions, if one does.

    Each kind of decision has a program of its own: what was compiled to be measured then serves the
    calls. Where decisions are of several kinds, calls find their program in Python.

    Args:
        fast: The scheduled function.
        choices: What was decided, by signature.

    Returns:
        If there are several, that of the lanes.
    """
    kinds = {made.kind for made in choices}
    if "lanes" in kinds and fast.options_by_plan():  # the call looks for its plan
        fast._settle(None, None)
        return None
    # What has compiler options cannot become a part of another program.
    alone = _compat.at_top_level if fast.jit_compiler_options or kinds == {"caller"} else None
    if len(kinds) == 1:
        (kind,) = kinds
        fast._settle(fast.program(kind), fast.original if kind == "lanes" else None, alone)
        return None
    fast._settle(None, None)
    return Watched(fast.program("lanes"), fast.original) if "lanes" in kinds else None


def abstract(leaf: Any) -> Any:
    """What a decision depends on of an argument's leaf: the same for an array and for its shape."""
    if isinstance(leaf, jax.Array):
        return leaf.aval
    try:
        return jax.typeof(leaf)
    except TypeError:  # nothing that JAX takes: its own error comes with the call
        return type(leaf)
