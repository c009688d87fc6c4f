"""What PyTorch's loggers print while Dynamo captures: errors and ends of graphs that are told otherwise."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TOLD_OTHERWISE = {
    # The original runs then, and raises the same as it does without a schedule.
    "torch._subclasses.fake_tensor": "failed while attempting to run meta for",
    # One warning of ours says where a graph ends, or the function is called as it is.
    "torch._dynamo.variables.tensor": "Graph break from `Tensor.item()`",
}
"""Logger -> how the records begin that the unscheduled call does not print."""


class _Here(threading.local):
    captures = False


_here = _Here()


def _passes(record: logging.LogRecord) -> bool:
    return not (_here.captures and str(record.msg).startswith(_TOLD_OTHERWISE[record.name]))


@contextmanager
def quiet() -> Iterator[None]:
    """While a capture of ours lasts on this thread; who asked a logger for all it has (DEBUG) gets it."""
    for name in _TOLD_OTHERWISE:
        logger = logging.getLogger(name)
        if logger.getEffectiveLevel() > logging.DEBUG:
            logger.addFilter(_passes)
        else:
            logger.removeFilter(_passes)
    before, _here.captures = _here.captures, True
    try:
        yield
    finally:
        _here.captures = before
