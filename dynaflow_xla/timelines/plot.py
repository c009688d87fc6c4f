"""Timelines as pictures, with matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dynaflow_xla.errors import PlanError, optional
from dynaflow_xla.timelines.run import Run
from dynaflow_xla.timelines.spans import Span

COLORS = {"compute": "#2f6fb7", "memory": "#b4570a", "network": "#157f6b", "host": "#7a4fb5"}
_OTHER, _COPY, _IDLE, _CRITICAL = "#5b6470", "#8a6d3b", "#eceff3", "#c2185b"
_UNITS = (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0))


def write_plot(timeline: Run, path: Path, original: Run | None = None) -> Path:
    """Draws the picture of ``Timeline.plot``, ``original`` above it on the same axis; returns its path."""
    if path.suffix not in (".png", ".svg"):
        raise PlanError(f"plot writes .png or .svg; got {path.name!r}")
    optional.require("matplotlib", "Timeline.plot", "trace")
    from matplotlib.figure import Figure

    shown = [timeline] if original is None else [original, timeline]
    rows = [_rows(t) for t in shown]
    figure = Figure(
        figsize=(11, sum(1.1 + 0.62 * len(r) for r in rows) + 0.6), layout="constrained"
    )
    found: Any = figure.subplots(
        len(shown), sharex=True, squeeze=False, height_ratios=[1 + len(r) for r in rows]
    )
    end = max(1, *(t.total_ns for t in shown))
    unit, scale = next(u for u in _UNITS if end >= u[1])
    texts = [
        text for t, axes in zip(shown, found[:, 0], strict=True) for text in _draw(axes, t, scale)
    ]
    last = found[-1, 0]
    last.set_xlim(0, end / scale)
    last.set_xlabel(unit)
    resources = {s.resource for t in shown for s in t.spans if s.kind == "launch"}
    found[0, 0].legend(
        handles=_legend(resources), loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8
    )
    figure.draw_without_rendering()
    per_unit = last.transData.transform((1, 0))[0] - last.transData.transform((0, 0))[0]
    for text, length in texts:  # a name that does not fit into its bar would cover its neighbours
        if text.get_window_extent().width > 0.95 * length * per_unit:
            text.remove()
    figure.savefig(path, dpi=130)
    return path


def _rows(timeline: Run) -> list[int]:
    """Lanes from the top; the outer program, -1, above them if it has any span."""
    return [*([-1] if any(s.lane < 0 for s in timeline.spans) else []), *range(timeline.lanes)]


def _draw(axes: Any, timeline: Run, scale: float) -> list[tuple[Any, float]]:
    """Draws the spans on one pair of axes; returns the names with the lengths of their bars."""
    rows, critical, texts = _rows(timeline), set(timeline.critical_indices()), []
    for i, span in enumerate(timeline.spans):
        start, length = span.start_ns / scale, span.duration_ns / scale
        idle = span.kind in ("wait", "idle")
        axes.barh(
            rows.index(span.lane), length, left=start, height=0.34 if span.kind == "copy" else 0.66,
            color=_color(span), hatch="////" if idle else None,
            edgecolor=_CRITICAL if i in critical else "#b9c0ca" if idle else "white",
            linewidth=1.8 if i in critical else 0.4, zorder=3 if i in critical else 2,
        )  # fmt: skip
        if span.kind == "launch":
            name = span.name + (f" [{span.nano}]" if span.nano else "")
            text = axes.text(
                start + length / 2, rows.index(span.lane), name, ha="center", va="center",
                color="white", fontsize=9, clip_on=True, zorder=4, parse_math=False,
            )  # fmt: skip
            texts.append((text, length))
    axes.set_yticks(range(len(rows)), ["outer" if row < 0 else f"lane {row}" for row in rows])
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_title(
        "\n".join(x for x in (timeline.name, timeline.summary()) if x), fontsize=10, loc="left",
        parse_math=False,
    )  # fmt: skip
    return texts


def _legend(resources: Iterable[str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [
        *(Patch(color=c, label=r) for r, c in COLORS.items() if r in resources),
        Patch(facecolor=_COPY, label="copy"),
        Patch(facecolor=_IDLE, edgecolor="#b9c0ca", hatch="////", label="wait or idle"),
        Patch(facecolor="none", edgecolor=_CRITICAL, linewidth=1.8, label="critical path"),
    ]


def _color(span: Span) -> str:
    if span.kind == "launch":
        return COLORS.get(span.resource, _OTHER)
    return _COPY if span.kind == "copy" else _IDLE
