"""Functions of some tens of microseconds: ``jax.jit``, ``Branches``, and ``Branches`` inside a ``jit``.

    python benchmarks/cpu/small.py [--rounds 11]

Each is called many times in a row, and once after a pause of a millisecond, in which threads fall asleep. All
ways take turns in one process, in an order drawn anew each round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

import jax
import jax.numpy as jnp
from common import environment, records
from models import cases

import dynaflow_xla as dfx
from dynaflow_xla.planning.instructions import Launch

PAUSE_S = 1e-3
PAUSED = 4
"""Calls after a pause in a round."""
ROW_S = 0.008
"""A sample of calls in a row takes about that long."""
CHAINS = ((2, 256), (2, 1024), (8, 256), (8, 1024), (4, 4096), (16, 1024), (8, 4096), (4, 16384))
MLPS = ((1, 64), (2, 8), (8, 8), (8, 32), (4, 64), (8, 64), (2, 256))


def chains(count: int, size: int) -> cases.Made:
    """Chains of elementwise operators on so many floats, beside each other."""
    return cases.elementwise, tuple(
        jax.random.normal(jax.random.key(n), (size,)) for n in range(count)
    )


def mlps(count: int, width: int) -> cases.Made:
    """The mean of MLPs of three layers on 64 rows."""
    first, *keys = jax.random.split(jax.random.key(0), count + 1)
    members = [cases.mlp_parameters(key, [width] * 4) for key in keys]

    def run(members: Any, x: jax.Array) -> Any:
        return sum(cases.mlp(m, x) for m in members) / count

    return run, (members, jax.random.normal(first, (64, width)))


def aside() -> cases.Made:
    """Two tiny sorts beside large products."""
    w = jax.random.normal(jax.random.key(0), (768, 768)) / 28

    def run(x: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        made = w
        for _ in range(6):
            made = made @ w
        return jnp.sort(x), jnp.sort(y), made

    return run, (jnp.arange(256.0)[::-1], jnp.ones(256), w)


def measured(made: cases.Made, rounds: int) -> dict[str, Any]:
    """Samples of one function in microseconds, by way."""
    fn, args = made
    fast = dfx.schedule(jax.jit(fn), dfx.Branches(), lanes=2)
    ways: dict[str, Callable[..., Any]] = {
        "jit": jax.jit(fn), "branches": fast, "inside": jax.jit(lambda *a: fast(*a))
    }  # fmt: skip
    for call in ways.values():
        for _ in range(3):
            jax.block_until_ready(call(*args))
    start = time.perf_counter()
    jax.block_until_ready(ways["jit"](*args))
    count = max(3, min(100, int(ROW_S / (time.perf_counter() - start))))
    row: dict[str, list[float]] = {way: [] for way in ways}
    paused: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in random.sample(list(ways), len(ways)):
            jax.block_until_ready(ways[way](*args))
            start = time.perf_counter()
            for _ in range(count):
                jax.block_until_ready(ways[way](*args))
            row[way].append((time.perf_counter() - start) / count * 1e6)
        for _ in range(PAUSED):
            for way in random.sample(list(ways), len(ways)):
                time.sleep(PAUSE_S)
                start = time.perf_counter()
                jax.block_until_ready(ways[way](*args))
                paused[way].append((time.perf_counter() - start) * 1e6)
    launches = [i.lane for i in dfx.plan(fast, *args).instructions if isinstance(i, Launch)]
    return {
        "regions_by_lane": {lane: launches.count(lane) for lane in sorted(set(launches))},
        "in_a_row_us": row, "after_a_pause_us": paused,
    }  # fmt: skip


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=records.RESULTS / "small.json")
    given = parser.parse_args()
    made = {f"{n} chains of {size}": chains(n, size) for n, size in CHAINS}
    made |= {f"{n} MLPs of {width}": mlps(n, width) for n, width in MLPS}
    made["two sorts beside products"] = aside()
    stamp, rows = environment.stamp(), {}
    for name, function in made.items():
        load = environment.stamp()["load_average"]
        rows[name] = measured(function, given.rounds) | {"date": environment.now(), "load": load}
        told = [f"{name:26} {rows[name]['regions_by_lane']!s:16}"]
        for kind in ("in_a_row_us", "after_a_pause_us"):
            middle = {way: statistics.median(took) for way, took in rows[name][kind].items()}
            told.append(" ".join(f"{way} {us:.0f}" for way, us in middle.items()))
            told.append(f"({middle['branches'] / middle['jit']:.2f})")
        print(*told, flush=True)
    records.save(
        {"format": 1, "benchmark": "small", "environment": stamp, "rounds": given.rounds, "cases": rows},
        given.out,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
