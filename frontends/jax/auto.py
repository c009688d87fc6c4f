"""Measuring a JAX function's candidates for ``Auto``: on copies, at top level, never with effects."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from dynaflow_xla import autotune, progress
from dynaflow_xla._version import __version__
from dynaflow_xla.errors import SeparabilityError
from dynaflow_xla.plan import Launch
from dynaflow_xla.simulate import simulate

_BLAS_SPIN_S = 0.12
"""OpenBLAS threads spin for 2^28 clock ticks after a call and would slow down whoever is timed next."""

_BLAS_SAMPLE_S = 0.02

_ONE_LANE_MAX_NS = 500_000.0
"""Up to so much work even one lane may win: XLA's thread pool costs small programs more than it gains."""

_FAR_BEHIND = 1.3
"""A candidate predicted to take so many times as long as the best one is not compiled."""

_MEASURED = 3
"""At most so many candidates are measured beside the original."""


@dataclass(frozen=True)
class Choice:
    """What Auto decided for one signature.

    Attributes:
        child: The scheduled function to call, or None for the original.
        reason: One sentence.
        medians_ms: Candidate -> median milliseconds; empty if nothing was measured.
        predicted_ms: Candidate -> milliseconds that the simulator expects.
        left_out: Candidate -> why it was not measured.
        seconds: What the decision took.
    """

    child: Any
    reason: str
    medians_ms: dict[str, float] = field(default_factory=dict)
    predicted_ms: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """For ``explain``."""
        what = "the original runs" if self.child is None else f"{self.child!r} runs"
        lines = [f"auto: {what}; {self.reason}"]
        for name in dict.fromkeys([*self.medians_ms, *self.predicted_ms, *self.left_out]):
            parts = []
            if name in self.predicted_ms:
                parts.append(f"predicted {self.predicted_ms[name]:.3g} ms")
            if name in self.medians_ms:
                parts.append(f"measured {self.medians_ms[name]:.3g} ms")
            if name in self.left_out:
                parts.append(f"not measured: {self.left_out[name]}")
            lines.append(f"auto:   {name}: {', '.join(parts)}")
        if self.medians_ms:
            lines.append(f"auto: the decision took {self.seconds:.2f} s")
        return lines


def candidates_of(fast: Any) -> list[Any]:
    """Auto's candidates for a scheduled function."""
    options = fast._options
    return options.strategy.candidates(options.lanes, batched=options.in_axes is not None)  # type: ignore[no-any-return]


def choose(fast: Any, args: Any, kwargs: Any, *, budget_s: float | None = None) -> Choice:
    """Decides for one signature, from the disk cache or by measuring.

    Args:
        fast: The scheduled function, whose strategy is ``Auto``.
        args: Of the call.
        kwargs: Of the call.
        budget_s: Measure for so long, even if the disk cache knows; None: the strategy's budget.

    Raises:
        autotune.BudgetTooSmall: nothing is decided then.
    """
    start = time.perf_counter()
    strategy = fast._options.strategy
    if jax.process_count() > 1:
        return Choice(None, "more than one process: no measurement, the original runs")
    candidates = candidates_of(fast)
    first = fast.with_strategy(candidates[0]).planned(args, kwargs)
    if reason := _not_measured(first, strategy):
        return Choice(None, reason)
    key = autotune.cache_key(
        first.pg.to_json(), fast._options.name, __version__, jax.__version__, fast._options.lanes,
        [repr(c) for c in candidates], fast._options.in_axes, fast._options.out_axes,
    )  # fmt: skip
    cached = autotune.load(key) if budget_s is None else None
    if cached is not None:
        choice, reason = cached.pop("choice"), cached.pop("reason")
        return Choice(_child(fast, candidates, choice), f"cached: {reason}", **cached)
    kept, predicted, left_out = _predicted(fast, candidates, args, kwargs)
    if not kept:
        return Choice(None, "the plan has one lane: nothing would overlap", {}, predicted, left_out)
    runs: dict[str, Callable[[], None]] = {"original": _runner(fast.original, fast, args, kwargs)}
    for candidate in kept:
        runs[repr(candidate)] = _runner(fast.with_strategy(candidate), fast, args, kwargs)
    lapack = any(stage is not None and stage.program.limit_blas for stage, _ in first.stages)
    with progress.report(f"measuring {len(runs)} ways to run {fast._options.name!r}") as tick:
        medians = autotune.measure(
            runs,
            budget_s=strategy.budget_s if budget_s is None else budget_s,
            rest_s=_BLAS_SPIN_S if lapack else 0.0,
            sample_s=_BLAS_SAMPLE_S if lapack else 5e-4,
            tick=tick,
        )
    choice, reason = autotune.pick(medians, baseline="original", margin=strategy.margin)
    seconds = time.perf_counter() - start
    decision = {
        "choice": choice, "reason": reason, "medians_ms": medians, "predicted_ms": predicted,
        "left_out": left_out, "seconds": seconds,
    }  # fmt: skip
    autotune.store(key, decision)
    return Choice(_child(fast, candidates, choice), reason, medians, predicted, left_out, seconds)


def _not_measured(made: Any, strategy: Any) -> str:
    """Why a function is not even measured, or ""."""
    outer = sorted({op.kind for op in made.captured.graph.ops if op.outer})
    if outer:
        return f"the function has effects or callbacks ({', '.join(outer)}): it is not measured"
    total_ns = sum(region.cost_ns for region in made.pg.regions)
    if total_ns < strategy.min_cost_ns:
        return (
            f"estimated work {total_ns / 1e3:.0f} us is under {strategy.min_cost_ns / 1e3:.0f} us: "
            "hand-offs would cost more than overlap gains"
        )
    return ""


def _predicted(
    fast: Any, candidates: list[Any], args: Any, kwargs: Any
) -> tuple[list[Any], dict[str, float], dict[str, str]]:
    """Candidates worth measuring, what is predicted of each, and why others are left out."""
    predicted: dict[str, float] = {}
    left_out: dict[str, str] = {}
    useful: list[Any] = []
    for candidate in candidates:
        name = repr(candidate)
        try:
            made = fast.with_strategy(candidate).planned(args, kwargs)
        except SeparabilityError as error:
            left_out[name] = str(error).splitlines()[0]
            continue
        predicted[name] = simulate(made.plan, made.pg).total_ns / 1e6
        lanes = {i.lane for i in made.plan.instructions if isinstance(i, Launch)}
        total_ns = sum(region.cost_ns for region in made.pg.regions)
        if made.unproven:
            left_out[name] = "it is not proved that a split keeps the values"
        elif len(lanes) < 2 and total_ns > _ONE_LANE_MAX_NS:
            left_out[name] = "its plan has one lane: nothing would overlap"
        else:
            useful.append(candidate)
    useful.sort(key=lambda c: predicted[repr(c)])
    best = predicted[repr(useful[0])] if useful else 0.0
    kept: list[Any] = []
    for candidate in useful:
        name = repr(candidate)
        if len(kept) >= _MEASURED:
            left_out[name] = f"{_MEASURED} others are predicted to be faster"
        elif predicted[name] > _FAR_BEHIND * best:
            left_out[name] = (
                f"predicted to take {predicted[name] / best:.2f} times the best one's time"
            )
        else:
            kept.append(candidate)
    return kept, predicted, left_out


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
