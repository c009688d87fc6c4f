"""Paired timing: every round times each variant once, in rotating order, in one process.

What disturbs a machine for a while then disturbs all variants alike; ratios are formed from samples
of the same rounds, and their spread comes from resampling rounds, not single samples.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

Run = Callable[[], Any]


def one_thread(fn: Callable[..., Any], args: tuple[Any, ...]) -> Run:
    """Returns a run of ``fn``, jitted for a client whose pool has one thread.

    This is the second baseline: for small work, one thread is often faster than XLA's pool, and a
    schedule that only beats the pool has gained nothing.
    """
    from jax.sharding import SingleDeviceSharding

    from dynaflow_xla.ffi import xla

    device = xla.lane_device(0)
    placed = SingleDeviceSharding(device)
    jitted = jax.jit(fn, in_shardings=placed, out_shardings=placed)
    moved = jax.device_put(args, device)

    def run() -> Any:
        return jax.block_until_ready(jitted(*moved))

    return run


def blocking(fn: Callable[..., Any], args: tuple[Any, ...]) -> Run:
    """Returns a run of ``fn`` that ends when the results are there."""

    def run() -> Any:
        return jax.block_until_ready(fn(*args))

    return run


def paired(
    runs: dict[str, Run],
    rounds: int,
    *,
    sample_ms: float = 2.0,
    warmup: int = 3,
    tick: Callable[[], None] | None = None,
) -> tuple[dict[str, list[float]], int]:
    """Times the runs against each other.

    Args:
        runs: Name -> run.
        rounds: Samples of each.
        sample_ms: A sample repeats the call until it takes about this long, so that the clock and
            the loop do not count.
        warmup: Calls of each before the first sample.
        tick: Called after each round.

    Returns:
        Name -> milliseconds a call, one value a round; and the calls in one sample.
    """
    fastest = math.inf
    for run in runs.values():
        for _ in range(warmup):
            t0 = time.perf_counter()
            run()
            fastest = min(fastest, (time.perf_counter() - t0) * 1e3)
    calls = max(1, min(1000, math.ceil(sample_ms / fastest)))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                run = runs[name]
                t0 = time.perf_counter()
                for _ in range(calls):
                    run()
                samples[name].append((time.perf_counter() - t0) * 1e3 / calls)
            if tick is not None:
                tick()
    finally:
        if enabled:
            gc.enable()
    return samples, calls


def statistics(samples: Sequence[float]) -> dict[str, float]:
    """Returns median, quartiles and extremes, in the unit of the samples."""
    q1, median, q3 = np.percentile(samples, [25, 50, 75])
    return {
        "median": float(median), "q1": float(q1), "q3": float(q3), "iqr": float(q3 - q1),
        "min": float(min(samples)), "max": float(max(samples)),
    }  # fmt: skip


def ratio(
    samples: dict[str, list[float]], scheduled: str, baselines: Sequence[str], resamples: int = 2000
) -> dict[str, Any]:
    """Returns the scheduled median over the better baseline's, with a 95 % interval.

    The interval is a bootstrap over rounds: each resample draws rounds, and takes the medians of all
    variants over the same rounds (which baseline is better is decided anew each time).
    """
    names = [scheduled, *baselines]
    table = np.asarray([samples[name] for name in names])  # [variants, rounds]
    medians = np.median(table, axis=1)
    best = min(baselines, key=lambda name: float(np.median(samples[name])))
    picks = np.random.default_rng(0).integers(0, table.shape[1], (resamples, table.shape[1]))
    drawn = np.median(table[:, picks], axis=2)  # [variants, resamples]
    low, high = np.percentile(drawn[0] / drawn[1:].min(axis=0), [2.5, 97.5])
    return {
        "ratio": float(medians[0] / medians[1:].min()),
        "low": float(low),
        "high": float(high),
        "baseline": best,
    }
