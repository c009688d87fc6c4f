"""Programs of the original that differ in how they are compiled: what ``Auto`` measures beside plans.

They are for calls at top level only, as compiler options are for whole programs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dynaflow_xla.frontends.jax.regions import handed_out, on_caller
from dynaflow_xla.frontends.jax.xla import xla_options

GRAPH = "graph"

NAMES = {**on_caller.NAMES, GRAPH: "original, concurrent graph"}
"""By kind. On a GPU: XLA gives its CUDA graph the edges that data asks for, and no others."""

KINDS = {name: kind for kind, name in NAMES.items()}


def may_help(fast: Any, regions: Any, args: Any, kwargs: Any) -> str:
    """Which kind may be faster than the original; "" if none.

    Args:
        fast: The scheduled function.
        regions: What it computes.
        args: What it is called with.
        kwargs: What it is called with.
    """
    given = fast.jit_compiler_options
    if not fast.options_by_plan():
        return on_caller.may_help(regions, args, kwargs, given)
    flags = os.environ.get("XLA_FLAGS", "")
    asked = any(name in given or name in flags for name in xla_options.CONCURRENT)
    return "" if asked else GRAPH


def options(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What to compile with.

    Args:
        kind: Of program: of ``NAMES``, or another one, which has the user's options only.
        given: Those of the user.
    """
    own = {"caller": handed_out.OPTIONS, GRAPH: xla_options.CONCURRENT}
    return {**given, **own.get(kind, {})}
