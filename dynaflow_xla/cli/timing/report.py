"""``dynaflow-xla report``: result files as one page that loads nothing, or as a Markdown table."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaflow_xla.cli.targets import TargetError
from dynaflow_xla.cli.timing import compare, measuring, pictures

_WIDTH, _HEIGHT, _MOST = 220, 14, 2.0
"""Of the drawn interval, in pixels; and the ratio at its right end."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
       color: #1a1a1a; background: #fff }
table { border-collapse: collapse; width: 100% } td, th { padding: .3rem .6rem; text-align: left;
       border-bottom: 1px solid #ddd } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
summary { margin-top: 1rem; cursor: pointer }
figure { display: inline-block; margin: .5rem 1.5rem .5rem 0; vertical-align: bottom }
figure.lanes { vertical-align: top } figcaption { font-size: .85em; color: #555; max-width: 320px }
       figure text { font-size: 11px; text-anchor: middle; fill: currentColor }
h3 { margin: 1.2rem 0 0; font-size: 1rem }
.win { color: #0a6b2d } .loss { color: #a4161a } p.env { color: #555 } svg { vertical-align: middle }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #16181c }
       p.env, figcaption { color: #aaa }
       td, th { border-color: #333 } .win { color: #5fd38d } .loss { color: #ff8a8a } }
"""


@dataclass(frozen=True)
class Row:
    """One way to run a case, against the fastest way without a plan.

    Attributes:
        case, way, baseline: Their names.
        ms: Median of a call.
        ratio, low, high: To the baseline, with a 95 % interval.
    """

    case: str
    way: str
    baseline: str
    ms: float
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """``win`` or ``loss`` where the whole interval says so, else ``same``."""
        return "win" if self.high < 1 else "loss" if self.low > 1 else "same"


def rows(data: dict[str, Any]) -> list[Row]:
    """Of a result file; cases without anything to compare with are left out."""
    found = []
    known = compare.baselines(data)
    peers = {
        str(case.get("name")): {
            n
            for peer, names in case["peers"].items()
            if not peer.startswith("dynaflow")
            for n in names
        }
        for case in data.get("cases") or []
        if isinstance(case, dict) and isinstance(case.get("peers"), dict)
    }
    for case, samples in compare.samples(data).items():
        plain = [n for n in samples if n in known | peers.get(case, set())]
        for way in (n for n in samples if plain and n not in plain):
            same = [n for n in plain if len(samples[n]) == len(samples[way])]
            if not same:
                continue
            told = measuring.ratio(samples, way, same)
            ms = measuring.statistics(samples[way])["median"]
            found.append(
                Row(case, way, told["baseline"], ms, told["ratio"], told["low"], told["high"])
            )
    return found


def markdown(files: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """A table for each file."""
    lines = []
    for name, data in files:
        found = rows(data)
        lines += [f"## {name}", "", _environment(data), "", _counts(found), ""]
        lines += ["| case | way | ms | ratio | 95 % interval | of |", "|---|---|---|---|---|---|"]
        lines += [
            f"| {_cell(r.case)} | {_cell(r.way)} | {r.ms:.3g} | {r.ratio:.2f} | {r.low:.2f} to {r.high:.2f} "
            f"| {_cell(r.baseline)} |"
            for r in found
        ]
        lines.append("")
    return "\n".join(lines)


def page(files: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The same as HTML, with the intervals drawn."""
    parts = []
    for name, data in files:
        found = rows(data)
        cells = []
        for before, r in zip([None, *found], found, strict=False):
            # A case is named once: the eye finds its rows by it.
            case = "" if before is not None and before.case == r.case else _text(r.case)
            cells.append(
                f'<tr><td>{case}</td><td>{_text(r.way)}</td><td class="n">{r.ms:.3g}</td>'
                f'<td class="n {r.verdict}">{r.ratio:.2f}</td><td>{_drawn(r)}</td>'
                f"<td>{_text(r.baseline)}</td></tr>"
            )
        parts.append(
            f'<h2>{_text(name)}</h2><p class="env">{_text(_environment(data))}</p>'
            f'<p>{_text(_counts(found))}</p><table><thead><tr><th>case</th><th>way</th><th class="n">ms</th>'
            f'<th class="n">ratio</th><th>95 % interval, 0 to {_MOST:g}</th><th>of</th></tr></thead>'
            f"<tbody>{''.join(cells)}</tbody></table>{_pictures(data)}"
        )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>dynaflow_xla: results</title>'
        f"<style>{_STYLE}</style></head><body><h1>Results</h1>"
        "<p>A ratio is the median time of a call under a plan over that of the fastest way without one: "
        f"below 1 is a gain.</p>{''.join(parts)}</body></html>\n"
    )


def _pictures(data: dict[str, Any]) -> str:
    """Of the cases that have any: where regions ran, and times against cores, lanes or nano-batches."""
    lanes, scaled = [], []
    samples = compare.samples(data)
    for case in data.get("cases") or data.get("rows") or []:
        if not isinstance(case, dict):
            continue
        name = compare.name_of(case)
        if drawn := pictures.timelines(case):
            lanes.append(f"<h3>{_text(name)}</h3>{drawn}")
        if drawn := pictures.scaling(samples.get(name, {})):
            scaled.append(f"<h3>{_text(name)}</h3>{drawn}")
    made = ""
    if lanes:
        what = "Plans on their lanes, a row each; above them what has all cores"
        made += f"<details open><summary>{what}</summary>{''.join(lanes)}</details>"
    if scaled:
        made += (
            "<details open><summary>Milliseconds against a number in the way's name: cores, lanes, "
            f"nano-batches</summary>{''.join(scaled)}</details>"
        )
    return made


def write(paths: Sequence[Path], out: Path) -> list[Row]:
    """Writes the page (``.html``) or the table (``.md``) of result files; returns all rows.

    Raises:
        TargetError: a file cannot be read or holds nothing to compare, or there is no such form.
    """
    if out.suffix not in (".html", ".md"):
        raise TargetError(f"a report is written as .html or .md; got {out}")
    files = [(path.stem, compare.read(path)) for path in paths]
    made = [row for _, data in files for row in rows(data)]
    if not made:
        raise TargetError(
            f"{', '.join(map(str, paths))}: report sees nothing in it that ran both with and without a plan. "
            'What ran without one must be called jit, eager or plain 1 (2), or be named in "baselines" of a '
            'file or "peers" of a case. `dynaflow-xla compare A.json B.json` needs none of these'
        )
    try:
        out.write_text((page if out.suffix == ".html" else markdown)(files), encoding="utf-8")
    except OSError as error:
        raise TargetError(f"{out} cannot be written: {error.strerror}") from error
    return made


def _environment(data: dict[str, Any]) -> str:
    told = data.get("environment") or {}
    versions = told.get("versions") or {}
    parts = [str(told.get("cpu") or "")] if told.get("cpu") else []
    if told.get("cores"):
        parts.append(f"{told['cores']} cores")
    parts += [f"{name} {version}" for name, version in versions.items() if version]
    return ", ".join([*parts, str(told.get("date") or "")]).strip(", ")


def _counts(found: Sequence[Row]) -> str:
    counts = {name: sum(r.verdict == name for r in found) for name in ("win", "loss", "same")}
    return f"{counts['win']} gain, {counts['loss']} lose, {counts['same']} are within the interval"


def _drawn(row: Row) -> str:
    """The interval as a line, the ratio as a dot, 1 as a bar across."""
    inset = 5.0  # a dot at an end is whole

    def x(value: float) -> float:
        return inset + max(0.0, min(value, _MOST)) / _MOST * (_WIDTH - 2 * inset)

    middle, dot = _HEIGHT / 2, x(row.ratio)
    shape = f'<circle cx="{dot:.1f}" cy="{middle}" r="4" fill="currentColor"/>'
    if row.ratio > _MOST:
        points = f"{dot - 4:.1f},{middle - 5} {dot + 5:.1f},{middle} {dot - 4:.1f},{middle + 5}"
        shape = f'<polygon points="{points}" fill="currentColor"><title>beyond {_MOST:g}</title></polygon>'
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{row.low:.2f} to {row.high:.2f}" '
        f'class="{row.verdict}"><line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="0" y2="{_HEIGHT}" stroke="#999"/>'
        f'<line x1="{x(row.low):.1f}" x2="{x(row.high):.1f}" y1="{middle}" y2="{middle}" '
        f'stroke="currentColor" stroke-width="3"/>{shape}</svg>'
    )


def _text(value: str) -> str:
    return html.escape(value)


def _cell(value: str) -> str:
    return value.replace("|", r"\|")
