"""Paired measurement of candidates and the decision cache on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynaflow_xla.errors import FallbackWarning, PlanError

CACHE_VERSION = 2

MIN_ROUNDS = 3


class BudgetTooSmall(PlanError):
    """The budget does not suffice to sample every candidate ``MIN_ROUNDS`` times."""


def cache_dir() -> Path:
    """Folder of decisions: ``DYNAFLOW_XLA_CACHE_DIR``, else ``~/.cache/dynaflow_xla``."""
    root = os.environ.get("DYNAFLOW_XLA_CACHE_DIR")
    return Path(root) if root else Path.home() / ".cache" / "dynaflow_xla"


def cache_key(*parts: Any) -> str:
    """Hash over what a decision depends on, this machine included."""
    machine = (platform.machine(), platform.processor(), len(os.sched_getaffinity(0)))
    text = json.dumps([CACHE_VERSION, machine, [str(part) for part in parts]])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(key: str) -> dict[str, Any] | None:
    """A stored decision; None if there is none. A broken file is reported once, removed, rebuilt."""
    path = cache_dir() / f"{key}.json"
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict):
            raise ValueError("not an object")
        return {
            "choice": str(data["choice"]),
            "reason": str(data["reason"]),
            "medians_ms": {str(k): float(v) for k, v in data["medians_ms"].items()},
            "predicted_ms": {str(k): float(v) for k, v in data.get("predicted_ms", {}).items()},
            "left_out": {str(k): str(v) for k, v in data.get("left_out", {}).items()},
            "seconds": float(data.get("seconds", 0.0)),
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(
            f"the cached decision {path} cannot be read ({error}); it is made again",
            FallbackWarning,
            stacklevel=2,
        )
        with contextlib.suppress(OSError):  # what cannot be removed is reported again
            path.unlink()
        return None


def store(key: str, decision: dict[str, Any]) -> None:
    """Writes a decision atomically; a folder that cannot be written to is reported, not fatal."""
    folder = cache_dir()
    text = json.dumps(decision)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
            try:
                file.write(text)
                file.close()
                os.replace(file.name, folder / f"{key}.json")
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        warnings.warn(
            f"decisions cannot be kept in {folder} ({error}); they are made again in each process",
            FallbackWarning,
            stacklevel=2,
        )


def measure(
    runs: dict[str, Callable[[], None]],
    budget_s: float,
    rounds: int = 15,
    rest_s: float = 0.0,
    sample_s: float = 5e-4,
    tick: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """Interleaved timing: each round samples every candidate once, in rotating order.

    Args:
        runs: Name -> a function that runs the candidate to completion.
        budget_s: Stop after this long; compiling and first calls do not count.
        rounds: Most rounds.
        rest_s: Rest before each sample, for programs whose library threads spin on after a call.
        sample_s: A sample is one untimed call, then calls for about this long.
        tick: Told how far it is.

    Returns:
        Name -> median milliseconds.

    Raises:
        BudgetTooSmall: it does not suffice for ``MIN_ROUNDS`` rounds.
    """
    tell = tick or (lambda _: None)
    once: dict[str, float] = {}
    for name, run in runs.items():
        tell(f"first call of {name}")
        run()  # compiles
        t0 = time.perf_counter()
        run()
        once[name] = time.perf_counter() - t0
    calls = max(1, min(50, math.ceil(sample_s / max(min(once.values()), 1e-9))))
    need = MIN_ROUNDS * sum(rest_s + (1 + calls) * seconds for seconds in once.values())
    if need > budget_s:
        raise BudgetTooSmall(
            f"{budget_s:g} s do not suffice to measure {len(runs)} candidates {MIN_ROUNDS} times, which "
            f"takes about {need:.2g} s: give dfx.tune or Auto a larger budget_s"
        )
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    start = time.perf_counter()
    for turn in range(rounds):
        if turn >= MIN_ROUNDS and time.perf_counter() - start > budget_s:
            break
        tell(f"round {turn + 1} of at most {rounds}")
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if rest_s > 0.0:
                time.sleep(rest_s)
            runs[name]()
            t0 = time.perf_counter()
            for _ in range(calls):
                runs[name]()
            samples[name].append((time.perf_counter() - t0) * 1e3 / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def pick(medians: dict[str, float], baseline: str, margin: float) -> tuple[str, str]:
    """The fastest name and a sentence; the baseline wins unless beaten by ``margin``."""
    best = min(medians, key=lambda name: medians[name])
    base = medians[baseline]
    if len(medians) == 1:
        return baseline, f"the original ({base:.3g} ms) is the only candidate"
    if best == baseline or medians[best] > base * (1 - margin):
        second = min((v, k) for k, v in medians.items() if k != baseline)
        return (
            baseline,
            f"the original ({base:.3g} ms) is not beaten by {second[1]} ({second[0]:.3g} ms)",
        )
    return best, f"{best} took {medians[best]:.3g} ms, the original {base:.3g} ms"
