"""Timing of calls against each other, and when two timings differ."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

RULE = (
    "slower or faster: the whole 95 % interval of the ratio of medians (bootstrap, {draws} draws) lies more "
    "than {least:.0%} beyond 1, after division by the change of the unscheduled baseline of the same case in "
    "the same files, where both have one (it tells how the machine itself changed)"
)
"""The noise rule of ``compare``."""

DRAWS = 2000


def paired(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    sample_s: float = 0.003,
    step: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds a call, one value a round: each round times every run once, in an order drawn anew.

    What disturbs the machine for a while then disturbs all alike.

    Args:
        runs: By name; they have been called before.
        rounds: Samples of each.
        sample_s: A sample repeats the call for about so long, so that the clock does not count.
        step: Called after each round.
    """
    calls = {}
    for name, run in runs.items():
        run()
        start = time.perf_counter()
        run()
        calls[name] = max(
            1, min(1000, math.ceil(sample_s / max(time.perf_counter() - start, 1e-7)))
        )
    samples: dict[str, list[float]] = {name: [] for name in runs}
    drawn, enabled = random.Random(0), gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in drawn.sample(list(runs), len(runs)):
                run = runs[name]
                run()  # what the one before it left behind is not this one's
                start = time.perf_counter()
                for _ in range(calls[name]):
                    run()
                samples[name].append((time.perf_counter() - start) * 1e3 / calls[name])
            step()
    finally:
        if enabled:
            gc.enable()
    return samples


def statistics(samples: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    q1, median, q3 = np.percentile(samples, [25, 50, 75])
    return {
        "median": float(median), "q1": float(q1), "q3": float(q3),
        "min": float(min(samples)), "max": float(max(samples)),
    }  # fmt: skip


def ratio(
    samples: Mapping[str, Sequence[float]], name: str, among: Sequence[str]
) -> dict[str, Any]:
    """One run's median over that of the fastest of some others, with a 95 % interval over rounds.

    Args:
        samples: Of all, one value a round.
        name: The run.
        among: What it is compared with.
    """
    table = np.asarray([samples[n] for n in (name, *among)])  # [runs, rounds]
    drawn = np.random.default_rng(0).integers(0, table.shape[1], (DRAWS, table.shape[1]))
    medians = np.median(table[:, drawn], axis=-1)  # [runs, draws]
    low, high = np.percentile(medians[0] / medians[1:].min(axis=0), [2.5, 97.5])
    whole = np.median(table, axis=-1)
    best = int(np.argmin(whole[1:]))
    return {
        "ratio": float(whole[0] / whole[1 + best]), "low": float(low), "high": float(high),
        "baseline": among[best],
    }  # fmt: skip


def change(
    before: Sequence[float],
    after: Sequence[float],
    base: tuple[Sequence[float], Sequence[float]] | None = None,
    least: float = 0.03,
) -> dict[str, Any]:
    """What became of a time between two files, by the noise rule ``RULE``.

    Args:
        before: Its samples then.
        after: And now.
        base: Those of the baseline, then and now.
        least: How far beyond 1 the interval has to lie.
    """
    drawn = np.random.default_rng(0)

    def resampled(values: Sequence[float]) -> Any:
        array = np.asarray(values, dtype=float)
        return np.median(array[drawn.integers(0, len(array), (DRAWS, len(array)))], axis=1)

    made = resampled(after) / resampled(before)
    told = float(np.median(after) / np.median(before))
    if base is not None:
        made = made / (resampled(base[1]) / resampled(base[0]))
        told /= float(np.median(base[1]) / np.median(base[0]))
    low, high = (float(x) for x in np.percentile(made, [2.5, 97.5]))
    verdict = "slower" if low > 1 + least else "faster" if high < 1 - least else "same"
    return {"ratio": told, "low": low, "high": high, "verdict": verdict}
