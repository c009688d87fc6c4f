"""Scratch planning: two buffers share bytes only if the plan orders every access of one before the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynaflow_xla.machine import ALIGNMENT, aligned


@dataclass(frozen=True)
class Request:
    """Memory wanted for one buffer; ``accesses`` are instruction numbers that write or read it."""

    id: int
    bytes: int
    accesses: tuple[int, ...]


def disjoint_in_time(
    a: Sequence[int], b: Sequence[int], before: Callable[[int, int], bool]
) -> bool:
    """Whether all accesses of one happen before all accesses of the other, in either order."""
    return all(before(i, j) for i in a for j in b) or all(before(j, i) for i in a for j in b)


def assign_offsets(
    requests: Sequence[Request], before: Callable[[int, int], bool]
) -> tuple[dict[int, int], int]:
    """Greedy best fit, largest first.

    Args:
        requests: The buffers.
        before: ``before(i, j)``: instruction i happens before j in every run of the plan.

    Returns:
        Offset of each buffer id in bytes, and the total size.
    """
    placed: list[tuple[int, int, Request]] = []
    offsets: dict[int, int] = {}
    peak = 0
    for request in sorted(requests, key=lambda r: (-r.bytes, r.id)):
        size = max(aligned(request.bytes), ALIGNMENT)
        taken = sorted(
            (start, end)
            for start, end, other in placed
            if not disjoint_in_time(request.accesses, other.accesses, before)
        )
        best: tuple[int, int] | None = None  # (gap, offset)
        cursor = 0
        for start, end in taken:
            if start - cursor >= size and (best is None or start - cursor < best[0]):
                best = (start - cursor, cursor)
            cursor = max(cursor, end)
        offset = cursor if best is None else best[1]
        offsets[request.id] = offset
        placed.append((offset, offset + size, request))
        peak = max(peak, offset + size)
    return offsets, peak
