"""What takes long says so: through ``logging``, and on a terminal by a line on standard error."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

_log = logging.getLogger("dynaflow_xla")

_PATIENCE_S = 1.0
"""A step that is over sooner is not worth a line, and two lines lie so far apart."""


def _shown() -> bool:
    """``DYNAFLOW_XLA_PROGRESS=1`` and ``=0`` decide; else lines go to terminals only."""
    wish = os.environ.get("DYNAFLOW_XLA_PROGRESS")
    return wish != "0" if wish else sys.stderr.isatty()


@contextlib.contextmanager
def report(what: str) -> Iterator[Callable[[str], None]]:
    """Around a step that may take long.

    Args:
        what: What is being done, e.g. "compiling 'f': 2 lane programs".

    Yields:
        A function that takes a text on how far the step is.
    """
    start = time.monotonic()
    shown = start
    state = what
    _log.debug("%s", what)

    def show() -> None:
        nonlocal shown
        shown = time.monotonic()
        sys.stderr.write(f"dynaflow_xla: {state} ...\n")

    timer = threading.Timer(_PATIENCE_S, show) if _shown() else None
    if timer is not None:
        timer.daemon = True
        timer.start()

    def tick(text: str) -> None:
        nonlocal state
        state = f"{what}: {text}"
        _log.debug("%s", state)
        if timer is not None and time.monotonic() - shown > _PATIENCE_S:
            show()

    try:
        yield tick
    finally:
        if timer is not None:
            timer.cancel()
        _log.info("%s took %.2f s", what, time.monotonic() - start)
