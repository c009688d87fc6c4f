"""Timelines: what ran where and when, predicted or measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dynaflow_xla import _optional
from dynaflow_xla.errors import PlanError

_COLORS = {"launch": "#4c78a8", "wait": "#dddddd", "copy": "#f58518"}


@dataclass(frozen=True)
class Span:
    """Something a lane did from ``start_ns`` to ``end_ns``; ``region`` is -1 for waits and copies."""

    lane: int
    name: str
    kind: Literal["launch", "wait", "copy"]
    start_ns: int
    end_ns: int
    region: int = -1


@dataclass(frozen=True)
class Timeline:
    """Spans of one run. Times are nanoseconds from its start."""

    kind: Literal["predicted", "measured"]
    spans: tuple[Span, ...]
    lanes: int
    total_ns: int
    meta: Mapping[str, Any] = field(default_factory=dict)

    def busy_ns(self, lane: int) -> int:
        """Time a lane spent in regions."""
        return sum(
            s.end_ns - s.start_ns for s in self.spans if s.lane == lane and s.kind == "launch"
        )

    def overlap_ns(self, a: int, b: int) -> int:
        """Time during which lanes ``a`` and ``b`` both ran regions."""
        first = [s for s in self.spans if s.lane == a and s.kind == "launch"]
        second = [s for s in self.spans if s.lane == b and s.kind == "launch"]
        return sum(
            max(0, min(s.end_ns, t.end_ns) - max(s.start_ns, t.start_ns))
            for s in first
            for t in second
        )

    def to_text(self) -> str:
        """One line a span, and each lane's share of busy time."""
        lines = [f"{self.kind} timeline, {self.total_ns / 1e3:.1f} us, {self.lanes} lanes"]
        for span in sorted(self.spans, key=lambda s: (s.start_ns, s.lane)):
            lines.append(
                f"  lane {span.lane}  {span.start_ns / 1e3:10.1f} .. {span.end_ns / 1e3:10.1f} us  "
                f"{span.kind:6} {span.name}"
            )
        for lane in range(self.lanes):
            share = self.busy_ns(lane) / self.total_ns if self.total_ns else 0.0
            lines.append(f"  lane {lane} busy {share:.0%}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.to_text()

    def to_perfetto(self, path: str | Path) -> Path:
        """Writes the Trace Event format, which ui.perfetto.dev and chrome://tracing open."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{self.kind} timeline"}}
        ]
        for lane in range(self.lanes):
            events.append(
                {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name",
                 "args": {"name": f"lane {lane}"}}
            )  # fmt: skip
        for span in self.spans:
            events.append(
                {"ph": "X", "pid": 1, "tid": span.lane, "name": span.name, "cat": span.kind,
                 "ts": span.start_ns / 1e3, "dur": (span.end_ns - span.start_ns) / 1e3,
                 "args": {"region": span.region}}
            )  # fmt: skip
        target = Path(path)
        target.write_text(json.dumps({"traceEvents": events, "otherData": dict(self.meta)}))
        return target

    def plot(self, path: str | Path) -> Path:
        """Draws lanes as rows; PNG or SVG by the suffix.

        Raises:
            PlanError: another suffix.
            UnsupportedError: matplotlib is not installed.
        """
        target = Path(path)
        if target.suffix not in (".png", ".svg"):
            raise PlanError(f"plot writes .png or .svg; got {target.name!r}")
        _optional.require("matplotlib", "Timeline.plot", "trace")
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        figure = Figure(figsize=(11, 1.2 + 0.8 * self.lanes), layout="constrained")
        axes = figure.subplots()
        end = max(self.total_ns, 1) / 1e3
        for span in self.spans:
            start, length = span.start_ns / 1e3, (span.end_ns - span.start_ns) / 1e3
            axes.barh(
                span.lane, length, left=start, height=0.6, color=_COLORS[span.kind],
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            if span.kind == "launch" and length > 0.06 * end:
                axes.text(
                    start + length / 2, span.lane, span.name, ha="center", va="center",
                    color="white", fontsize=9, clip_on=True,
                )  # fmt: skip
        axes.set_yticks(range(self.lanes), [f"lane {lane}" for lane in range(self.lanes)])
        axes.set_xlim(0, end)
        axes.invert_yaxis()
        axes.set_xlabel("microseconds")
        axes.set_title(f"{self.meta.get('name', '')} ({self.kind}, {end:.0f} us)")
        axes.legend(
            handles=[Patch(color=c, label=k) for k, c in _COLORS.items()], loc="upper left",
            bbox_to_anchor=(1.0, 1.0), fontsize=8,
        )  # fmt: skip
        figure.savefig(target, dpi=130)
        return target
