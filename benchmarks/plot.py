"""Draws a result file of ``runner.py``: ``python benchmarks/plot.py results/<file>.json [--out FILE]``.

``--markdown`` prints it as the table of README.md instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

COLORS = {"branches": "#4c78a8", "nano": "#54a24b", "whole": "#b279a2", "auto": "#f58518"}


def markdown(record: dict[str, Any]) -> str:
    """Returns the table of README.md: the better baseline, the best strategy, and Auto."""
    lines = [
        "| case | plain ms | scheduled ms | with | ratio | Auto's ratio |",
        "|---|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        ratios = case["ratios"]
        best = min((n for n in ratios if n != "auto"), key=lambda n: ratios[n]["ratio"])
        ms = {name: found["median"] for name, found in case["statistics_ms"].items()}
        lines.append(
            f"| {case['note']} | {ms[ratios[best]['baseline']]:.3g} | {ms[best]:.3g} | {best} "
            f"| {ratios[best]['ratio']:.2f} | {ratios['auto']['ratio']:.2f} |"
        )
    return "\n".join(lines)


def draw(source: Path, target: Path) -> Path:
    """Draws ratios with their intervals, and times of all variants, from a JSON file.

    Args:
        source: What ``runner.py`` wrote.
        target: PNG or SVG.

    Returns:
        The target.

    Raises:
        ValueError: the file holds no finished case.
    """
    import environment
    import msgspec
    from matplotlib.figure import Figure

    record = msgspec.json.decode(source.read_bytes())
    done = [case for case in record["cases"] if "error" not in case]
    if not done:
        raise ValueError(f"{source} holds no finished case")
    figure = Figure(figsize=(13, 1.8 + 0.55 * len(done)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    scheduled = [n for n in record["scheduled"] if any(n in case["ratios"] for case in done)]
    labelled: set[str] = set()
    for row, case in enumerate(done):
        names = [name for name in scheduled if name in case["ratios"]]
        height = 0.8 / len(names)
        for number, name in enumerate(names):
            r = case["ratios"][name]
            y = row + (number - (len(names) - 1) / 2) * height
            spread = [[max(0.0, r["ratio"] - r["low"])], [max(0.0, r["high"] - r["ratio"])]]
            left.barh(
                y, r["ratio"], height * 0.9, color=COLORS.get(name), xerr=spread, ecolor="#333333",
                label=None if name in labelled else name, error_kw={"lw": 1, "capsize": 2},
            )  # fmt: skip
            labelled.add(name)
            left.text(
                r["high"] + 0.02, y, f"{r['ratio']:.2f}", va="center", fontsize=8, color="#333333"
            )
    left.axvline(1.0, color="black", lw=1)
    left.set_xlim(0, max(1.3, 1.15 * max(r["high"] for c in done for r in c["ratios"].values())))
    left.set_xlabel("time / better of the two plain runs (below 1 is a gain)")
    left.set_yticks(range(len(done)), [f"{case['name']} ({case['kind']})" for case in done])
    left.invert_yaxis()
    left.legend(fontsize=8, loc="lower right")

    variants = [*record["baselines"], *scheduled]
    shades = {"jit": "#9d9d9d", "jit_one_thread": "#c4c4c4", "jit_one_blas": "#dedede", **COLORS}
    height = 0.8 / len(variants)
    for number, name in enumerate(variants):
        rows = [row for row, case in enumerate(done) if name in case["statistics_ms"]]
        if not rows:
            continue
        places = [row + (number - (len(variants) - 1) / 2) * height for row in rows]
        stats = [done[row]["statistics_ms"][name] for row in rows]
        medians = [s["median"] for s in stats]
        spread = [[s["median"] - s["q1"] for s in stats], [s["q3"] - s["median"] for s in stats]]
        right.barh(
            places, medians, height * 0.9, color=shades.get(name), label=name, xerr=spread,
            ecolor="#333333", error_kw={"lw": 0.8},
        )  # fmt: skip
    right.set_xscale("log")
    right.set_xlabel("milliseconds a call: median, quartiles")
    right.legend(fontsize=8)
    figure.suptitle(
        environment.summary(record["environment"]) + f" | {record['rounds']} rounds", fontsize=7
    )
    figure.savefig(target, dpi=130)
    return target


def main() -> int:
    """Draws one file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, help="default: the source with suffix .png")
    parser.add_argument("--markdown", action="store_true", help="print a table, draw nothing")
    options = parser.parse_args()
    if options.markdown:
        import json

        print(markdown(json.loads(options.source.read_text())))
        return 0
    print(draw(options.source, options.out or options.source.with_suffix(".png")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
