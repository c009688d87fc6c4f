"""Measures schedules against plain JAX: ``python benchmarks/runner.py [--cases a,b] [--rounds N]``.

For each case the outputs are verified first. Then these variants run interleaved in this process:

``jit``             ``jax.jit`` on the default client (XLA's own thread pool),
``jit_one_thread``  the same function jitted for a client with a pool of one thread,
``jit_one_blas``    only where LAPACK runs: ``jit`` with OpenBLAS limited to one thread, as the engine
                    limits it while lanes run,
``branches``        ``dfx.schedule(strategy=dfx.Branches())``,
``nano``            ``dfx.NanoBatch(2)``, where the case has a batch,
``whole``           where the case is a train step: all of it scheduled, not just loss and gradient,
``auto``            ``dfx.schedule(strategy="auto")``, with an empty decision cache.

A ratio is a schedule's median over the *better* baseline's: below 1 is a gain. Every sample goes into
one JSON file under ``benchmarks/results``, with a stamp of the environment, and a plot beside it.
``--update FILE`` measures cases again and replaces these in a file; each case says when it was measured.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import environment

RESULTS = Path(__file__).resolve().parent / "results"
BASELINES = ("jit", "jit_one_thread", "jit_one_blas")
BUSY_CORES = 0.15
"""Other processes using more than this make a ratio unfit to quote; the table says so."""
SCHEDULED = ("branches", "nano", "whole", "auto")
REST_MS = 150.0
"""Rest before each sample where LAPACK runs: see ``measure.paired``. Both are measured and kept."""


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="comma-separated names; default: all")
    parser.add_argument("--rounds", type=int, default=40, help="samples of each variant")
    parser.add_argument("--out", type=Path, help="result file; default: results/<name>-<date>.json")
    parser.add_argument("--update", type=Path, help="a result file whose cases are replaced")
    parser.add_argument("--name", default="cases", help="first part of the result file's name")
    parser.add_argument("--no-plot", action="store_true", help="write no PNG beside the JSON")
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    made = parser.parse_args()
    if made.rounds < 3:
        parser.error("--rounds must be at least 3")
    return made


def plain_runs(case: Any, fn: Any, args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The baselines of a case by name, and what some of them are timed in."""
    import jax
    import measure

    jitted = jax.jit(fn)
    runs = {"jit": measure.blocking(jitted, args), "jit_one_thread": measure.one_thread(fn, args)}
    if not case.lapack:
        return runs, {}
    runs["jit_one_blas"] = measure.blocking(jitted, args)
    return runs, {"jit_one_blas": measure.one_blas_thread}


def verified(fn: Any, want: Any, args: Any) -> dict[str, Any]:
    """How far a schedule's values are from the original's; VerificationError if too far."""
    import jax

    from dynaflow_xla.frontends.jax import inspect

    report = inspect.compare_trees(want, jax.block_until_ready(fn(*args)))
    return {"max_abs": report.max_abs, "bit_equal": report.bit_equal}


def measure_case(case: Any, rounds: int, tick: Any) -> dict[str, Any]:
    """Verifies and times one case; returns its part of the result file."""
    import cases
    import jax
    import measure

    import dynaflow_xla as dfx

    fn, args = case.make()
    args = jax.block_until_ready(jax.device_put(args))
    schedules = cases.scheduled(case, fn)
    runs, contexts = plain_runs(case, fn, args)
    baselines = list(runs)
    runs |= {name: measure.blocking(made, args) for name, made in schedules.items()}
    first_call_ms = {}
    for name, run in runs.items():
        t0 = time.perf_counter()
        run()
        first_call_ms[name] = (time.perf_counter() - t0) * 1e3

    want = jax.jit(fn)(*args)
    checks = {name: verified(made, want, args) for name, made in schedules.items()}
    choice = schedules["auto"].decision(args, {})
    with measure.Contention() as contention:
        rest_ms = REST_MS if case.lapack else 0.0
        samples, calls = measure.paired(
            runs,
            rounds,
            rest_ms=rest_ms,
            sample_ms=20.0 if case.lapack else 2.0,
            contexts=contexts,
            tick=tick,
        )
        mixed = {}
        if case.lapack:
            mixed, _ = measure.paired(runs, rounds, contexts=contexts)
    plans = {}
    for name, made in schedules.items():
        if name == "auto" or not hasattr(made, "planned"):
            continue
        plan = dfx.plan(made, *args)
        plans[name] = {
            "lanes_used": len({i.lane for i in plan.instructions if getattr(i, "lane", -1) >= 0}),
            "regions": len(dfx.graph(made, *args).regions),
            "copied_bytes": plan.copied_bytes,
            "predicted_ms": dfx.simulate(made, *args).total_ns / 1e6,
            "make_ms": {k: s * 1e3 for k, s in made.planned(args, {}).seconds.items()},
        }
    return {
        "name": case.name,
        "kind": case.kind,
        "note": case.note,
        "measured": environment.now(),
        "rounds": rounds,
        "verify": checks,
        "plans": plans,
        "first_call_ms": first_call_ms,
        "auto": {
            "choice": "original" if choice is None or choice.child is None else repr(choice.child),
            "reason": "" if choice is None else choice.reason,
            "medians_ms": {} if choice is None else choice.medians_ms,
            "seconds": 0.0 if choice is None else choice.seconds,
        },
        "calls_per_sample": calls,
        "samples_ms": samples,
        "statistics_ms": {name: measure.statistics(values) for name, values in samples.items()},
        "ratios": {name: measure.ratio(samples, name, baselines) for name in schedules},
        "rest_ms": rest_ms,
        "samples_without_rest_ms": mixed,
        "ratios_without_rest": {
            name: measure.ratio(mixed, name, baselines) for name in schedules if mixed
        },
        "contention": contention.as_dict(),
    }


def table(results: list[dict[str, Any]], title: str) -> Any:
    """Returns a rich table of finished cases."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", caption_justify="left")
    made.caption = (
        "median milliseconds a call +- half the interquartile range; ratio: over the better "
        "baseline, [95 % interval]; below 1 is a gain; others: cores that other processes used"
    )
    made.add_column("case")
    for column in ("jit", "1 thread", "1 BLAS", *SCHEDULED, "auto runs"):
        made.add_column(column, justify="left" if column == "auto runs" else "right")
    for result in results:
        if "error" in result:
            made.add_row(result["name"], f"[red]{result['error'].splitlines()[-1]}")
            continue
        cells = []
        for name in (*BASELINES, *SCHEDULED):
            s = result["statistics_ms"].get(name)
            if s is None:
                cells.append("-")
                continue
            cell = f"{s['median']:.3g} +-{s['iqr'] / 2:.2g}"
            if name in SCHEDULED:
                r = result["ratios"][name]
                color = "green" if r["high"] < 1 else "red" if r["low"] > 1 else "default"
                interval = f"\\[{r['low']:.2f}, {r['high']:.2f}]"
                cell += f"\n[{color}]{r['ratio']:.2f}[/] {interval}"
            cells.append(cell)
        runs = "original" if result["auto"]["choice"] == "original" else "schedule"
        others = result["contention"]["others_cores"] or 0.0
        name = result["name"] + (f"\n[red]others {others:.2f}" if others > BUSY_CORES else "")
        made.add_row(name, *cells, runs)
    return made


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """An older record with the cases of a newer one in it."""
    import cases

    found = {case["name"]: case for case in [*old["cases"], *new["cases"]]}
    order = [case.name for case in cases.CASES if case.name in found]
    return new | {
        "seconds": old["seconds"] + new["seconds"],
        "cases": [found[name] for name in order],
    }


def main() -> int:
    """Runs the chosen cases; returns the exit status."""
    options = arguments()
    import cases

    if options.list:
        for case in cases.CASES:
            print(f"{case.name:14} {case.kind:5} {case.note}")
        return 0
    chosen = cases.select(options.cases)

    import msgspec
    import plot
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    # LAPACK's thread pools exist from the first call on; the stamp is to name them.
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jnp.linalg.eigh(jnp.eye(8)))
    stamp = environment.stamp()
    console.print(environment.summary(stamp), style="dim", soft_wrap=True)
    results: list[dict[str, Any]] = []
    started = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
    )
    with (
        tempfile.TemporaryDirectory(prefix="dfx-bench-") as cache,
        Progress(*columns, TimeElapsedColumn(), console=console, auto_refresh=False) as progress,
    ):
        # No refreshing thread: it would compete with the lanes for the interpreter lock.
        os.environ["DYNAFLOW_XLA_CACHE_DIR"] = cache  # Auto decides afresh in every run
        whole = progress.add_task("cases", total=len(chosen))
        for case in chosen:
            task = progress.add_task(case.name, total=options.rounds)
            try:
                result = measure_case(
                    case, options.rounds, lambda t=task: (progress.advance(t), progress.refresh())
                )
                name = min(result["ratios"], key=lambda n: result["ratios"][n]["ratio"])
                r = result["ratios"][name]
                progress.console.print(
                    f"{case.name}: {name} {r['ratio']:.2f} of {r['baseline']} "
                    f"({result['statistics_ms'][r['baseline']]['median']:.3g} ms)"
                )
            except Exception as error:  # one broken case must not hide the others
                result = {
                    "name": case.name, "kind": case.kind, "note": case.note,
                    "error": f"{type(error).__name__}: {error}",
                    "traceback": traceback.format_exc(),
                }  # fmt: skip
                progress.console.print(f"[red]{case.name}: {type(error).__name__}:[/]", str(error))
            results.append(result)
            progress.remove_task(task)
            progress.advance(whole)

    stamp["load_average_end"] = [round(x, 2) for x in os.getloadavg()]
    record = {
        "format": 1,
        "benchmark": options.name,
        "environment": stamp,
        "rounds": options.rounds,
        "seconds": time.perf_counter() - started,
        "baselines": BASELINES,
        "scheduled": SCHEDULED,
        "cases": results,
    }
    path = options.update or options.out
    if options.update is not None:
        record = merged(msgspec.json.decode(path.read_bytes()), record)
    if path is None:
        date = stamp["date"].replace(":", "").replace("+0000", "Z")
        path = RESULTS / f"{options.name}-{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    console.print(table(results, f"{options.rounds} paired rounds"))
    console.print(f"wrote {path}")
    if not options.no_plot and any("error" not in result for result in results):
        console.print(f"wrote {plot.draw(path, path.with_suffix('.png'))}")
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
