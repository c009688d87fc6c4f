"""Timelines: what ran where and when, predicted or measured, and what bounded it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from dynaflow_xla.timelines.page import write_html
from dynaflow_xla.timelines.plot import write_plot
from dynaflow_xla.timelines.run import Run
from dynaflow_xla.timelines.spans import Bound, Span
from dynaflow_xla.timelines.traces import write_trace


class Timeline(Run, frozen=True):
    """A run that can be looked at: as a trace, a picture or a page."""

    def to_perfetto(self, path: str | Path) -> Path:
        """Writes a trace for ui.perfetto.dev: Perfetto protobuf for ``.pftrace``, else JSON.

        The JSON (Trace Event Format) opens in chrome://tracing too. Arrows lead from producers to
        consumers on other lanes.

        Raises:
            UnsupportedError: ``.pftrace`` without the package ``perfetto``.
        """
        return write_trace(self, Path(path))

    def plot(self, path: str | Path) -> Path:
        """Draws lanes as rows; PNG or SVG by the suffix.

        Raises:
            PlanError: another suffix.
            UnsupportedError: matplotlib is not installed.
        """
        return write_plot(self, Path(path))

    def to_html(self, path: str | Path, original_ms: float | Timeline | None = None) -> Path:
        """Writes one self-contained page to read in a browser; it loads nothing.

        Args:
            path: Where to.
            original_ms: The unscheduled function, shown above on the same axis: its time in
                milliseconds, or its own timeline.

        Raises:
            PlanError: ``original_ms`` is neither a positive finite number nor a timeline.
        """
        return write_html(self, Path(path), original_ms)


def complete(
    kind: Literal["predicted", "measured"],
    spans: Sequence[Span],
    lanes: int,
    meta: dict[str, Any],
    bound: Bound | None = None,
) -> Timeline:
    """A timeline whose gaps are filled with idle spans that say why.

    Args:
        kind: See :class:`Timeline`.
        spans: Launches, waits and copies; those of one lane do not overlap. Their order stays, so
            that ``Span.after`` stays right; idle spans follow them.
        lanes: Number of lanes.
        meta: See :class:`Timeline`.
        bound: See :class:`Timeline`.
    """
    total = max((s.end_ns for s in spans), default=0)
    outer = sorted((s for s in spans if s.lane < 0), key=lambda s: s.start_ns)
    idle: list[Span] = []
    for lane in range(lanes):
        own = sorted((s for s in spans if s.lane == lane), key=lambda s: (s.start_ns, s.end_ns))
        starts = [s.start_ns for s in own]
        at = 0
        for begin, end in [*((s.start_ns, s.end_ns) for s in own), (total, total)]:
            for low, high in _pieces(at, begin, outer):
                reason = _reason(low, high, starts, outer)
                idle.append(Span(lane, "idle", "idle", low, high, reason=reason))
            at = max(at, end)
    return Timeline(kind, (*spans, *idle), lanes, total, meta, bound)


def _pieces(low: int, high: int, outer: Iterable[Span]) -> list[tuple[int, int]]:
    cuts = {t for s in outer for t in (s.start_ns, s.end_ns) if low < t < high}
    points = sorted({low, high} | cuts)
    return [(a, b) for a, b in zip(points, points[1:], strict=False) if a < b]


def _reason(low: int, high: int, starts: Sequence[int], outer: Sequence[Span]) -> str:
    """Why a lane whose spans start at ``starts`` does nothing from ``low`` to ``high``."""
    for span in outer:
        if span.start_ns <= low and high <= span.end_ns:
            return f"waits for {span.name!r} in the outer program"
    if not starts:
        return "nothing to do"
    following = bisect_right(starts, high - 1)
    barrier = next((s for s in outer if s.start_ns >= high), None)
    if following < len(starts) and (barrier is None or starts[following] < barrier.start_ns):
        before = bisect_right(starts, low - 1)
        started = before and starts[before - 1] >= max(
            (x.end_ns for x in outer if x.end_ns <= low), default=0
        )
        return "between two steps of its program" if started else "dispatch"
    return "nothing left" if barrier is None else f"nothing left before {barrier.name!r}"
