"""Errors of operators that the original may catch: no captured graph has its ``except`` clauses."""

from __future__ import annotations

from typing import Any

from dynaflow_xla.errors import DynaflowError, EngineError
from dynaflow_xla.frontends.torch.capture import own
from dynaflow_xla.frontends.torch.dynamo import running


def may_be(core: Any, error: EngineError) -> bool:
    """Whether the original may go on behind an error of a graph, and can be run to find out.

    The graph has changed nothing by then: what it writes is written at its end.
    """
    if not core.graphs.catches or not isinstance(error.__cause__, Exception):
        return False
    if isinstance(error.__cause__, DynaflowError):
        return False
    if core.breaks or own.names_in(core.entries):
        error.add_note(
            f"{core.options.name!r} has code that handles exceptions, which no captured graph has, and runs "
            "what must not run again (several graphs, or operators of your own). If it is to catch this, "
            "call the original"
        )
        return False
    return True


def by_original(core: Any, error: EngineError, args: Any, kwargs: Any) -> Any:
    """The result of the original where a graph failed that it goes on behind; random states are put back.

    Raises:
        EngineError: the given one, where the original raises the same.
    """
    running.begin_anew()
    try:
        result = core.as_written(args, kwargs)
    except Exception as raised:
        if isinstance(raised, type(error.__cause__)):
            same = error
        else:
            raise
    else:
        kind = type(error.__cause__).__name__
        core.warn(
            f"an operator of {core.options.name!r} raised {kind}, which the function itself handles and no "
            "captured graph does, so the original runs for such calls"
        )
        return result
    try:
        raise same  # it tells the region, too
    finally:
        del same, error  # else they hold each other
