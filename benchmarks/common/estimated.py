"""How near estimated costs are to what operators take: cases of JAX on one core, compared and written."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import dynaflow_xla as dfx

from . import environment, measure, records

Case = tuple[str, Any, tuple[Any, ...]]
"""Name, function and arguments."""


def normal(*shape: int) -> jax.Array:
    """Random numbers, the same for a shape."""
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Estimate and time of one case, in microseconds; what any call takes is taken off."""
    name, f, args = case
    pg = dfx.graph(dfx.schedule(f, "sequential"), *args)
    estimated = sum(region.cost_ns for region in pg.regions) / 1e3
    runs = {
        "one thread": measure.one_thread(f, args),
        "a call": measure.one_thread(lambda x: x + 1, (normal(4),)),
    }
    made = measure.timed(runs, {}, rounds)
    took, call = (1e3 * statistics.median(made["samples_ms"][key]) for key in runs)
    took -= call
    return {
        "case": name,
        "estimated_us": estimated,
        "took_us": took,
        "ratio": estimated / took,
        **made,
    }


def main(kind: str, cases: Iterable[Case], doc: str | None) -> None:
    """Measures cases as the command line says, shows them, and writes them where it says.

    Args:
        kind: What they are, as a result file names them.
        cases: All of them.
        doc: The script's, of which the first line describes it.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="comma-separated beginnings of names")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    only = tuple(args.only.split(","))
    stamp = environment.stamp()
    console = Console()
    table = Table("case", "estimated us", "took us", "ratio")
    found = []
    for case in cases:
        if not case[0].startswith(only):
            continue
        found.append(measured(case, args.rounds))
        made = found[-1]
        row = (f"{made[key]:.4g}" for key in ("estimated_us", "took_us", "ratio"))
        table.add_row(made["case"], *row)
        console.print(made["case"], f"{made['ratio']:.2f}", style="dim")
    console.print(table)
    ratios = sorted(made["ratio"] for made in found)
    within = sum(0.5 <= ratio <= 2 for ratio in ratios)
    console.print(
        f"{within} of {len(ratios)} estimates are within a factor of two of what was measured"
    )
    if args.out:
        record = {"format": 1, "benchmark": kind, "environment": stamp, "cases": found}
        console.print(f"written: {records.save(record, args.out)}")
