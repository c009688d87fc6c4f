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


_FALSE = frozenset(["0", "false", "no", "off"])


def shown() -> bool:
    """``DYNAFLOW_XLA_PROGRESS`` decides, 1 or 0; without it lines go to terminals only."""
    if wish := os.environ.get("DYNAFLOW_XLA_PROGRESS"):
        return wish.strip().lower() not in _FALSE
    try:
        return sys.stderr.isatty()
    except Exception:  # there is none, it is closed, or something else of the user's
        return False


def say(line: str) -> None:
    """Writes a line to standard error, if it can be written: what it tells of goes on."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{line}\n")


@contextlib.contextmanager
def report(what: str) -> Iterator[Callable[[str], None]]:
    """Around a step that may take long.

    Args:
        what: What is being done, e.g. "compiling 'f': 2 lane programs".

    Yields:
        A function that takes a text on how far the step is.
    """
    start = last = time.monotonic()
    state = what
    _log.debug("%s", what)

    def show() -> None:
        nonlocal last
        last = time.monotonic()
        say(f"dynaflow_xla: {state} ...")

    timer = threading.Timer(_PATIENCE_S, show) if shown() else None
    if timer is not None:
        timer.daemon = True
        timer.start()

    def tick(text: str) -> None:
        nonlocal state
        state = f"{what}: {text}"
        _log.debug("%s", state)
        if timer is not None and time.monotonic() - last > _PATIENCE_S:
            show()

    try:
        yield tick
    finally:
        if timer is not None:
            timer.cancel()
        _log.info("%s took %.2f s", what, time.monotonic() - start)
