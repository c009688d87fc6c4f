"""What lanes do from when to when, and what no plan can beat."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynaflow_xla.ir.graph import Region

SpanKind = Literal["launch", "wait", "copy", "idle"]


class Span(msgspec.Struct, frozen=True):
    """Something a lane did, or did not do, from ``start_ns`` to ``end_ns``.

    Attributes:
        lane: Number of the lane; -1 is the outer program.
        name: The region's name; for the other kinds what it is, in words.
        kind: ``launch`` (a region), ``wait`` (for an event), ``copy`` (into or out of shared memory),
            ``idle`` (none of these).
        start_ns, end_ns: Nanoseconds from the start of the run.
        region: The region's id for a launch, else -1.
        nano: Nano-batch number.
        resource: The region's dominant resource, or "".
        flops: Estimated operations.
        bytes_moved: Estimated bytes read and written, or the bytes of a copy.
        source: ``file:line`` of the region, or "".
        reason: Why the lane does nothing, for ``wait`` and ``idle``.
        after: Indices in ``Timeline.spans`` of what had to end before this could end, other than the
            span before it on its lane: producers of its inputs, whoever signals its event.
        cores: That it ran on.
        content: What a launched region computes, as a hash: the same region of another plan has the same.
    """

    lane: int
    name: str
    kind: SpanKind
    start_ns: int
    end_ns: int
    region: int = -1
    nano: int = 0
    resource: str = ""
    flops: float = 0.0
    bytes_moved: int = 0
    source: str = ""
    reason: str = ""
    after: tuple[int, ...] = ()
    content: str = ""
    cores: int = 1

    @property
    def duration_ns(self) -> int:
        """``end_ns - start_ns``."""
        return self.end_ns - self.start_ns


def one_core_ns(region: Region, took_ns: float, cores: int, *, wide: bool = False) -> float:
    """What a region that took so long takes on a lane of one core, by the estimate of what others gained."""
    there = region.cost_at(cores, wide=wide)
    return took_ns * region.cost_ns / there if there > 0 else took_ns


class Bound(msgspec.Struct, frozen=True):
    """What no plan over the same regions, costs and lanes can beat.

    Attributes:
        serial_ns: Time of the same regions one after another on one lane.
        critical_path_ns: Longest chain of regions that need each other's values.
        shared_ns: Time if the work of the lanes were spread evenly over all of them.
        lanes: Number of lanes.
    """

    serial_ns: int
    critical_path_ns: int
    shared_ns: int
    lanes: int

    @property
    def ns(self) -> int:
        """The lower bound: the larger of critical path and evenly shared work."""
        return max(self.critical_path_ns, self.shared_ns)

    def to_text(self, total_ns: int) -> str:
        """``at best 1.42x, this plan 1.35x, against one lane``."""
        if not (self.ns and total_ns):
            return "no work"
        best, here = self.serial_ns / self.ns, self.serial_ns / total_ns
        return f"at best {best:.2f}x, this plan {here:.2f}x, against one lane"


def us(ns: float) -> str:
    """A time for people: ``870 ns``, ``12.3 us``, ``4.56 ms``, ``1.20 s``."""
    for unit, size in (("ns", 1.0), ("us", 1e3), ("ms", 1e6)):
        if ns < 1000 * size:
            value = ns / size
            return f"{value:.0f} {unit}" if size == 1 else f"{value:.3g} {unit}"
    return f"{ns / 1e9:.3g} s"
