"""How well Auto chooses (``make study``).

    python benchmarks/studies/auto_study.py [--cases a,b] [--rounds N]

For each function of ``models/study_cases.py`` these run interleaved in one process: every plain setting
(``jit``, one thread, one BLAS thread where LAPACK runs), every candidate of Auto, pruned or not, and
the function scheduled by Auto with an empty cache. From that:

*against plain*      speed of Auto over that of the fastest plain setting: median of the ratios within
                     a round; 1 or more is a gain;
*against the best*   the same against the fastest of everything that was measured;
*rank correlation*   Spearman's, of predicted with measured times over all (function, plan) pairs;
*decision*           seconds until Auto had chosen, compiling and measuring.

All samples go into one JSON file under ``benchmarks/results``, and a picture beside it.
``--update FILE`` measures functions again and replaces these in a file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from common import environment

REST_MS = 150.0
GOALS = {"against_plain": 0.97, "against_best": 0.90, "rank_correlation": 0.80}


def measure_case(case: Any, rounds: int) -> dict[str, Any]:
    """Times every way to run one function; returns its part of the result file."""
    import jax
    from common import measure
    from cpu import runner

    import dynaflow_xla as dfx

    fn, args = case.make()
    args = jax.block_until_ready(jax.device_put(args))
    batched = case.in_axes is not None and case.around is None
    axes = {"in_axes": case.in_axes, "out_axes": case.out_axes} if batched else {}
    runs, contexts = runner.plain_runs(case, fn, args)
    plain = list(runs)

    auto = dfx.schedule(jax.jit(fn), dfx.Auto(), **axes)
    t0 = time.perf_counter()
    jax.block_until_ready(auto(*args))
    first_call_s = time.perf_counter() - t0
    choice = auto.decision(args, {})

    predicted, same, refused = {}, {}, {}
    plans: dict[Any, str] = {}
    for strategy in dfx.Auto().candidates(auto._options.lanes, batched=batched):
        name = repr(strategy)
        made = dfx.schedule(jax.jit(fn), strategy, **axes)
        try:
            plan = dfx.plan(made, *args)
        except dfx.SeparabilityError as error:
            refused[name] = str(error).splitlines()[0]
            continue
        first = plans.setdefault(plan.instructions, name)
        if first != name:
            same[name] = first
            continue
        predicted[name] = dfx.simulate(made, *args).total_ns / 1e6
        runs[name] = measure.blocking(made, args)
    runs["auto"] = measure.blocking(auto, args)
    with measure.Contention() as contention:
        samples, calls = measure.paired(
            runs,
            rounds,
            rest_ms=REST_MS if case.lapack else 0.0,
            sample_ms=10.0 if case.lapack else 2.0,
            contexts=contexts,
        )
    return {
        "name": case.name, "kind": case.kind, "note": case.note, "measured": environment.now(),
        "plain": plain, "predicted_ms": predicted, "same_plan": same, "refused": refused,
        "choice": "original" if choice is None else choice.name,
        "reason": "" if choice is None else choice.reason,
        "left_out": {} if choice is None else choice.left_out,
        "auto_medians_ms": {} if choice is None else choice.medians_ms,
        "decision_s": 0.0 if choice is None else choice.seconds, "first_call_s": first_call_s,
        "rounds": rounds, "calls_per_sample": calls, "samples_ms": samples,
        "contention": contention.as_dict(),
    }  # fmt: skip


def judge(case: dict[str, Any]) -> dict[str, Any]:
    """How well Auto did on one function, from the samples."""
    import numpy as np

    samples = {name: np.asarray(values) for name, values in case["samples_ms"].items()}
    medians = {name: float(np.median(values)) for name, values in samples.items()}
    plain = min(case["plain"], key=lambda name: medians[name])
    best = min((name for name in medians if name != "auto"), key=lambda name: medians[name])

    def against(name: str) -> float:
        return float(np.median(samples[name] / samples["auto"]))

    return {
        "medians_ms": medians, "best_plain": plain, "best": best,
        "against_plain": against(plain), "against_best": against(best),
    }  # fmt: skip


def summarise(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """What the study says over all functions."""
    from scipy.stats import spearmanr

    judged = {case["name"]: judge(case) for case in cases}
    pairs = [
        (predicted, judged[case["name"]]["medians_ms"][name])
        for case in cases
        for name, predicted in case["predicted_ms"].items()
    ]
    made: dict[str, Any] = {"functions": len(cases), "pairs": len(pairs), "judged": judged}
    for key in ("against_plain", "against_best"):
        worst = min(judged, key=lambda name: judged[name][key])
        made[key] = judged[worst][key]
        made[f"{key}_worst"] = worst
        made[f"{key}_missed"] = [n for n in judged if judged[n][key] < GOALS[key]]
    made["rank_correlation"] = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    seconds = sorted(case["decision_s"] for case in cases)
    made["decision_s"] = {"median": seconds[len(seconds) // 2], "max": seconds[-1]}
    return made


def table(record: dict[str, Any]) -> Any:
    """Returns a rich table of a record."""
    from rich.table import Table

    made = Table(title=f"Auto on {record['summary']['functions']} functions", title_justify="left")
    for column in ("function", "best plain", "ms", "best of all", "ms", "Auto runs", "ms",
                   "/ plain", "/ best", "decided in s"):  # fmt: skip
        made.add_column(column, justify="left" if column[0] not in "m/d" else "right")
    for case in record["cases"]:
        j = record["summary"]["judged"][case["name"]]
        cells = []
        for key in ("against_plain", "against_best"):
            color = "default" if j[key] >= GOALS[key] else "red"
            cells.append(f"[{color}]{j[key]:.2f}")
        ms = j["medians_ms"]
        busy = " (busy)" if (case["contention"]["others_cores"] or 0.0) > 0.15 else ""
        made.add_row(
            case["name"] + busy, j["best_plain"], f"{ms[j['best_plain']]:.3g}", j["best"],
            f"{ms[j['best']]:.3g}", case["choice"], f"{ms['auto']:.3g}", *cells,
            f"{case['decision_s']:.2f}",
        )  # fmt: skip
    return made


def draw(record: dict[str, Any], target: Path) -> None:
    """Draws Auto's speed against the plain settings, and predicted over measured times."""
    from matplotlib.figure import Figure

    cases, summary = record["cases"], record["summary"]
    figure = Figure(figsize=(13, 1.5 + 0.28 * len(cases)), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [case["name"] for case in cases]
    values = [summary["judged"][name]["against_plain"] for name in names]
    colors = ["#9d9d9d" if case["choice"].startswith("original") else "#f58518" for case in cases]
    left.barh(names, values, color=colors)
    for row, value in enumerate(values):
        left.text(value + 0.01, row, f"{value:.2f}", va="center", fontsize=8)
    left.axvline(1.0, color="black", lw=1)
    left.set_xlabel("speed of Auto / fastest plain setting (grey: Auto kept the original)")
    left.invert_yaxis()
    markers = {"Branches": "o", "Sequential": "s", "NanoBatch": "^"}
    for kind, marker in markers.items():
        pairs = [
            (case["predicted_ms"][name], summary["judged"][case["name"]]["medians_ms"][name])
            for case in cases
            for name in case["predicted_ms"]
            if name.startswith(kind)
        ]
        if pairs:
            right.scatter(*zip(*pairs, strict=True), s=18, marker=marker, label=kind)
    ends = right.get_xlim()
    right.plot([1e-2, 1e2], [1e-2, 1e2], color="black", lw=1)
    right.set_xlim(ends)
    right.set(xscale="log", yscale="log", xlabel="predicted ms", ylabel="measured ms")
    right.set_title(f"rank correlation {summary['rank_correlation']:.2f}", fontsize=9)
    right.legend(fontsize=8)
    figure.suptitle(environment.summary(record["environment"]), fontsize=7)
    figure.savefig(target, dpi=130)


def main() -> int:
    """Runs the study; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="comma-separated names; default: all")
    parser.add_argument("--rounds", type=int, default=21, help="samples of each way to run")
    parser.add_argument("--out", type=Path, help="result file; default: results/auto-<date>.json")
    parser.add_argument("--update", type=Path, help="a result file whose functions are replaced")
    options = parser.parse_args()
    import msgspec
    from common import records
    from models import cases, study_cases
    from rich.console import Console

    console = Console(width=150)
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jnp.linalg.eigh(jnp.eye(8)))  # LAPACK's threads exist from here on
    stamp = environment.stamp()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dfx-study-") as cache:
        os.environ["DYNAFLOW_XLA_CACHE_DIR"] = cache
        for case in cases.select(options.cases, study_cases.STUDY):
            found.append(measure_case(case, options.rounds))
            j = judge(found[-1])
            console.print(
                f"{case.name}: Auto runs {found[-1]['choice']}, {j['against_plain']:.2f} times as "
                f"fast as {j['best_plain']}, {j['against_best']:.2f} as {j['best']}", markup=False
            )  # fmt: skip
    if options.update is not None:
        known = msgspec.json.decode(options.update.read_bytes())["cases"]
        by_name = {case["name"]: case for case in [*known, *found]}
        found = [by_name[case.name] for case in study_cases.STUDY if case.name in by_name]
    summary = summarise(found)
    record = {"format": 1, "benchmark": "auto", "environment": stamp, "goals": GOALS,
              "summary": summary, "cases": found}  # fmt: skip
    path = records.save(record, options.update or options.out)
    draw(record, path.with_suffix(".png"))
    console.print(table(record))
    for key, goal in GOALS.items():
        missed = summary.get(f"{key}_missed", [])
        console.print(
            f"{key.replace('_', ' ')}: {summary[key]:.2f} (goal {goal:.2f})"
            + (f", missed by {', '.join(missed)}" if missed else "")
        )
    console.print(f"decision: median {summary['decision_s']['median']:.2f} s, most "
                  f"{summary['decision_s']['max']:.2f} s; wrote {path}")  # fmt: skip
    return int(any(summary[key] < goal for key, goal in GOALS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
