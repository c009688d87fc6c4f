"""``dynaflow_xla.why`` on three functions that gain and three that do not: is it right?

What it says is compared with times taken apart from it, in turns: a function gains, by more than a few
percent as ``why`` means it, if the whole 95 % interval of the ratio to its original is below 0.97, and does
not if it reaches above. Each is asked several times.
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

import jax
import jax.numpy as jnp
from common import environment, measure, records

import dynaflow_xla as dfx

Made = tuple[Callable[..., Any], tuple[Any, ...], set[str]]
"""A function, its arguments, and which answers are right."""


def _random(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def sorts() -> Made:
    """Gains: two sorts, which XLA runs on one core each."""
    return (
        lambda a, b: (jnp.sort(a), jnp.sort(b)),
        (_random(2**17), _random(2**17, seed=1)),
        {"gains"},
    )


def scans() -> Made:
    """Gains: two recurrences over many steps."""

    def recur(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, y: (jnp.tanh(h @ w + y), ()), jnp.zeros_like(x[0]), x)[0]

    def both(w: jax.Array, v: jax.Array, x: jax.Array) -> Any:
        return recur(w, x), recur(v, x[::-1])

    return (
        both,
        (_random(192, 192) / 14, _random(192, 192, seed=1) / 14, _random(256, 16, 192)),
        {"gains"},
    )


def roots() -> Made:
    """Gains: two loops whose number of steps the data give."""

    def newton(m: jax.Array) -> jax.Array:
        def step(state: Any) -> Any:
            x, n = state
            return x - 0.2 * (x - 0.5 * jnp.sin(x) - m) / (1 - 0.5 * jnp.cos(x)), n + 1

        return jax.lax.while_loop(lambda state: state[1] < 100, step, (m, 0))[0]

    return lambda a, b: (newton(a), newton(b)), (_random(16384), _random(16384, seed=1)), {"gains"}


def chain() -> Made:
    """Does not: one sort needs the other."""
    return lambda a: jnp.sort(jnp.cumsum(jnp.sort(a))), (_random(2**17),), {"dependency"}


def small() -> Made:
    """Does not: two branches of microseconds."""
    return (
        lambda a, b: (jnp.tanh(a @ a), jnp.tanh(b @ b)),
        (_random(16, 16), _random(16, 16, seed=1)),
        {"too short"},
    )


def wide() -> Made:
    """Does not: two products, each of which has all cores."""
    args = (_random(1536, 1536), _random(1536, 1536, seed=1))
    return lambda a, b: (a @ a, b @ b), args, {"contention"}


CASES = {
    "sorts": sorts,
    "scans": scans,
    "roots": roots,
    "chain": chain,
    "small": small,
    "wide": wide,
}


def study(name: str, times: int, rounds: int) -> dict[str, Any]:
    """Asks ``why`` and measures."""
    fn, args, right = CASES[name]()
    plain = jax.jit(fn)
    fast = dfx.schedule(plain, dfx.Branches(wide=False), lanes=2)
    jax.block_until_ready(fast(*args))
    reports = [dfx.why(fast, *args) for _ in range(times)]
    runs = {"scheduled": measure.blocking(fast, args), "original": measure.blocking(plain, args)}
    made = measure.timed(runs, {"scheduled": ["original"]}, rounds)
    told = made["ratios"]["scheduled"]
    gains = told["high"] < 0.97
    asked = [r.reason for r in reports]
    return {
        "name": name, "expected": sorted(right), "asked": asked, "texts": [r.text for r in reports],
        "measured_gain": gains, **made,
        "right": [r in right and (r == "gains") == gains for r in asked],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("-o", "--out", type=Path, default=records.RESULTS / "why.json")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    stamp, began = environment.stamp(), time.perf_counter()
    cases = []
    for name in CASES:
        case = study(name, given.times, given.rounds)
        cases.append(case)
        ratio = case["ratios"]["scheduled"]
        print(
            f"{name}: ratio {ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}); "
            f"said {', '.join(case['asked'])}; right {sum(case['right'])} of {len(case['right'])}",
            flush=True,
        )
    record = {
        "format": 1, "benchmark": "why", "environment": stamp, "baselines": ["original"], "cases": cases,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip
    records.save(record, given.out)
    return 0 if all(all(case["right"]) for case in cases) else 1


if __name__ == "__main__":
    raise SystemExit(main())
