"""Small pictures of a report, as SVG inside of the page: timelines, and times against a number."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dynaflow_xla.cli.timing import measuring

_WIDTH, _LANE, _HEIGHT = 320, 14, 70
_COLOURS = ("#3b7dd8", "#d9822b", "#3a9d5d", "#9a5fc0", "#c2473f", "#4aa5a5")
_NUMBER = re.compile(r"\d+")


def timelines(case: Mapping[str, Any]) -> str:
    """What the plans of a case do on their lanes, as ``bench`` wrote it; "" if it did not."""
    kept = case.get("timelines")
    found = {
        way: (spans, timeline)
        for way, timeline in (kept.items() if isinstance(kept, dict) else ())
        if (spans := _spans(timeline))
    }
    # One scale and one colour a region, so that a case's pictures can be compared.
    every = [span for spans, _ in found.values() for span in spans]
    whole = max((end for *_, end in every), default=0.0)
    names = list(dict.fromkeys(name for _, name, _, _ in every))
    drawn = []
    for way, (spans, timeline) in found.items():
        ms = max(end for *_, end in spans) / 1e6
        told = [f"{way}: {ms:.3g} ms, {timeline.get('kind') or 'predicted'}"]
        told += [str(note) for note in timeline.get("notes") or ()]
        drawn.append(
            f'<figure class="lanes">{_lanes(spans, whole, names)}'
            f"<figcaption>{html.escape('; '.join(told))}</figcaption></figure>"
        )
    return "".join(drawn)


def _spans(timeline: Any) -> list[tuple[int, str, float, float]]:
    """Lane, name, start and end of what ran; [] if it is anything else."""
    try:
        return [
            (int(lane), str(name), float(start), float(end))
            for lane, name, start, end in timeline["spans"]
            if float(end) > float(start) >= 0
        ]
    except (KeyError, TypeError, ValueError):
        return []


def _lanes(
    spans: Sequence[tuple[int, str, float, float]], whole: float, names: Sequence[str]
) -> str:
    lanes = sorted({lane for lane, *_ in spans})
    took = max(end for *_, end in spans)
    parts = []
    for lane, name, start, end in spans:
        x, width = start / whole * _WIDTH, max(1.0, (end - start) / whole * _WIDTH)
        parts.append(
            f'<rect x="{x:.1f}" y="{lanes.index(lane) * _LANE + 1}" width="{width:.1f}" height="{_LANE - 2}" '
            f'fill="{_COLOURS[names.index(name) % len(_COLOURS)]}"><title>{html.escape(name)}, '
            f"{(end - start) / 1e6:.3g} ms</title></rect>"
        )
    return (
        f'<svg width="{_WIDTH}" height="{len(lanes) * _LANE}" role="img" aria-label="{len(lanes)} lanes, '
        f'{took / 1e6:.3g} ms">{"".join(parts)}</svg>'
    )


def families(samples: Mapping[str, Sequence[float]]) -> dict[str, list[tuple[int, float]]]:
    """Ways whose names differ in one number only (cores, lanes, nano-batches): that, and medians in ms."""
    found: dict[str, list[tuple[int, float]]] = {}
    for way, values in samples.items():
        median = measuring.statistics(list(values))["median"]
        for match in _NUMBER.finditer(way):
            name = f"{way[: match.start()]}N{way[match.end() :]}"
            found.setdefault(name, []).append((int(match[0]), median))
    return {
        name: sorted(points) for name, points in found.items() if len({n for n, _ in points}) > 1
    }


def scaling(samples: Mapping[str, Sequence[float]]) -> str:
    """A picture for each family of ways; "" if there is none."""
    return "".join(
        f"<figure>{_bars(points)}<figcaption>{html.escape(name)}</figcaption></figure>"
        for name, points in families(samples).items()
    )


def _bars(points: Sequence[tuple[int, float]]) -> str:
    most = max(ms for _, ms in points)
    step = _WIDTH / 2 / len(points)
    parts = []
    for i, (number, ms) in enumerate(points):
        height = max(1.0, ms / most * (_HEIGHT - 30))
        x, middle = i * step + 4, i * step + step / 2
        parts.append(
            f'<rect x="{x:.1f}" y="{_HEIGHT - 15 - height:.1f}" width="{step - 8:.1f}" height="{height:.1f}" '
            f'fill="{_COLOURS[0]}"/><text x="{middle:.1f}" y="{_HEIGHT - 3}">{number}</text>'
            f'<text x="{middle:.1f}" y="{_HEIGHT - 19 - height:.1f}">{ms:.3g}</text>'
        )
    return (
        f'<svg width="{_WIDTH // 2}" height="{_HEIGHT}" role="img" aria-label="milliseconds">'
        f"{''.join(parts)}</svg>"
    )
