"""Timelines: what ran where and when, predicted or measured, and what bounded it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dynaflow_xla.errors import PlanError

TIMELINE_VERSION = 1
"""Version of the JSON form, apart from the package version."""

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

    @property
    def duration_ns(self) -> int:
        """``end_ns - start_ns``."""
        return self.end_ns - self.start_ns


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


class Timeline(msgspec.Struct, frozen=True):
    """Spans of one run.

    Attributes:
        kind: ``predicted`` (``simulate``) or ``measured`` (``profile``).
        spans: All spans, in no promised order.
        lanes: Number of lanes.
        total_ns: End of the last span.
        meta: ``name`` of the function, ``notes`` (sentences), and what else the maker knows.
        bound: What the same regions could reach at best; None if unknown.
    """

    kind: Literal["predicted", "measured"]
    spans: tuple[Span, ...]
    lanes: int
    total_ns: int
    meta: dict[str, Any] = {}
    bound: Bound | None = None

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(self.meta.get("name", ""))

    def busy_ns(self, lane: int) -> int:
        """Time a lane spent in regions."""
        return sum(s.duration_ns for s in self.spans if s.lane == lane and s.kind == "launch")

    def overlap_ns(self, a: int, b: int) -> int:
        """Time during which lanes ``a`` and ``b`` both ran regions."""
        first = [s for s in self.spans if s.lane == a and s.kind == "launch"]
        second = [s for s in self.spans if s.lane == b and s.kind == "launch"]
        return sum(
            max(0, min(s.end_ns, t.end_ns) - max(s.start_ns, t.start_ns))
            for s in first
            for t in second
        )

    def concurrent_ns(self) -> int:
        """Time during which two or more lanes ran regions."""
        edges = sorted(
            edge
            for s in self.spans
            if s.kind == "launch" and s.duration_ns
            for edge in ((s.start_ns, 1), (s.end_ns, -1))
        )
        busy = since = total = 0
        for time, step in edges:
            if busy >= 2:
                total += time - since
            busy, since = busy + step, time
        return total

    def idle(self, lane: int | None = None) -> tuple[Span, ...]:
        """Waits and idle spans, longest first, each with its ``reason``; of one lane or of all."""
        found = [
            s
            for s in self.spans
            if s.kind in ("wait", "idle") and s.duration_ns and lane in (None, s.lane)
        ]
        return tuple(sorted(found, key=lambda s: -s.duration_ns))

    def region_ns(self) -> dict[int, float]:
        """Region id -> time a launch of it took (the mean over nano-batches).

        The ids are those of this plan's cut: give ``simulate`` the timeline, which finds the same
        regions in another one.
        """
        times: dict[int, list[int]] = {}
        for span in self.spans:
            if span.kind == "launch":
                times.setdefault(span.region, []).append(span.duration_ns)
        return {region: sum(found) / len(found) for region, found in times.items()}

    def critical_path(self) -> tuple[Span, ...]:
        """The chain of regions and copies that bounds the end, first one first.

        Goes back from what ended last: at each span, to whatever ended last among what it had to
        wait for, on its own lane or on another. Gaps in the chain are hand-overs and dispatch.
        """
        return tuple(self.spans[i] for i in self.critical_indices())

    def critical_indices(self) -> tuple[int, ...]:
        """Indices in ``spans`` of ``critical_path``."""
        order = sorted(
            (i for i, s in enumerate(self.spans) if s.kind != "idle"),
            key=lambda i: (self.spans[i].start_ns, self.spans[i].end_ns, i),
        )
        previous: dict[int, int] = {}
        last: dict[int, int] = {}
        for i in order:
            if self.spans[i].lane in last:
                previous[i] = last[self.spans[i].lane]
            last[self.spans[i].lane] = i
        ends = [i for i in order if self.spans[i].kind != "wait"]
        path: list[int] = []
        seen: set[int] = set()
        at = max(ends, key=lambda i: (self.spans[i].end_ns, i), default=None)
        while at is not None:
            seen.add(at)
            if self.spans[at].kind != "wait":
                path.append(at)
            choices = [i for i in self.spans[at].after if i not in seen]
            if at in previous and previous[at] not in seen:
                choices.append(previous[at])
            at = max(choices, key=lambda i: self.spans[i].end_ns, default=None)
        return tuple(reversed(path))

    def summary(self) -> str:
        """One line: length, lanes, bound, overlap."""
        line = f"{self.kind}: {us(self.total_ns)} on {self.lanes} lane{'s' * (self.lanes != 1)}"
        if self.bound is not None:
            line += f"; {self.bound.to_text(self.total_ns)}"
        if self.lanes > 1 and self.total_ns:
            line += (
                f"; two or more lanes busy {self.concurrent_ns() / self.total_ns:.0%} of the time"
            )
        return "; ".join([line, *self.meta.get("notes", ())])

    def to_text(self) -> str:
        """One line a span, each lane's share of busy time, the critical path, the bound."""
        lines = [f"{self.kind} timeline, {self.total_ns / 1e3:.1f} us, {self.lanes} lanes"]
        critical = set(self.critical_indices())
        order = sorted(
            range(len(self.spans)), key=lambda i: (self.spans[i].start_ns, self.spans[i].lane, i)
        )
        for i in order:
            span = self.spans[i]
            lane = "outer " if span.lane < 0 else f"lane {span.lane}"
            nano = f" [{span.nano}]" if span.nano else ""
            lines.append(
                f"{'*' if i in critical else ' '} {lane}  {span.start_ns / 1e3:10.1f} .. "
                f"{span.end_ns / 1e3:10.1f} us  {span.kind:6} {span.reason or span.name}{nano}"
            )
        for lane_number in range(self.lanes):
            share = self.busy_ns(lane_number) / self.total_ns if self.total_ns else 0.0
            lines.append(f"  lane {lane_number} busy {share:.0%}")
        path = self.critical_path()
        if path:
            names = " > ".join(s.name for s in path if s.kind == "launch")
            took = sum(s.duration_ns for s in path)
            lines.append(f"* critical path, {us(took)}: {names}")
        if self.bound is not None:
            lines.append(f"  {self.bound.to_text(self.total_ns)}")
        lines += [f"  note: {note}" for note in self.meta.get("notes", ())]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.to_text()

    def to_json(self) -> str:
        """JSON form; ``Timeline.from_json`` reads it back, equal."""
        data = {"version": TIMELINE_VERSION, **msgspec.to_builtins(self)}
        return msgspec.json.encode(data, order="deterministic").decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Timeline:
        """Reads ``to_json``'s form.

        Raises:
            PlanError: malformed, of another version, or with spans that cannot be.
        """
        try:
            data = msgspec.json.decode(text)
            version = data.pop("version", None) if isinstance(data, dict) else None
            if version != TIMELINE_VERSION:
                raise PlanError(
                    f"this build reads timeline version {TIMELINE_VERSION}; got {version!r}"
                )
            timeline = msgspec.convert(data, cls)
        except msgspec.MsgspecError as error:
            raise PlanError(f"malformed timeline: {error}") from error
        for number, span in enumerate(timeline.spans):
            if not (
                -1 <= span.lane < timeline.lanes
                and 0 <= span.start_ns <= span.end_ns <= timeline.total_ns
                and all(0 <= i < len(timeline.spans) for i in span.after)
            ):
                raise PlanError(
                    f"span {number} ({span.name!r}) of the timeline must lie on lanes -1 to "
                    f"{timeline.lanes - 1} within 0 to {timeline.total_ns} ns, and follow spans that "
                    f"exist; got lane {span.lane}, {span.start_ns} to {span.end_ns} ns, "
                    f"after {span.after}"
                )
        return timeline

    def hand_overs(self) -> tuple[tuple[int, int], ...]:
        """(producer, consumer) indices of launches on different lanes, the consumer reading from it."""
        return tuple(
            (before, i)
            for i, s in enumerate(self.spans)
            if s.kind == "launch"
            for before in s.after
            if self.spans[before].kind == "launch" and self.spans[before].lane != s.lane
        )

    def to_perfetto(self, path: str | Path) -> Path:
        """Writes a trace for ui.perfetto.dev: Perfetto protobuf for ``.pftrace``, else JSON.

        The JSON (Trace Event Format) opens in chrome://tracing too. Arrows lead from producers to
        consumers on other lanes.

        Raises:
            UnsupportedError: ``.pftrace`` without the package ``perfetto``.
        """
        from dynaflow_xla.timelines.traces import write_trace

        return write_trace(self, Path(path))

    def plot(self, path: str | Path) -> Path:
        """Draws lanes as rows; PNG or SVG by the suffix.

        Raises:
            PlanError: another suffix.
            UnsupportedError: matplotlib is not installed.
        """
        from dynaflow_xla.timelines.plot import write_plot

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
        from dynaflow_xla.timelines.page import write_html

        return write_html(self, Path(path), original_ms)


def us(ns: float) -> str:
    """A time for people: ``870 ns``, ``12.3 us``, ``4.56 ms``, ``1.20 s``."""
    for unit, size in (("ns", 1.0), ("us", 1e3), ("ms", 1e6)):
        if ns < 1000 * size:
            value = ns / size
            return f"{value:.0f} {unit}" if size == 1 else f"{value:.3g} {unit}"
    return f"{ns / 1e9:.3g} s"


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
