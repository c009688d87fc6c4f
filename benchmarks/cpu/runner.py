"""Measures schedules: ``python benchmarks/run.py [--suite SUITE] [--cases a,b] [--rounds N]``.

The suite ``pairs`` has models in JAX and in PyTorch, see ``pairs.py``; ``cases`` are JAX functions of one
kind each, ``functions`` JAX functions as models have them. For each case the outputs are verified first.
Then, in the last two, these variants run interleaved in this process:

``jit``             ``jax.jit`` on the default client (XLA's own thread pool),
``jit_one_thread``  the same function jitted for a client with a pool of one thread,
``jit_in_caller``   the same for a client that runs programs on the thread that calls them,
``jit_one_blas``    only where LAPACK runs: ``jit`` with OpenBLAS limited to one thread, as the engine
                    limits it while lanes run,
``sequential``      ``dfx.schedule(strategy=dfx.Sequential())``: the original's speed, or more,
``branches``        ``dfx.schedule(strategy=dfx.Branches())``,
``nano``            ``dfx.NanoBatch(2)``, where the case has a batch,
``whole``           where the case is a train step: all of it scheduled, not just loss and gradient,
``auto``            ``dfx.schedule(strategy="auto")``, with an empty decision cache,
``again``           ``jax.jit`` of the same function once more, compared as a schedule is: how far from 1 what
                    changes nothing comes out here.

A ratio is a schedule's median over the *best* baseline's (see ``measure.ratio``): below 1 is a gain. Every
sample goes into one JSON file under ``benchmarks/results``, with a stamp of the environment, and a plot.
``--update FILE`` measures cases again and replaces these in a file; each case says when it was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from common import environment

BASELINES = ("jit", "jit_one_thread", "jit_in_caller", "jit_one_blas")
BUSY_CORES = 0.15
"""Other processes using more than this make a ratio unfit to quote; the table says so."""
SCHEDULED = ("sequential", "branches", "nano", "whole", "auto")
CONTROL = "again"
REST_MS = 150.0
"""Rest before each sample where LAPACK runs: see ``measure.paired``. Both are measured and kept."""


@dataclass(frozen=True)
class Suite:
    """Benchmarks that go into one result file.

    Attributes:
        name: First part of the file's name.
        cases: Each has a ``name`` and a ``note``.
        measure: Takes a case, the rounds and what to call after each; returns what to record.
        show: Takes the record; returns what to print.
        draw: Draws a result file.
        record: What the record says of all cases.
    """

    name: str
    cases: Sequence[Any]
    measure: Callable[[Any, int, Any], dict[str, Any]]
    show: Callable[[dict[str, Any]], Any]
    draw: Callable[[Path, Path], Path]
    record: dict[str, Any]


def suites() -> dict[str, Suite]:
    """Every suite by name; ``pairs`` is missing where PyTorch is not installed."""
    import importlib.util

    from common import plot
    from models import cases, functions

    columns = {"baselines": BASELINES, "scheduled": SCHEDULED}
    made = [
        Suite(name, chosen, measure_case, table, plot.draw, columns)
        for name, chosen in (("cases", cases.CASES), ("functions", functions.CASES))
    ]
    if all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        from cpu import pairs

        made.append(
            Suite("pairs", pairs.CASES, pairs.measure_case, plot.pairs_table, plot.draw_pairs, {})
        )
    return {suite.name: suite for suite in made}


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", help="one suite; default: all")
    parser.add_argument("--cases", help="comma-separated names; default: all")
    parser.add_argument("--rounds", type=int, default=40, help="samples of each variant")
    parser.add_argument(
        "--out", type=Path, help="result file; default: results/<suite>-<date>.json"
    )
    parser.add_argument("--update", type=Path, help="a result file whose cases are replaced")
    parser.add_argument("--no-plot", action="store_true", help="write no PNG beside the JSON")
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    made = parser.parse_args()
    if made.rounds < 3:
        parser.error("--rounds must be at least 3")
    return made


def chosen_cases(options: argparse.Namespace) -> list[tuple[Suite, list[Any]]]:
    """The suites to run with their cases.

    Raises:
        SystemExit: a name is unknown, or one file would have to take several suites.
    """
    every = suites()
    if options.suite and options.suite not in every:
        raise SystemExit(f"no suite {options.suite}; there are: {', '.join(every)}")
    among = [every[options.suite]] if options.suite else list(every.values())
    names = options.cases.split(",") if options.cases else None
    known = [case.name for suite in among for case in suite.cases]
    if unknown := set(names or ()) - set(known):
        raise SystemExit(f"no case {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    picked = [
        (suite, [case for case in suite.cases if names is None or case.name in names])
        for suite in among
    ]
    picked = [(suite, cases) for suite, cases in picked if cases]
    if len(picked) > 1 and (options.out or options.update):
        raise SystemExit("--out and --update are for one suite: choose it with --suite")
    return picked


def plain_runs(case: Any, fn: Any, args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The baselines of a case by name, and what some of them are timed in."""
    import jax
    from common import measure

    jitted = jax.jit(fn)
    runs = {
        "jit": measure.blocking(jitted, args),
        "jit_one_thread": measure.one_thread(fn, args),
        "jit_in_caller": measure.in_caller(fn, args),
    }
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
    import jax
    from common import measure
    from models import cases

    import dynaflow_xla as dfx

    fn, args = case.make()
    args = jax.block_until_ready(jax.device_put(args))
    schedules = cases.scheduled(case, fn)
    runs, contexts = plain_runs(case, fn, args)
    baselines = list(runs)
    runs |= {name: measure.blocking(made, args) for name, made in schedules.items()}
    runs[CONTROL] = measure.blocking(jax.jit(lambda *a: fn(*a)), args)
    first_call_ms = measure.first_calls(runs)
    want = jax.jit(fn)(*args)
    checks = {name: verified(made, want, args) for name, made in schedules.items()}
    choice = schedules["auto"].decision(args, {})
    settings = {"contexts": contexts, "tick": tick, **measure.STEADY}
    if case.lapack:
        settings |= {"rest_ms": REST_MS}
    compared = dict.fromkeys((*schedules, CONTROL), baselines)
    timed = measure.timed(runs, compared, rounds, **settings)
    control = timed["ratios"].pop(CONTROL)
    mixed = {}
    if case.lapack:
        mixed, _ = measure.paired(runs, rounds, contexts=contexts, **measure.STEADY)
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
        "kind": case.kind,
        "verify": checks,
        "plans": plans,
        "first_call_ms": first_call_ms,
        "auto": {
            "choice": "original" if choice is None else choice.name,
            "reason": "" if choice is None else choice.reason,
            "medians_ms": {} if choice is None else choice.medians_ms,
            "seconds": 0.0 if choice is None else choice.seconds,
        },
        **timed,
        "control": control,
        "samples_without_rest_ms": mixed,
        "ratios_without_rest": {
            name: measure.ratio(mixed, name, baselines) for name in schedules if mixed
        },
    }


def table(record: dict[str, Any]) -> Any:
    """Returns a rich table of the finished cases of ``cases``."""
    from rich.table import Table

    title = f"{record['rounds']} paired rounds"
    made = Table(title=title, title_justify="left", caption_justify="left")
    made.caption = (
        "median milliseconds a call +- half the interquartile range; ratio: over the best "
        "baseline, [95 % interval]; below 1 is a gain; others: cores that other processes used"
    )
    made.add_column("case")
    for column in ("jit", "1 thread", "in caller", "1 BLAS", *SCHEDULED, CONTROL, "auto runs"):
        made.add_column(column, justify="left" if column == "auto runs" else "right")
    for result in record["cases"]:
        if "error" in result:
            made.add_row(result["name"], f"[red]{result['error'].splitlines()[-1]}")
            continue
        cells = []
        for name in (*BASELINES, *SCHEDULED, CONTROL):
            s = result["statistics_ms"].get(name)
            if s is None:
                cells.append("-")
                continue
            cell = f"{s['median']:.3g} +-{s['iqr'] / 2:.2g}"
            if name not in BASELINES:
                r = result["control"] if name == CONTROL else result["ratios"][name]
                color = "green" if r["high"] < 1 else "red" if r["low"] > 1 else "default"
                interval = f"\\[{r['low']:.2f}, {r['high']:.2f}]"
                cell += f"\n[{color}]{r['ratio']:.2f}[/] {interval}"
            cells.append(cell)
        runs = result["auto"]["choice"]
        others = result["contention"]["others_cores"] or 0.0
        name = result["name"] + (f"\n[red]others {others:.2f}" if others > BUSY_CORES else "")
        made.add_row(name, *cells, runs)
    return made


def merged(old: dict[str, Any], new: dict[str, Any], order: Sequence[Any]) -> dict[str, Any]:
    """An older record with the cases of a newer one in it, in this order."""
    found = {case["name"]: case for case in [*old["cases"], *new["cases"]]}
    return new | {
        "seconds": old["seconds"] + new["seconds"],
        "cases": [found[case.name] for case in order if case.name in found],
    }


def run_suite(suite: Suite, chosen: list[Any], options: argparse.Namespace, console: Any) -> bool:
    """Measures the chosen cases and writes their file; returns whether all went well."""
    import msgspec
    from common import records
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

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
        whole = progress.add_task(suite.name, total=len(chosen))
        for case in chosen:
            task = progress.add_task(case.name, total=options.rounds)
            result = {
                "name": case.name, "note": case.note, "measured": environment.now(),
                "rounds": options.rounds,
            }  # fmt: skip
            try:
                result |= suite.measure(
                    case, options.rounds, lambda t=task: (progress.advance(t), progress.refresh())
                )
                name = min(result["ratios"], key=lambda n: result["ratios"][n]["ratio"])
                r = result["ratios"][name]
                progress.console.print(
                    f"{case.name}: {name} {r['ratio']:.2f} of {r['baseline']} "
                    f"({result['statistics_ms'][r['baseline']]['median']:.3g} ms)"
                )
            except Exception as error:  # one broken case must not hide the others
                result["error"] = f"{type(error).__name__}: {error}"
                result["traceback"] = traceback.format_exc()
                progress.console.print(f"[red]{case.name}: {type(error).__name__}:[/]", str(error))
            results.append(result)
            progress.remove_task(task)
            progress.advance(whole)

    stamp["load_average_end"] = [round(x, 2) for x in os.getloadavg()]
    record = {
        "format": 1, "benchmark": suite.name, "environment": stamp, "rounds": options.rounds,
        "seconds": time.perf_counter() - started, **suite.record, "cases": results,
    }  # fmt: skip
    path = options.update or options.out
    if options.update is not None:
        record = merged(msgspec.json.decode(path.read_bytes()), record, suite.cases)
    path = records.save(record, path)
    console.print(suite.show(record | {"cases": results}))
    console.print(f"wrote {path}")
    if not options.no_plot and any("error" not in result for result in results):
        console.print(f"wrote {suite.draw(path, path.with_suffix('.png'))}")
    return not any("error" in result for result in results)


def main() -> int:
    """Runs the chosen cases; returns the exit status."""
    options = arguments()
    if options.list:
        for suite in suites().values():
            for case in suite.cases:
                print(f"{suite.name:6} {case.name:14} {case.note}")
        return 0
    chosen = chosen_cases(options)

    # LAPACK's thread pools exist from the first call on; the stamp is to name them.
    import jax
    import jax.numpy as jnp
    from rich.console import Console

    jax.block_until_ready(jnp.linalg.eigh(jnp.eye(8)))
    console = Console()
    went = [run_suite(suite, cases, options, console) for suite, cases in chosen]
    return 0 if all(went) else 1


if __name__ == "__main__":
    raise SystemExit(main())
