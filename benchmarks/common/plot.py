"""Draws a result file of ``run.py``: ``python benchmarks/common/plot.py results/<file>.json [--out FILE]``.

``--markdown`` prints it as the table of README.md instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

COLORS = {
    "sequential": "#9d755d",
    "branches": "#4c78a8",
    "nano": "#54a24b",
    "whole": "#b279a2",
    "auto": "#f58518",
}


def markdown(record: dict[str, Any], *repeated: dict[str, Any]) -> str:
    """Returns the table of docs/results.md: the best baseline, the best strategy, Auto, and the control.

    Args:
        record: A run of the cases: the milliseconds, and the first of the ratios, are its.
        repeated: Further runs of the same code, whose ratios stand beside.
    """
    what = "function" if record["benchmark"] == "functions" else "case"
    lines = [
        f"| {what} | plain ms | scheduled ms | with | ratio | `Sequential` | `Branches` | `Auto` "
        "| `jit` again |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, *others in zip(*(r["cases"] for r in (record, *repeated)), strict=True):
        ratios = case["ratios"]
        among = [n for n in ratios if n not in ("auto", "sequential")]
        best = min(among, key=lambda n: ratios[n]["ratio"])
        ms = {name: found["median"] for name, found in case["statistics_ms"].items()}
        cells = [case["note"], f"{ms[ratios[best]['baseline']]:.3g}", f"{ms[best]:.3g}", best]
        for name in (best, "sequential", "branches", "auto"):
            found = [c["ratios"][name]["ratio"] for c in (case, *others) if name in c["ratios"]]
            cells.append(", ".join(f"{ratio:.2f}" for ratio in found) or "-")
        controls = [c["control"]["ratio"] for c in (case, *others) if "control" in c]
        cells.append(", ".join(f"{ratio:.2f}" for ratio in controls) or "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


PAIR_COLUMNS = {
    "JAX": ("jax", "jax_one_thread"), "JAX scheduled": ("jax_branches", "jax_nano"),
    "JAX Auto": ("jax_auto",), "PyTorch": ("torch_1", "torch_2"),
    "PyTorch scheduled": ("torch_branches", "torch_nano"),
    "PyTorch Auto": ("torch_auto_1", "torch_auto_2"),
}  # fmt: skip
"""Columns of the table of pairs -> the variants of which the fastest stands there."""


def pair_columns(case: dict[str, Any]) -> dict[str, tuple[str, float, float]]:
    """Column -> (variant, median milliseconds, ratio to the framework's fastest plain run)."""
    ms = {name: found["median"] for name, found in case["statistics_ms"].items()}
    made = {}
    for column, variants in PAIR_COLUMNS.items():
        name = min(variants, key=lambda n: ms[n])
        plain = min(ms[n] for n in PAIR_COLUMNS[column.split()[0]])
        made[column] = (name, ms[name], ms[name] / plain)
    return made


def pairs_markdown(record: dict[str, Any]) -> str:
    """Returns the table of docs/results.md of models in both frameworks."""
    cells = [f"{framework} ms | scheduled ms | with | ratio | `Sequential` | `Branches` | `Auto`"
             for framework in ("JAX", "PyTorch")]  # fmt: skip
    lines = [f"| model | {' | '.join(cells)} |", "|---" * 15 + "|"]
    for case in record["cases"]:
        columns, cells = pair_columns(case), [case["note"]]
        for framework in ("JAX", "PyTorch"):
            plain = columns[framework][1]
            name, ms, ratio = columns[f"{framework} scheduled"]
            own = framework.removeprefix("Py").lower()
            one, branches = (
                case["statistics_ms"][f"{own}_{n}"] for n in ("sequential", "branches")
            )
            cells += [
                f"{plain:.3g}", f"{ms:.3g}", name.split("_", 1)[1], f"{ratio:.2f}",
                f"{one['median'] / plain:.2f}", f"{branches['median'] / plain:.2f}",
                f"{columns[f'{framework} Auto'][2]:.2f}",
            ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def simulated_markdown(record: dict[str, Any]) -> str:
    """Returns the table of docs/results.md of what is simulated for machines with more cores.

    Only cases in which some machine gains, or would gain otherwise, more than a twentieth.
    """
    counts = list(next(iter(record["speed_up"].values())))
    heads = [f"{count} cores | lanes alike | cores of lanes" for count in counts]
    lines = [f"| case | {' | '.join(heads)} |", "|---" * (1 + 3 * len(counts)) + "|"]
    for name, by_cores in record["speed_up"].items():
        found = [by_cores[count] for count in counts]
        if all(max(abs(f[how] - 1) for how in ("branches", "lanes alike")) < 0.05 for f in found):
            continue
        cells = [
            f"{f['branches']:.2f} | {f['lanes alike']:.2f} | {', '.join(map(str, f['widths'])) or '-'}"
            for f in found
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def torch_markdown(record: dict[str, Any]) -> str:
    """Returns the table of docs/torch.md.

    At best two lanes take half of one thread's time, which bounds the ratio where Python takes none.
    """
    lines = [
        "| case | strategy | 1 thread ms | 2 threads ms | scheduled ms | ratio | 95 % | at best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        plain, two, ours = (
            row["statistics_ms"][k]["median"] for k in ("plain 1", "plain 2", "scheduled")
        )
        ratio = row["ratio"]
        cells = [
            row["case"].removesuffix(", nano"), row["strategy"],
            *(f"{x:.3g}" for x in (plain, two, ours)), f"{ratio['ratio']:.2f}",
            f"{ratio['low']:.2f}-{ratio['high']:.2f}", f"{plain / 2 / min(plain, two):.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def pairs_table(record: dict[str, Any]) -> str:
    """What a run of the pairs prints."""
    done = [case for case in record["cases"] if "error" not in case]
    return pairs_markdown(record | {"cases": done})


def draw_pairs(source: Path, target: Path) -> Path:
    """Draws the times of every model in both frameworks, unscheduled and scheduled.

    Args:
        source: What ``run.py`` wrote for the suite ``pairs``.
        target: PNG or SVG.

    Returns:
        The target.
    """
    import msgspec
    from matplotlib.figure import Figure

    from common import environment

    record = msgspec.json.decode(source.read_bytes())
    done = [case for case in record["cases"] if "error" not in case]
    figure = Figure(figsize=(10, 1.6 + 1.3 * len(done)), layout="constrained")
    axes = figure.subplots()
    shades = ("#9ecae1", "#3182bd", "#08519c", "#fdae6b", "#e6550d", "#a63603")
    height = 0.84 / len(PAIR_COLUMNS)
    for number, (column, shade) in enumerate(zip(PAIR_COLUMNS, shades, strict=True)):
        for row, case in enumerate(done):
            name, ms, ratio = pair_columns(case)[column]
            found = case["statistics_ms"][name]
            y = row + (number - (len(PAIR_COLUMNS) - 1) / 2) * height
            axes.barh(
                y, ms, height * 0.9, color=shade, label=column if row == 0 else None,
                xerr=[[ms - found["q1"]], [found["q3"] - ms]], error_kw={"lw": 0.8},
            )  # fmt: skip
            note = "" if " " not in column else f" {ratio:.2f}"
            axes.text(found["q3"] * 1.03, y, name.split("_", 1)[-1] + note, va="center", fontsize=7)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel(
        "milliseconds a call: median, quartiles; ratio to the framework's faster plain run"
    )
    axes.set_yticks(range(len(done)), [case["name"] for case in done])
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="lower right")
    figure.suptitle(
        environment.summary(record["environment"]) + f" | {record['rounds']} rounds", fontsize=6
    )
    figure.savefig(target, dpi=130)
    return target


def draw(source: Path, target: Path) -> Path:
    """Draws ratios with their intervals, and times of all variants, from a JSON file.

    Args:
        source: What ``cpu/runner.py`` wrote.
        target: PNG or SVG.

    Returns:
        The target.

    Raises:
        ValueError: the file holds no finished case.
    """
    import msgspec
    from matplotlib.figure import Figure

    from common import environment

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
    left.set_xlabel("time / best plain run (below 1 is a gain)")
    left.set_yticks(range(len(done)), [f"{case['name']} ({case['kind']})" for case in done])
    left.invert_yaxis()
    left.legend(fontsize=8, loc="lower right")

    variants = [*record["baselines"], *scheduled]
    shades = {
        "jit": "#9d9d9d",
        "jit_one_thread": "#c4c4c4",
        "jit_in_caller": "#d1d1d1",
        "jit_one_blas": "#dedede",
        **COLORS,
    }
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
    parser.add_argument("source", type=Path, nargs="+", help="several: runs of the same cases")
    parser.add_argument("--out", type=Path, help="default: the source with suffix .png")
    parser.add_argument("--markdown", action="store_true", help="print a table, draw nothing")
    options = parser.parse_args()
    import json

    records = [json.loads(source.read_text()) for source in options.source]
    kind = records[0]["benchmark"]
    if options.markdown:
        tables = {"pairs": pairs_markdown, "torch-cpu": torch_markdown}
        print(tables.get(kind, markdown)(*records))
        return 0
    if kind == "torch-cpu":
        parser.error("there is no picture of this benchmark: --markdown prints its table")
    if len(records) > 1:
        parser.error("one file is drawn: --markdown joins several runs")
    target = options.out or options.source[0].with_suffix(".png")
    print((draw_pairs if kind == "pairs" else draw)(options.source[0], target))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
