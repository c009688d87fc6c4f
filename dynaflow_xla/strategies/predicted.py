"""Which of several plans the cost model predicts to be the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_xla.timelines.simulator import simulate, where_it_runs


def fastest(entries: Sequence[Any], tried: Sequence[tuple[int, ...]]) -> tuple[int, str]:
    """The number of the fastest, the first of equal ones; and what to say of the choice.

    Args:
        entries: Plans with their graphs (``plan``, ``pg`` and ``program_ns``).
        tried: The sizes of nano-batches that each is for.
    """
    times = [
        simulate(entry.plan, entry.pg, program_ns=entry.program_ns, **where_it_runs(entry)).total_ns
        for entry in entries
    ]
    best = min(range(len(times)), key=lambda n: (times[n], n))
    others = [f"{list(sizes)} {ns / 1e3:.0f} us" for sizes, ns in zip(tried, times, strict=True)]
    return best, f"the cost model chose {list(tried[best])} of: {', '.join(others)}"
