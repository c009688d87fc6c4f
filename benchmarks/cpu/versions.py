"""Two versions of this library on the same cases, side by side.

    python benchmarks/cpu/versions.py --old CHECKOUT [--new CHECKOUT] [--cases a,b] [--rounds 15]

A process imports one version only, so each version has one. Both make a case; then they take turns, in
an order drawn anew each round, while the other sleeps. A round times the scheduled function and, in the same
process, plain ``jax.jit``. A checkout must be importable: with ``frontends`` and ``ffi`` inside the package,
and its engine built.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCHMARKS))
SHORTEST_S = 0.02
"""A sample is as many calls as take that long."""


def answering(questions: Callable[[], dict[str, Callable[[Any], Any]]]) -> None:
    """A version's process: answers a line of JSON for each line on its standard input.

    Args:
        questions: Makes what answers, by the question's name; whatever it prints goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import dynaflow_xla

    by_name = questions()
    print(json.dumps(dynaflow_xla.__file__), file=answers, flush=True)
    for line in sys.stdin:
        what, given = json.loads(line)
        print(json.dumps(by_name[what](given)), file=answers, flush=True)


def serve() -> None:
    """Answers about the cases of ``models/cases.py``."""
    answering(_of_cases)


def _of_cases() -> dict[str, Callable[[Any], Any]]:
    import jax
    from models import cases

    runs: dict[str, Callable[[], Any]] = {}
    counts: dict[str, int] = {}

    def make(name: str) -> Any:
        [case] = cases.select(name)
        fn, args = case.make()
        ways = {"jit": jax.jit(fn), **cases.scheduled(case, fn)}
        ways.pop("auto")  # what it chooses is chance where two are equal
        want = jax.tree.leaves(ways["jit"](*args))
        runs.clear(), counts.clear()
        for way, call in ways.items():
            for got, original in zip(jax.tree.leaves(call(*args)), want, strict=True):
                if not jax.numpy.allclose(got, original, rtol=2e-2, atol=2e-3):
                    raise SystemExit(f"{name}, {way}: values differ from jax.jit's")
            runs[way] = lambda call=call: jax.block_until_ready(call(*args))
            start = time.perf_counter()
            runs[way]()
            counts[way] = max(1, int(SHORTEST_S / (time.perf_counter() - start)))
        return sorted(runs)

    def turn(order: list[str]) -> Any:
        took = {}
        for way in order:
            runs[way]()  # what stood before has left the caches otherwise
            start = time.perf_counter()
            for _ in range(counts[way]):
                runs[way]()
            took[way] = (time.perf_counter() - start) / counts[way] * 1e3
        return took

    return {"make": make, "turn": turn}


class Version:
    """The process of one checkout.

    Args:
        checkout: Where it is.
        module: Of ``benchmarks/``, whose ``serve`` answers in it.
    """

    def __init__(self, checkout: Path, module: str = "cpu.versions") -> None:
        paths = os.pathsep.join([str(checkout), str(BENCHMARKS)])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"import {module}; {module}.serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip
        found = Path(self._answer())
        if not found.is_relative_to(checkout):
            self.end()
            raise SystemExit(f"{checkout} is not what its process imports: {found}")
        git = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        self.commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()

    def ask(self, what: str, given: Any) -> Any:
        """Its answer; SystemExit if its process ended."""
        assert self.process.stdin is not None
        print(json.dumps([what, given]), file=self.process.stdin, flush=True)
        return self._answer()

    def end(self) -> None:
        """Closes its input, whereupon it ends."""
        self.process.communicate()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.end()
            raise SystemExit("a version's process ended; what it printed stands above")
        return json.loads(line)


def compared(versions: dict[str, Version], name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of every round by version and way, and medians of the ratio new to old."""
    ways = {which: version.ask("make", name) for which, version in versions.items()}
    both = sorted(set(ways["old"]) & set(ways["new"]))
    samples: dict[str, dict[str, list[float]]] = {
        which: {way: [] for way in both} for which in versions
    }
    for _ in range(rounds):
        for which in random.sample(list(versions), len(versions)):
            for way, took in versions[which].ask("turn", random.sample(both, len(both))).items():
                samples[which][way].append(took)
    ratios = {
        way: [n / o for n, o in zip(samples["new"][way], samples["old"][way], strict=True)]
        for way in both
    }
    return {
        "new_to_old": {way: statistics.median(of) for way, of in ratios.items()},
        "new_to_old_quartiles": {way: statistics.quantiles(of, n=4) for way, of in ratios.items()},
        "samples_ms": samples,
    }


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    from common import environment, records
    from models import cases
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, required=True, help="a checkout that can be imported")
    parser.add_argument(
        "--new", type=Path, default=BENCHMARKS.parent, help="another; default: this one"
    )
    parser.add_argument("--cases", help="comma-separated names; default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="default: results/versions.json; is added to")
    given = parser.parse_args()
    out = given.out or records.RESULTS / "versions.json"
    versions = {"old": Version(given.old.resolve()), "new": Version(given.new.resolve())}
    stamp = environment.stamp()
    rows = json.loads(out.read_text())["cases"] if out.exists() else {}
    commits = {which: version.commit for which, version in versions.items()}
    table = Table("case", "way", "old ms", "new ms", "new / old")
    for case in cases.select(given.cases):
        started = {"date": environment.now(), "load": environment.stamp()["load_average"]}
        row = compared(versions, case.name, given.rounds)
        rows[case.name] = row | started | {"commits": commits, "rounds": given.rounds}
        for way, ratio in row["new_to_old"].items():
            middle = [statistics.median(row["samples_ms"][which][way]) for which in versions]
            table.add_row(case.name, way, *(f"{ms:.4g}" for ms in middle), f"{ratio:.2f}")
        records.save(
            {
                "format": 1, "benchmark": "versions", "environment": stamp, "rounds": given.rounds,
                "commits": commits, "cases": rows,
            },
            out,
        )  # fmt: skip
    for version in versions.values():
        version.end()
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
