"""``dynaflow-xla compare``: what became slower or faster between two result files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from dynaflow_xla.cli.console import CommandOutput
from dynaflow_xla.cli.targets import TargetError
from dynaflow_xla.cli.timing import measuring

_STYLES = {"slower": "bold red", "faster": "green", "same": ""}
_BUSY = 0.25
"""Cores that other processes used while a file was measured, from which on it is told."""


def read(path: Path) -> dict[str, Any]:
    """A result file of ``bench`` or of the project's benchmarks.

    Raises:
        TargetError: it cannot be read, or holds no samples.
    """
    try:
        data = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise TargetError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict) or not samples(data):
        raise TargetError(
            f"{path} holds no timings of the form that is read here: cases with samples_ms, as "
            "`dynaflow-xla bench --out` writes them"
        )
    return data


def samples(data: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """By case and by what ran it, the milliseconds of each round."""
    found: dict[str, dict[str, list[float]]] = {}
    for case in data.get("cases") or data.get("rows") or []:
        if not isinstance(case, dict) or not isinstance(case.get("samples_ms"), dict):
            continue
        kept = found.setdefault(name_of(case), {})
        for way, values in case["samples_ms"].items():
            if isinstance(values, list) and values and all(_is_time(v) for v in values):
                kept[str(way)] = values
    return {name: ways for name, ways in found.items() if ways}


def name_of(case: dict[str, Any]) -> str:
    """What a case of a result file is called."""
    parts = (case.get("name", case.get("case")), case.get("framework"), case.get("strategy"))
    return ", ".join(str(part) for part in parts if part)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def baselines(data: dict[str, Any]) -> set[str]:
    """What of a file runs without a schedule."""
    told = data.get("baselines")
    found = {str(name) for name in told} if isinstance(told, list) else set()
    return found | {"plain 1", "plain 2", "jit", "eager"}


def compare(a: Path, b: Path, least: float, out: CommandOutput) -> int:
    """Prints the table; returns the exit status: 1 if anything became slower but the machine.

    Baselines of a case that has schedules, too, tell what became of the machine, and count for nothing.
    """
    before, after = read(a), read(b)
    old, new = samples(before), samples(after)
    plain = baselines(before) & baselines(after)
    rows = []
    for case in (c for c in old if c in new):
        both = [way for way in old[case] if way in new[case]]
        base = next((way for way in both if way in plain), None)
        compared = any(way not in plain for way in both)
        for way in both:
            known = None
            if base is not None and way not in plain:
                known = old[case][base], new[case][base]
            made = measuring.change(old[case][way], new[case][way], known, least)
            rows.append(
                {"case": case, "way": way, "baseline": base if known else None,
                 "machine": way in plain and compared, **made}
            )  # fmt: skip
    if not rows:
        raise TargetError(f"{a} and {b} have no case in common that was run in the same way")
    counts = {v: sum(row["verdict"] == v and not row["machine"] for row in rows) for v in _STYLES}
    rule = measuring.RULE.format(draws=measuring.DRAWS, least=least)
    notes = [*_differences(before, after), *_left_out(old, new)]
    out.result({"rule": rule, "counts": counts, "rows": rows, "notes": notes})
    out.table(
        ["case", "way", "after / before", "95 % interval", "verdict"],
        [
            [r["case"], r["way"], f"{r['ratio']:.3f}", f"{r['low']:.3f} to {r['high']:.3f}",
             (f"{r['verdict']} (the machine)", "") if r["machine"]
             else (r["verdict"], _STYLES[r["verdict"]])]
            for r in rows
        ],
        right=(2, 3),
    )  # fmt: skip
    out.text()
    out.text(f"{counts['slower']} slower, {counts['faster']} faster, {counts['same']} the same")
    out.text(rule)
    for note in notes:
        out.text(f"note: {note}", "yellow")
    return 1 if counts["slower"] else 0


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What of the environments differs, and how busy the machines were."""
    a, b = before.get("environment") or {}, after.get("environment") or {}
    notes = []
    for key in ("cpu", "cores", "python", "versions", "variables"):
        if a.get(key) != b.get(key) and key in a and key in b:
            notes.append(f"the files differ in {key}: {_differing(a[key], b[key])}")
    for name, data in (("the first", before), ("the second", after)):
        busy = [
            c.get("contention", {}).get("others_cores") or 0
            for c in data.get("cases") or data.get("rows") or []
            if isinstance(c, dict)
        ]
        if busy and max(busy) > _BUSY:
            notes.append(
                f"while {name} file was measured, other processes used up to {max(busy):.2g} cores"
            )
    return notes


def _differing(a: Any, b: Any) -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(k for k in {*a, *b} if a.get(k) != b.get(k))
        return ", ".join(f"{k} {a.get(k)} and {b.get(k)}" for k in keys)
    return f"{a} and {b}"


def _left_out(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    notes = []
    for name, mine, other in (("first", old, new), ("second", new, old)):
        if alone := [case for case in mine if case not in other]:
            notes.append(f"only in the {name} file: {', '.join(alone)}")
    return notes
