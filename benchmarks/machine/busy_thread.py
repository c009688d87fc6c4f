"""A scheduled call while another Python thread is busy: ``python benchmarks/machine/busy_thread.py``.

Lanes need the interpreter lock to start; a thread that computes in Python gives it up only every
switch interval (5 ms by default). Plain ``jit`` meets the same thread when it returns to Python, so
it runs beside. The spinning thread also takes a core: a loss of that size is nobody's fault.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/


@contextlib.contextmanager
def spinning(active: bool) -> Iterator[None]:
    """Keeps a Python thread busy for as long as the context lasts."""
    if not active:
        yield
        return
    stop = threading.Event()

    def spin() -> None:
        count = 0
        while not stop.is_set():
            for _ in range(1000):
                count += 1

    thread = threading.Thread(target=spin, name="spinner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="bilstm,sorts,newton")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, help="default: results/busy-thread-<date>.json")
    options = parser.parse_args()

    import jax
    from common import environment, measure, records
    from models import cases
    from rich.console import Console
    from rich.table import Table

    import dynaflow_xla as dfx

    console = Console()
    stamp = environment.stamp()
    console.print(environment.summary(stamp), style="dim", soft_wrap=True)
    usual = sys.getswitchinterval()
    situations = [
        ("idle", False, usual),
        ("busy", True, usual),
        ("busy, switch interval 50 us", True, 50e-6),
    ]
    started = time.perf_counter()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dfx-bench-") as cache:
        os.environ["DYNAFLOW_XLA_CACHE_DIR"] = cache
        for case in cases.select(options.cases):
            fn, args = case.make()
            branches = dfx.schedule(jax.jit(fn), strategy=dfx.Branches())
            auto = dfx.schedule(jax.jit(fn), strategy="auto")
            dfx.verify(branches, *args)
            runs = {
                "jit": measure.blocking(jax.jit(fn), args),
                "branches": measure.blocking(branches, args),
                "auto": measure.blocking(auto, args),
            }
            for run in runs.values():
                run()
            choice = auto.decision(args, {})
            decided = "original" if choice is None else choice.name
            console.print(f"measuring {case.name}")
            for label, active, interval in situations:
                sys.setswitchinterval(interval)
                try:
                    with spinning(active):
                        against = {name: ["jit"] for name in ("branches", "auto")}
                        timed = measure.timed(runs, against, options.rounds)
                finally:
                    sys.setswitchinterval(usual)
                results.append(
                    {
                        "case": case.name, "situation": label, "switch_interval_s": interval,
                        "auto": decided, **timed,
                    }
                )  # fmt: skip

    table = Table(
        "case", "other thread", "jit ms", "branches ms", "ratio", "auto ms", "ratio", "auto"
    )
    for row in results:
        s, r = row["statistics_ms"], row["ratios"]
        table.add_row(
            row["case"], row["situation"], f"{s['jit']['median']:.3g}",
            f"{s['branches']['median']:.3g}", f"{r['branches']['ratio']:.2f}",
            f"{s['auto']['median']:.3g}", f"{r['auto']['ratio']:.2f}", row["auto"],
        )  # fmt: skip
    console.print(table)
    record = {
        "format": 1, "benchmark": "busy-thread", "environment": stamp, "rounds": options.rounds,
        "seconds": time.perf_counter() - started, "rows": results,
    }  # fmt: skip
    console.print(f"wrote {records.save(record, options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
