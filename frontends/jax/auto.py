"""Measuring a JAX function's candidates for ``Auto``: on copies, at top level, never with effects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from dynaflow_xla import autotune
from dynaflow_xla._version import __version__

_BLAS_SPIN_S = 0.12
"""OpenBLAS threads spin for 2^28 clock ticks after a call and would slow down whoever is timed next."""

_BLAS_SAMPLE_S = 0.02

_ONE_LANE_MAX_NS = 500_000.0
"""Up to so much work even one lane may win: XLA's thread pool costs small programs more than it gains."""


@dataclass(frozen=True)
class Choice:
    """What Auto decided for one signature.

    Attributes:
        child: The scheduled function to call, or None for the original.
        reason: One sentence.
        medians_ms: Candidate -> median milliseconds; empty if nothing was measured.
    """

    child: Any
    reason: str
    medians_ms: dict[str, float] = field(default_factory=dict)


def choose(fast: Any, args: Any, kwargs: Any) -> Choice:
    """Decides for one signature, from the disk cache or by measuring."""
    strategy = fast._options.strategy
    if jax.process_count() > 1:
        return Choice(None, "more than one process: no measurement, the original runs")
    candidates = strategy.candidates(fast._options.lanes)
    first = fast.with_strategy(candidates[0])
    made = first.planned(args, kwargs)
    if any(op.outer for op in made.captured.graph.ops):
        names = sorted({op.kind for op in made.captured.graph.ops if op.outer})
        return Choice(
            None, f"the function has effects or callbacks ({', '.join(names)}): it is not measured"
        )
    used = {i.lane for i in made.plan.instructions if hasattr(i, "lane")}
    total_ns = sum(region.cost_ns for region in made.pg.regions)
    if len(used) < 2 and total_ns > _ONE_LANE_MAX_NS:
        return Choice(None, "the plan has one lane: nothing would overlap")
    if total_ns < strategy.min_cost_ns:
        return Choice(
            None,
            f"estimated work {total_ns / 1e3:.0f} us is under {strategy.min_cost_ns / 1e3:.0f} us: "
            "hand-offs would cost more than overlap gains",
        )
    key = autotune.cache_key(
        made.pg.to_json(), fast._options.name, __version__, jax.__version__, fast._options.lanes
    )
    cached = autotune.load(key)
    if cached is not None:
        child = _child(fast, candidates, cached["choice"])
        return Choice(child, f"cached: {cached['reason']}", cached["medians_ms"])
    runs: dict[str, Callable[[], None]] = {"original": _runner(fast.original, fast, args, kwargs)}
    for candidate in candidates:
        runs[repr(candidate)] = _runner(fast.with_strategy(candidate), fast, args, kwargs)
    lapack = any(stage is not None and stage.program.limit_blas for stage, _ in made.stages)
    medians = autotune.measure(
        runs,
        budget_s=strategy.budget_s,
        rest_s=_BLAS_SPIN_S if lapack else 0.0,
        sample_s=_BLAS_SAMPLE_S if lapack else 5e-4,
    )
    choice, reason = autotune.pick(medians, baseline="original", margin=strategy.margin)
    autotune.store(key, {"choice": choice, "reason": reason, "medians_ms": medians})
    return Choice(_child(fast, candidates, choice), reason, medians)


def _child(fast: Any, candidates: list[Any], choice: str) -> Any:
    for candidate in candidates:
        if repr(candidate) == choice:
            return fast.with_strategy(candidate)
    return None


def _runner(fn: Any, fast: Any, args: Any, kwargs: Any) -> Callable[[], None]:
    def copy(leaf: Any) -> Any:
        return leaf.copy() if isinstance(leaf, jax.Array) else leaf

    def run() -> None:
        a, k = jax.tree_util.tree_map(copy, (args, kwargs)) if fast._donates else (args, kwargs)
        jax.block_until_ready(fn(*a, **k))

    return run
