"""What happens, told to whoever asks: records of ``logging`` with fields, and counters.

There is a logger for each area, below ``dynaflow_xla``: ``plan``, ``auto``, ``compile``, ``fallback``,
``cache``. A record's fields are its attributes, each with ``dfx_`` in front. Nothing here runs in a call that
goes straight to what was made for it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from dynaflow_xla.errors import FallbackWarning

Area = Literal["plan", "auto", "compile", "fallback", "cache"]
Counter = Literal[
    "plans",
    "compiles",
    "compile_ns",
    "decisions",
    "decisions_from_disk",
    "fallbacks",
    "refused_caches",
    "selected",
    "switches",
]

# As libraries do: without a handler of the user's, nothing is printed (fallbacks are warnings already).
logging.getLogger("dynaflow_xla").addHandler(logging.NullHandler())

_lock = threading.Lock()
_counts: dict[str, int] = {}


def count(name: Counter, by: int = 1) -> None:
    """Adds to a counter of this process."""
    with _lock:
        _counts[name] = _counts.get(name, 0) + by


def counts() -> dict[str, int]:
    """All counters that are not 0."""
    with _lock:
        return dict(_counts)


def told(area: Area, text: str, level: int = logging.INFO, **fields: Any) -> None:
    """A record of an area's logger.

    Args:
        area: Which.
        text: For people.
        level: Of the record.
        **fields: Its attributes, without ``dfx_``.
    """
    logger = logging.getLogger(f"dynaflow_xla.{area}")
    if logger.isEnabledFor(level):
        logger.log(level, "%s", text, extra={f"dfx_{name}": x for name, x in fields.items()})


def fallback(text: str, *, may_wait: bool = False) -> None:
    """Warns, at the user's line, that something runs in a plainer way than asked for, tells it and counts it.

    Args:
        text: What, and why.
        may_wait: Inside of ``warning_last`` warn at its end.
    """
    count("fallbacks")
    told("fallback", text, logging.WARNING, reason=text)
    waiting = getattr(_here, "waiting", None)
    if may_wait and waiting is not None:
        waiting.append(text)
    else:
        _warn(text)


_BETWEEN = frozenset(["dynaflow_xla", "jax", "torch", "contextlib", "functools"])
"""Packages whose lines say nothing to whoever called a scheduled function."""

_GENERATED = "<dynaflow_xla", "<eval_with_key>"
"""How the files of functions begin that are made here, or by ``torch.fx``."""


def _warn(text: str) -> None:
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_between(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, FallbackWarning, stacklevel=level)


def _is_between(frame: types.FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    return module.partition(".")[0] in _BETWEEN or frame.f_code.co_filename.startswith(_GENERATED)


_here = threading.local()


@contextlib.contextmanager
def warning_last() -> Iterator[None]:
    """Warnings of this thread that may wait come at the end.

    Where the user makes errors of warnings, one that only says what later processes will lack would else
    take from this one what was done.
    """
    before, _here.waiting = getattr(_here, "waiting", None), []
    try:
        yield
    finally:
        texts, _here.waiting = _here.waiting, before
    for text in texts:
        _warn(text)
