"""What a call costs where the original is kept: ``python benchmarks/cpu/kept.py [--rounds N] [--out FILE]``.

PyTorch functions and modules of some microseconds, called as they are, scheduled with ``Auto``, under
``torch.compile``, and as the one region of a schedule. In JAX ``jax.jit`` calls a kept original itself.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

import torch
from common import environment, measure, records
from rich.console import Console
from rich.table import Table

import dynaflow_xla as dfx

GOAL_US = 5.0
"""Microseconds that a kept original may take more than without a schedule."""

Runs = dict[str, Callable[[], Any]]


def made() -> tuple[dict[str, Runs], dict[str, str]]:
    """Returns ways to call tiny callables, by group, and what Auto says of its decisions."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 8)
    two = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def function(x: Any) -> Any:
        return torch.sin(x) + 1

    def run(fn: Any, args: Any, kwargs: Any, grad: bool) -> Callable[[], Any]:
        def without() -> Any:
            with torch.no_grad():
                return fn(*args, **kwargs)

        return (lambda: fn(*args, **kwargs)) if grad else without

    def keywords(x: Any, mask: Any = None, kinds: Any = None, scale: float = 1.0) -> Any:
        return x * mask + kinds

    def mapping(tensors: Any) -> Any:
        return tensors["3"] + tensors["7"]

    many = {str(n): torch.randn(4, 8) for n in range(16)}
    three = {"x": x, "mask": torch.randn(4, 8), "kinds": torch.randn(4, 8), "scale": 2.0}
    calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
        "linear": (linear, (x,), {}),
        "sequential": (two, (x,), {}),
        "function": (function, (x,), {}),
        "keywords": (keywords, (), three),
        "mapping": (mapping, (many,), {}),
    }
    groups: dict[str, Runs] = {}
    decided = {}
    for name, (fn, args, kwargs) in calls.items():
        auto = dfx.schedule(fn, dfx.Auto(), lanes=2)
        ways = {
            "eager": fn, "auto": auto, "torch_compile": torch.compile(fn),
            "one_region": dfx.schedule(fn, dfx.Sequential(wide=False), lanes=2),
        }  # fmt: skip
        for mode in ("grad", "no_grad"):
            group = f"{name}_{mode}"
            groups[group] = {
                f"{group}_{w}": run(f, args, kwargs, mode == "grad") for w, f in ways.items()
            }
            for way in groups[group].values():
                torch.testing.assert_close(way(), fn(*args, **kwargs))
            with torch.set_grad_enabled(mode == "grad"):
                decided[group] = dfx.explain(auto, *args, **kwargs).splitlines()[0]
    return groups, decided


def main() -> int:
    """Measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=records.RESULTS / "kept.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    console = Console()
    groups, decided = made()
    stamp = environment.stamp()
    console.print(environment.summary(stamp), style="dim", soft_wrap=True)
    started = time.perf_counter()
    timed = measure.timed_us(groups, options.rounds)
    statistics = timed["statistics_us"]
    table = Table("callable", "eager us", "Auto adds", "torch.compile adds", "one region adds")
    added = {}
    for group in groups:
        eager, *others = (statistics[run]["median"] for run in groups[group])
        added[group] = dict(zip(("auto", "torch_compile", "one_region"), others, strict=True))
        added[group] = {way: took - eager for way, took in added[group].items()}
        more = [f"{took:.1f}" for took in added[group].values()]
        table.add_row(group, f"{eager:.1f}", *more)
    console.print(table)
    worst = max(of["auto"] for of in added.values())
    verdict = "met" if worst <= GOAL_US else "MISSED"
    console.print(f"Auto adds at most {worst:.1f} us (<= {GOAL_US:g}: {verdict})")
    console.print(f"contention: {timed['contention']}")
    record = {
        "format": 1, "benchmark": "kept", "environment": stamp, "rounds": options.rounds,
        "seconds": time.perf_counter() - started, "goal_us": GOAL_US, "added_us": added,
        "decided": decided, **timed,
    }  # fmt: skip
    console.print(f"wrote {records.save(record, options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
