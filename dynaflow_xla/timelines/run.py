"""One run of a plan: its spans, and what follows from them."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal, Self

import msgspec

from dynaflow_xla.errors import PlanError, bad_argument, checks
from dynaflow_xla.timelines.spans import Bound, Span, us

TIMELINE_VERSION = 1
"""Version of the JSON form, apart from the package version."""


class Run(msgspec.Struct, frozen=True):
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
        """Time a lane spent in regions; -1 is the outer program.

        Raises:
            PlanError: there is no such lane.
        """
        return sum(s.duration_ns for s in self._launched(lane))

    def overlap_ns(self, a: int, b: int) -> int:
        """Time during which lanes ``a`` and ``b`` both ran regions; -1 is the outer program.

        Raises:
            PlanError: there is no such lane.
        """
        second = self._launched(b)
        return sum(
            max(0, min(s.end_ns, t.end_ns) - max(s.start_ns, t.start_ns))
            for s in self._launched(a)
            for t in second
        )

    def _launched(self, lane: int) -> list[Span]:
        """Spans of a lane's regions."""
        number = checks.integer(lane)
        if number is None or not -1 <= number < self.lanes:
            raise bad_argument(
                lane,
                Integral,
                f"lane must be a number from 0 to {self.lanes - 1} (-1: the outer program); got {lane!r}",
            )
        return [s for s in self.spans if s.lane == number and s.kind == "launch"]

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
        """JSON form; ``Run.from_json`` reads it back, equal."""
        data = {"version": TIMELINE_VERSION, **msgspec.to_builtins(self)}
        return msgspec.json.encode(data, order="deterministic").decode()

    @classmethod
    def from_json(cls, text: str | bytes | Any) -> Self:
        """Reads ``to_json``'s form.

        Raises:
            PlanError: malformed, of another version, or with spans that cannot be.
        """
        if not isinstance(text, str | bytes):
            told = f"a timeline is read from text or bytes; got {text!r:.80}"
            raise bad_argument(text, str, told)
        try:
            data = msgspec.json.decode(text)
            version = data.pop("version", None) if isinstance(data, dict) else None
            if version != TIMELINE_VERSION:
                raise PlanError(
                    f"this build reads timeline version {TIMELINE_VERSION}; got {version!r}"
                )
            timeline = msgspec.convert(data, cls)
        except PlanError:
            raise
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
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
