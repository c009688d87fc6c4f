"""A scheduled call beside processes that compute on every core.

    python benchmarks/machine/busy_machine.py

A lane's thread that was woken then waits for a core like everybody else, for milliseconds; whoever waits for
such a lane runs it. Measured are small functions whose lanes share nothing, meet at the end, and meet twice.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

SIZE = 512


def _compute() -> None:
    while True:
        pass


@contextmanager
def processes(count: int) -> Iterator[None]:
    """So many other processes compute for as long as the context lasts."""
    started = [
        multiprocessing.get_context("spawn").Process(target=_compute, daemon=True)
        for _ in range(count)
    ]
    for process in started:
        process.start()
    try:
        if started:
            time.sleep(1.5)  # until they are there
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, help="default: results/busy-machine-<date>.json")
    options = parser.parse_args()

    import jax
    import jax.numpy as jnp
    import numpy as np
    from common import environment, measure, records
    from rich.console import Console
    from rich.table import Table

    import dynaflow_xla as dfx

    class EachElsewhere(dfx.Strategy):
        """Every operator, by turns on each lane."""

        def rules(self, graph: Any) -> Any:
            return [dfx.Op("*")]

        def schedule(self, s: Any) -> None:
            number = 0
            while ready := s.ready():
                for op in ready:
                    s.execute(op, lane=number % s.lanes)
                    number += 1

    def apart(x: Any, y: Any) -> Any:
        return jnp.sort(x), jnp.sort(y)

    def meet(x: Any, y: Any) -> Any:
        return jnp.sort(x) + jnp.sort(y)

    def meet_twice(x: Any, y: Any) -> Any:
        z = jnp.sort(x) + jnp.sort(y)
        return jnp.sort(z * 2) + jnp.sort(z - 3)

    console = Console()
    stamp = environment.stamp()
    console.print(environment.summary(stamp), style="dim", soft_wrap=True)
    args = tuple(jnp.asarray(np.random.default_rng(0).standard_normal((2, SIZE)), jnp.float32))
    cores = len(os.sched_getaffinity(0))
    started = time.perf_counter()
    runs = {}
    for fn in (apart, meet, meet_twice):
        fast = dfx.schedule(jax.jit(fn), EachElsewhere(), lanes=2)
        dfx.verify(fast, *args)
        runs[fn.__name__] = {
            "jit": measure.blocking(jax.jit(fn), args),
            "lanes": measure.blocking(fast, args),
        }
        for run in runs[fn.__name__].values():
            run()
    results: list[dict[str, Any]] = []
    for count in (0, cores):
        with processes(count):
            for name, pair in runs.items():
                timed = measure.timed(pair, {"lanes": ["jit"]}, options.rounds)
                results.append({"case": name, "processes": count, **timed})

    table = Table("case", "other processes", "jit ms", "lanes ms", "ratio")
    for row in results:
        s = row["statistics_ms"]
        table.add_row(
            row["case"], str(row["processes"]), f"{s['jit']['median']:.3g}",
            f"{s['lanes']['median']:.3g}", f"{row['ratios']['lanes']['ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
    record = {
        "format": 1, "benchmark": "busy-machine", "environment": stamp, "rounds": options.rounds,
        "seconds": time.perf_counter() - started, "rows": results,
    }  # fmt: skip
    console.print(f"wrote {records.save(record, options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
