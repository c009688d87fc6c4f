"""The original with one intra-op thread: a plain setting that ``Auto`` measures beside the usual one.

Where operators are short, waking OpenMP's threads for each costs more than they take off it; and there are
processes in which two threads take twice as long as usual, without anything that would say so beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dynaflow_xla.frontends.torch.capture import marks
from dynaflow_xla.frontends.torch.native import threads
from dynaflow_xla.ir.work import NO_SPREAD

NAME = "original on one thread"

MARGIN = 0.15
"""One thread has to gain so much: where it does, all take longer than they should, often for a while only."""

_NEAR = 1.6
"""What is predicted to take so many times as long on one core as on all is not measured, unless all cores
take longer than what is predicted for one."""


class OneThread:
    """Calls the original with one intra-op thread of PyTorch's; no plan of ours.

    The number of threads is this thread's own, and what it was after the call. A backward pass that follows
    has the usual number.

    Attributes:
        plans: There is no plan.
        splits: Nor nano-batches.
        in_parts: Its errors are the original's own.

    Args:
        original: A module or function.
    """

    plans = False
    splits = False
    in_parts = True

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def call(self, args: Any, kwargs: Any) -> Any:
        """Runs the original; raises what it raises."""
        saved = threads.limit(1)
        try:
            with marks.ignore():
                return self._original(*args, **kwargs)
        finally:
            threads.restore(saved)


def may_help(entries: Sequence[Any], call_s: float) -> bool:
    """Whether one thread may be faster than all.

    Args:
        entries: Plans of what it does.
        call_s: Seconds that a call of these with all threads took; 0 if that is not known.
    """
    count = torch.get_num_threads()
    if count < 2 or not threads.are_own():
        return False
    regions = [region for entry in entries for region in entry.pg.regions]
    if any(entry.streams for entry in entries):
        return False
    if all(region.spread == NO_SPREAD for region in regions):
        return False  # PyTorch hands nothing of it to other threads
    one = sum(region.cost_at(1) for region in regions)
    wide = sum(region.cost_at(count, wide=True) for region in regions)
    return one <= max(_NEAR * wide, call_s * 1e9)
