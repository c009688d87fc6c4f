"""Timelines as one self-contained HTML page; its layout and behaviour are in page.html."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any

from dynaflow_xla.errors import PlanError, checks
from dynaflow_xla.timelines.run import Run
from dynaflow_xla.timelines.spans import Span, us as _show

_TEMPLATE = Path(__file__).with_name("page.html")
_RESOURCES = ("compute", "memory", "network", "host")
_MOST_IDLE = 12
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def write_html(timeline: Run, path: Path, original_ms: float | Run | None) -> Path:
    """Writes the page of ``Timeline.to_html``; returns its path."""
    original = _original(original_ms)
    parts = {
        "title": _text(timeline.name or "timeline"),
        "kind": _text(timeline.kind),
        "summary": _summary(timeline, original),
        "lanes": _lanes(timeline),
        "legend": _legend([timeline] + ([original] if isinstance(original, Run) else [])),
        "notes": _notes(timeline),
        "idle": _idle(timeline),
        "table": _table(timeline),
        "data": _script_json(_data(timeline, original)),
    }
    template = _TEMPLATE.read_text(encoding="utf-8")
    # One pass: a name that looks like a slot is text, not a slot.
    page = re.sub(r"<!--slot:(\w+)-->", lambda m: parts[m[1]], template)
    # Names may hold halves of surrogate pairs, which no encoding has.
    path.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    return path


def _original(given: float | Run | None) -> float | Run | None:
    """Nanoseconds, a timeline or None."""
    if given is None or isinstance(given, Run):
        return given
    number = checks.real(given)
    if number is None or not 0 < number < math.inf:
        raise PlanError(f"original_ms must be a time in milliseconds > 0 or a Run; got {given!r}")
    return number * 1e6


def _time(ns: float) -> str:
    return _show(ns).replace(" us", " \N{MICRO SIGN}s")


def _text(value: object) -> str:
    return html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value)))


def _script_json(data: Any) -> str:
    """JSON that a script element can hold: nothing in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _summary(timeline: Run, original: float | Run | None) -> str:
    total = timeline.total_ns
    facts = [("total", _time(total))]
    if original is not None:
        before = original.total_ns if isinstance(original, Run) else original
        facts.append(("original", _time(before)))
        if total and before:
            ratio = before / total
            text = f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"
            kind = original.kind if isinstance(original, Run) else "measured"
            if kind != timeline.kind:
                text += f" ({timeline.kind} against {kind})"
            facts.append(("against the original", text))
    if timeline.bound is not None:
        facts.append(("bound", timeline.bound.to_text(total)))
    if timeline.lanes > 1:
        facts.append(("two or more lanes busy", _share(timeline.concurrent_ns(), total)))
    return "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in facts)


def _lanes(timeline: Run) -> str:
    return "".join(
        f'<li><span>lane {lane}</span><meter min="0" max="{max(timeline.total_ns, 1)}" '
        f'value="{timeline.busy_ns(lane)}" aria-label="lane {lane} busy"></meter>'
        f"<b>{_share(timeline.busy_ns(lane), timeline.total_ns)}</b> busy</li>"
        for lane in range(timeline.lanes)
    )


def _legend(timelines: list[Run]) -> str:
    spans = [s for t in timelines for s in t.spans]
    launched = {s.resource for s in spans if s.kind == "launch"}
    items = [(f"fill r-{_class(r)}", r or "region") for r in sorted(launched)]
    kinds = {s.kind for s in spans}
    if "copy" in kinds:
        items.append(("fill r-copy", "copy"))
    if kinds & {"wait", "idle"}:
        items.append(("hatch", "idle or waiting (hover for the reason)"))
    if launched:
        items.append(("crit", "critical path"))
    nanos = sorted({s.nano for s in spans})
    if len(nanos) > 1:
        items += [(f"fill n-{nano % 6}", f"nano-batch {nano}") for nano in nanos]
    return "".join(f'<li><i class="{c}"></i>{_text(label)}</li>' for c, label in items)


def _class(resource: str) -> str:
    return resource if resource in _RESOURCES else "other"


def _notes(timeline: Run) -> str:
    notes = timeline.meta.get("notes", ())
    return "".join(f"<p>{_text(note)}</p>" for note in notes)


def _idle(timeline: Run) -> str:
    sums: dict[tuple[int, str], int] = {}
    for span in timeline.idle():
        key = (span.lane, span.reason)
        sums[key] = sums.get(key, 0) + span.duration_ns
    if not sums:
        return '<tr><td colspan="4">no lane was ever idle</td></tr>'
    rows = sorted(sums.items(), key=lambda item: -item[1])
    rest = sum(ns for _, ns in rows[_MOST_IDLE:])
    more = f"<tr><td></td><td>{len(rows) - _MOST_IDLE} more reasons</td><td>{_time(rest)}</td><td></td></tr>"
    return "".join(
        f"<tr><td>lane {lane}</td><td>{_text(reason)}</td><td>{_time(ns)}</td>"
        f"<td>{_share(ns, timeline.total_ns)}</td></tr>"
        for (lane, reason), ns in rows[:_MOST_IDLE]
    ) + (more if len(rows) > _MOST_IDLE else "")


def _row_name(lane: int) -> str:
    return f"lane {lane}" if lane >= 0 else "outer program"


def _table(timeline: Run) -> str:
    critical = set(timeline.critical_indices())
    order = sorted(enumerate(timeline.spans), key=lambda x: (x[1].start_ns, x[1].lane, x[0]))
    rows = []
    for i, span in order:
        cells = [
            _row_name(span.lane), span.name, span.kind, str(span.nano), _time(span.start_ns),
            _time(span.duration_ns), _share(span.duration_ns, timeline.total_ns),
            "yes" if i in critical else "", _si(span.flops), _si(span.bytes_moved), span.source,
            span.reason,
        ]  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    return "".join(rows)


def _si(value: float) -> str:
    if not value:
        return ""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "


def _data(timeline: Run, original: float | Run | None) -> dict[str, Any]:
    groups = []
    if isinstance(original, Run):
        groups.append(_group(original, f"original ({original.kind})", False))
    elif original is not None:
        name = f"original {_time(original)}"
        span = {"s": 0, "e": original, "n": name, "k": "launch", "r": "other", "own": "original"}
        groups.append({"title": "original", "rows": [{"label": "call", "spans": [span]}]})
    groups.append(_group(timeline, f"scheduled ({timeline.kind})", True))
    end = original.total_ns if isinstance(original, Run) else original or 0
    return {"end": max(timeline.total_ns, end), "groups": groups}


def _group(timeline: Run, title: str, main: bool) -> dict[str, Any]:
    critical = {index: order for order, index in enumerate(timeline.critical_indices())}
    several = len({s.nano for s in timeline.spans}) > 1
    outer = any(s.lane < 0 for s in timeline.spans)
    rows = []
    for lane in [*([-1] if outer else []), *range(timeline.lanes)]:
        spans = [
            _span(timeline, i, s, critical.get(i, -1) if main else -1, several)
            for i, s in enumerate(timeline.spans)
            if s.lane == lane and (s.duration_ns or s.kind != "wait")
        ]
        rows.append({"label": f"lane {lane}" if lane >= 0 else "outer", "spans": spans})
    return {"title": title, "rows": rows, "edges": timeline.hand_overs() if main else ()}


def _span(timeline: Run, index: int, s: Span, critical: int, several: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "i": index, "s": s.start_ns, "e": s.end_ns, "n": s.name, "k": s.kind,
        "r": "copy" if s.kind == "copy" else _class(s.resource), "own": _row_name(s.lane),
        "p": _share(s.duration_ns, timeline.total_ns),
    }  # fmt: skip
    if critical >= 0:
        made["c"] = critical
    if several and s.kind == "launch":
        made["b"] = s.nano
    if s.flops:
        made["f"] = _si(s.flops) + "flop"
    if s.bytes_moved:
        made["m"] = _si(s.bytes_moved) + "B"
    for key, value in (("src", s.source), ("why", s.reason)):
        if value:
            made[key] = value
    return made
