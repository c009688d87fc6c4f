"""Ways to run a JAX function, compiled one after another as far as a decision's budget allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dynaflow_xla.frontends.jax.tuning import decided, originals
from dynaflow_xla.tuning import autotune, budget, quiet, ways
from dynaflow_xla.watching import progress

_BLAS_SAMPLE_S = 0.02
"""OpenBLAS threads spin for 2^28 clock ticks after a call and would slow down whoever is timed next: each
sample waits for that."""

_OPERATOR_S = 5e-4
"""Compiling takes at least so long for each operator: for an original that was compiled before."""


class CompiledWays(ways.Ways):
    """The original and candidates, each compiled and called twice.

    Args:
        fast: The scheduled function.
        args: Of the call.
        kwargs: Of the call.
        spending: What the decision may take.
        first: The first candidate's entry.
    """

    def __init__(
        self, fast: Any, args: Any, kwargs: Any, spending: budget.Budget, first: Any
    ) -> None:
        super().__init__(spending)
        self._fast, self._args, self._kwargs = fast, args, kwargs
        self._limits_blas = False
        self._operators = max(1, len(first.captured.graph.ops))
        fast.by_decision.look_again()  # what is measured is what later calls will take
        # The program that is measured is the one that calls will run, if this is what is decided.
        run = _runner(fast.by_decision.program("original"), fast, args, kwargs)
        anew = max(self._operators * _OPERATOR_S, spending.anew_s)
        with fast.by_decision.tracing(decided.ORIGINAL):
            self.original(run, anew)
        self._compile_s = max(spending.own_s - self.call_s, anew)

    def compile_s(self, made: Any) -> float:
        """Seconds that compiling a planned candidate will take, by what the original took."""
        if made.compiled:
            return 0.0
        share = len(made.captured.graph.ops) / self._operators
        return self._compile_s * share * self.spending.rate

    def _tried(self, name: str, run: Callable[[], None], compile_s: float) -> str:
        if reason := self.refuses(name, compile_s):
            return reason
        took = self.compiled(name, run)
        if name not in originals.KINDS:  # those say nothing about programs of plans
            self.spending.compiled(compile_s, took)
        return self.too_slow(name)

    def add(self, name: str) -> str:
        """Compiles a candidate; or says why not."""
        child = self._fast.with_strategy(self._fast.candidates()[name])
        made = child.planned(self._args, self._kwargs)
        run = _runner(child, self._fast, self._args, self._kwargs)
        with progress.report(f"compiling {self._fast._options.name!r} for {name}"):
            reason = self._tried(name, run, self.compile_s(made))
        self._limits_blas |= any(s is not None and s.program.limit_blas for s, _ in made.compiled)
        return reason

    def add_original(self, kind: str) -> str:
        """Compiles the original in another way (``originals.NAMES``); or says why not."""
        by_decision = self._fast.by_decision
        run = _runner(by_decision.program(kind), self._fast, self._args, self._kwargs)
        with by_decision.tracing(decided.ORIGINAL):
            return self._tried(originals.NAMES[kind], run, self._compile_s)

    def measure(self, watch: quiet.ActivityWatch) -> autotune.Medians:
        """Milliseconds by name, with their samples.

        Raises:
            autotune.BudgetTooSmall: the user's seconds do not suffice.
            quiet.Disturbed: something else ran.
        """
        names = f"measuring {len(self.runs)} ways to run {self._fast._options.name!r}"
        with progress.report(names) as tick:
            medians = self.medians(
                self.runs,
                watch,
                strict=self.spending.asked,
                margin=self._fast._options.strategy.margin,
                rest=self._limits_blas,
                sample_s=_BLAS_SAMPLE_S if self._limits_blas else autotune.SAMPLE_S,
                tick=tick,
            )
        if not on_a_device():
            return medians
        # How far cores are from each other says nothing about streams.
        return autotune.Medians(medians.samples, False, medians.in_rows)


def on_a_device() -> bool:
    """Whether a call enqueues what JAX's default device computes: not on a CPU."""
    return bool(jax.default_backend() != "cpu")


def _runner(fn: Any, fast: Any, args: Any, kwargs: Any) -> Callable[[], None]:
    programs = fast.programs
    device = on_a_device()
    results: list[Any] = []

    def run(given: Any) -> None:
        a, k = given
        if device:
            results[:] = [fn(*a, **k)]
        else:
            jax.block_until_ready(fn(*a, **k))

    def wait() -> None:
        jax.block_until_ready(results)
        results.clear()

    waits = wait if device else None
    if not programs.donates:
        if not device:
            return lambda: run((args, kwargs))
        return autotune.Fresh(lambda: (args, kwargs), run, waits, lambda: True)
    leaves = programs.dynamic_leaves(args, kwargs)
    away = {id(leaves[i]) for i in programs.donated_leaves(args, kwargs)}

    def copy(leaf: Any) -> Any:
        return leaf.copy() if isinstance(leaf, jax.Array) and id(leaf) in away else leaf

    def given() -> Any:
        return jax.block_until_ready(jax.tree_util.tree_map(copy, (args, kwargs)))

    return autotune.Fresh(given, run, waits)
