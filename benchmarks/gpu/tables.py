"""The results of a GPU benchmark as tables: one for a terminal, one for a page of the documentation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

SHORT = {
    "torch": {
        "torch eager": "eager", "torch one graph": "graph", "torch one graph, copied": "copied",
        "torch.compile": "comp", "torch.compile graphs": "comp-g", "dfx torch sequential": "*seq",
        "dfx torch branches": "*br", "dfx torch branches, replay": "*br-r",
        "dfx torch branches, exported": "*br-x", "dfx torch branches inductor": "*br-i",
        "dfx torch auto": "*au",
        "dfx torch auto compiled": "*au-c",
    },
    "jax": {
        "jax jit": "jit", "jax jit no graph": "no-g", "jax jit LHS": "LHS", "jax jit CONCURRENT": "CONC",
        "jax jit CONCURRENT_REGIONS": "REG", "dfx xla branches": "*br", "dfx xla branches LHS": "*br-L",
        "dfx xla branches CONCURRENT_REGIONS": "*br-R", "dfx jax auto": "*au",
        "jax jit (ffi)": "jit-f", "dfx ffi branches": "*f-br", "dfx ffi sequential": "*f-seq",
    },
}  # fmt: skip
BASE = {"torch": "torch one graph", "jax": "jax jit"}
EAGER = {"torch": ["torch eager", "torch one graph"], "jax": ["jax jit"]}
MOST = 5800  # characters: of what a machine prints only the end may be seen

Medians = dict[str, dict[str, float]]


def medians_of(record: dict[str, Any]) -> Medians:
    """By case and variant, in microseconds a call."""
    return {
        name: {k: statistics.median(v) for k, v in case["samples_us"].items() if v}
        for name, case in record["cases"].items()
    }


def _ours(name: str) -> bool:
    return name.startswith("dfx")


def _geometric(ratios: Sequence[float]) -> str:
    if not ratios:
        return "nothing measured"
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.3f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} cases)"


def _speedups(record: dict[str, Any], medians: Medians, group: str) -> list[str]:
    """Sentences about ours: the opponent's time over ours, so that more is better."""
    names, base = SHORT[group], BASE[group]
    many = [medians[n] for n, c in record["cases"].items() if c["kind"] == "multi-branch"]
    mine = [[v for k, v in m.items() if k in names and _ours(k)] for m in many]
    best = [m[base] / min(o) for m, o in zip(many, mine, strict=True) if base in m and o]
    if not any(m.keys() & names.keys() for m in medians.values()):
        return []
    lines = [f"{group}, speedup over '{base}', geometric mean of the multi-branch cases:"]
    lines.append(f"  best of ours  {_geometric(best)}")
    for name in filter(_ours, names):
        ratios = [m[base] / m[name] for m in many if base in m and name in m]
        if ratios:
            lines.append(f"  {name:36} {_geometric(ratios)}")
    if base in (pair := medians.get("prefill_decode", {})):
        each = [(pair[base] / v, k) for k, v in pair.items() if k in names and _ours(k)]
        if each:
            ratio, name = max(each)
            lines.append(f"  prefill_decode: best of ours {ratio:.3f} ({name})")
    for auto in (n for n in names if " auto" in n):
        against: dict[str, list[tuple[float, str]]] = {}
        for case, found in medians.items():
            plain = {k: v for k, v in found.items() if k in names and not _ours(k)}
            if auto not in found or not plain:
                continue
            for name in EAGER[group]:
                if name in plain:
                    against.setdefault(name, []).append((plain[name] / found[auto], case))
            # What a compiler made is no opponent of one that was not given a compiler.
            alike = {k: v for k, v in plain.items() if not k.startswith("torch.compile")}
            if group == "torch" and alike and auto == "dfx torch auto":
                ratio = min(alike.values()) / found[auto]
                against.setdefault("best without a compiler", []).append((ratio, case))
            ratio = min(plain.values()) / found[auto]
            against.setdefault("best plain", []).append((ratio, case))
        for name, each in against.items():
            worst, case = min(each)
            mean = _geometric([r for r, _ in each]).partition(" ")[0]
            lines.append(f"  {auto} over {name}: worst {worst:.3f} ({case}), mean {mean}")
    return lines


def speedups(record: dict[str, Any]) -> list[str]:
    """What the run says in all, by framework."""
    medians = medians_of(record)
    return [line for group in SHORT for line in _speedups(record, medians, group)]


def _columns(medians: Medians, group: str) -> dict[str, str]:
    return {k: v for k, v in SHORT[group].items() if any(k in m for m in medians.values())}


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def text(record: dict[str, Any]) -> str:
    """The tables and what follows from them, then reasons for what is missing, as far as they fit."""
    medians = medians_of(record)
    lines = []
    for group in SHORT:
        if columns := _columns(medians, group):
            lines.append(
                f"{group}, us a call".ljust(15) + "".join(f"{c:>7}" for c in columns.values())
            )
            for case, found in medians.items():
                row = "".join(f"{_number(found.get(k)):>7}" for k in columns)
                lines.append(f"{case[:14]:15}{row}")
    lines += speedups(record)
    for case, value in record["cases"].items():
        for name, made in value.get("overlap", {}).items():
            told = ", ".join(f"{k} {v}" for k, v in made.items() if k not in ("trace", "events"))
            lines.append(f"overlap {case} {name}: {told}"[:200])
    made = "\n".join(lines)[:MOST]
    reasons: dict[str, list[str]] = {}
    for case, value in record["cases"].items():
        for variant, why in value["failed"].items():
            first = f"{variant}: {(why.splitlines() or [''])[0]}"[:130]
            reasons.setdefault(first, []).append(case)
    for why, cases in reasons.items():
        line = f"\nmissing: {why} [{', '.join(cases)[:60]}]"
        if len(made) + len(line) > MOST:
            break
        made += line
    return made


def page(record: dict[str, Any]) -> str:
    """The same in Markdown."""
    stamp, medians = record["environment"], medians_of(record)
    gpu = stamp["gpu"].get("name", "an unknown GPU") if isinstance(stamp["gpu"], dict) else ""
    versions = {**stamp["versions"], **stamp["gpu_versions"]}
    used = ", ".join(f"{k} {versions[k]}" for k in ("torch", "jax", "jaxlib") if versions.get(k))
    note = " A dry run: no number means anything." if record["dry"] else ""
    lines = [
        f"Medians in microseconds a call, {record['rounds']} rounds, {record['lanes']} lanes, on {gpu}; "
        f"{used}; {stamp['date']}.{note}"
    ]
    for group in SHORT:
        columns = _columns(medians, group)
        if columns:
            lines += [
                "",
                "| case | " + " | ".join(columns) + " |",
                "|---|" + "---:|" * len(columns),
            ]
            for case, found in medians.items():
                row = " | ".join(_number(found.get(k)) for k in columns)
                lines.append(f"| {case} | {row} |")
    lines += [
        "",
        "```text",
        *speedups(record),
        "```",
        "",
        "| case | kind | what it is |",
        "|---|---|---|",
    ]
    lines += [f"| {n} | {c['kind']} | {c['note']} |" for n, c in record["cases"].items()]
    return "\n".join(lines) + "\n"
