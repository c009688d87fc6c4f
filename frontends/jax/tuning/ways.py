"""Ways to run a JAX function, compiled one after another as far as a decision's budget allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dynaflow_xla import progress
from dynaflow_xla.frontends.jax.tuning import decided
from dynaflow_xla.tuning import autotune, budget, quiet

ON_CALLER = "original on the caller's thread"
"""The original's program, see ``on_caller``."""

_BLAS_SAMPLE_S = 0.02
"""OpenBLAS threads spin for 2^28 clock ticks after a call and would slow down whoever is timed next: each
sample waits for that."""

_OPERATOR_S = 5e-4
"""Compiling takes at least so long for each operator: for an original that was compiled before."""

_SLOW = 5.0
"""What takes so many times as long as the original in a few calls is not measured further."""

_AGAIN = 3


class Ways:
    """The original and candidates, each compiled and called twice.

    Args:
        fast: The scheduled function.
        args: Of the call.
        kwargs: Of the call.
        spending: What the decision may take.
        first: The first candidate's entry.

    Attributes:
        runs: Name -> a run to completion.
        refused: Why something was left out for want of time, or "".
    """

    def __init__(
        self, fast: Any, args: Any, kwargs: Any, spending: budget.Budget, first: Any
    ) -> None:
        self._fast, self._args, self._kwargs, self._spending = fast, args, kwargs, spending
        self.runs: dict[str, Callable[[], None]] = {}
        self.refused = ""
        self._calls: dict[str, float] = {}
        self._limits_blas = False
        self._operators = max(1, len(first.captured.graph.ops))
        # The program that is measured is the one that calls will run, if this is what is decided.
        run = _runner(fast.program("original"), fast, args, kwargs)
        with fast.as_decided(decided.ORIGINAL):
            took = self._twice("original", run)
        call = self._calls["original"]
        anew = self._operators * _OPERATOR_S
        spending.original(took, anew)
        self._compile_s = max(spending.own_s - call, anew)

    def _twice(self, name: str, run: Callable[[], None]) -> float:
        """Seconds of the first call; the second one's are kept."""
        start = budget.clock()
        run()
        then = budget.clock()
        run()
        self._calls[name] = budget.clock() - then
        self.runs[name] = run
        return then - start

    def compile_s(self, made: Any) -> float:
        """Seconds that compiling a planned candidate will take, by what the original took."""
        if made.compiled:
            return 0.0
        share = len(made.captured.graph.ops) / self._operators
        return self._compile_s * share * self._spending.rate

    def _measuring_s(self, more: int) -> float:
        """Seconds of the fewest rounds over all so far and ``more`` like the original."""
        calls = [*self._calls.values(), *[self._calls["original"]] * more]
        return autotune.MIN_ROUNDS * sum(2 * call + autotune.SAMPLE_S for call in calls)

    def _tried(self, name: str, run: Callable[[], None], compile_s: float) -> str:
        needed = compile_s + 2 * self._calls["original"] + self._measuring_s(1)
        if reason := self._spending.refuses(f"compiling and measuring {name}", needed):
            self.refused = reason
            return reason
        took = self._twice(name, run)
        if name != ON_CALLER:  # that one says nothing about lane programs
            self._spending.compiled(compile_s, max(0.0, took - self._calls[name]))
        slow = _SLOW * max(self._calls["original"], autotune.SAMPLE_S)
        for _ in range(_AGAIN):
            if self._calls[name] > slow:  # a call may meet a busy machine
                start = budget.clock()
                run()
                self._calls[name] = min(self._calls[name], budget.clock() - start)
        if self._calls[name] > slow:
            del self.runs[name]
            call = self._calls.pop(name) * 1e3
            return f"a call took {call:.3g} ms, the original's {self._calls['original'] * 1e3:.3g}"
        return ""

    def add(self, name: str) -> str:
        """Compiles a candidate; or says why not."""
        child = self._fast.with_strategy(self._fast.candidates()[name])
        made = child.planned(self._args, self._kwargs)
        run = _runner(child, self._fast, self._args, self._kwargs)
        with progress.report(f"compiling {self._fast._options.name!r} for {name}"):
            reason = self._tried(name, run, self.compile_s(made))
        self._limits_blas |= any(s is not None and s.program.limit_blas for s, _ in made.compiled)
        return reason

    def add_on_caller(self) -> str:
        """Compiles the original to run on the thread that calls it; or says why not."""
        run = _runner(self._fast.program("caller"), self._fast, self._args, self._kwargs)
        with self._fast.as_decided(decided.ON_CALLER):
            return self._tried(ON_CALLER, run, self._compile_s)

    def measure(self, watch: quiet.Watch) -> dict[str, float]:
        """Median milliseconds by name.

        Raises:
            autotune.BudgetTooSmall: the user's seconds do not suffice.
            quiet.Disturbed: something else ran.
        """
        left = self._spending.left_s
        if (
            not self._spending.asked
        ):  # what was compiled is measured, if it is for the shortest time
            left = max(left, 2 * self._measuring_s(0))
        names = f"measuring {len(self.runs)} ways to run {self._fast._options.name!r}"
        with progress.report(names) as tick:
            return autotune.measure(
                self.runs,
                budget_s=max(0.0, self._spending.left_s),
                regardless=not self._spending.asked,  # what was compiled is measured
                rest=self._limits_blas,
                sample_s=_BLAS_SAMPLE_S if self._limits_blas else autotune.SAMPLE_S,
                tick=tick,
                watch=watch,
            )


def _runner(fn: Any, fast: Any, args: Any, kwargs: Any) -> Callable[[], None]:
    def run(given: Any) -> None:
        a, k = given
        jax.block_until_ready(fn(*a, **k))

    if not fast._donates:
        return lambda: run((args, kwargs))
    leaves = fast.dynamic_leaves(args, kwargs)
    away = {id(leaves[i]) for i in fast.donated_leaves(args, kwargs)}

    def copy(leaf: Any) -> Any:
        return leaf.copy() if isinstance(leaf, jax.Array) and id(leaf) in away else leaf

    def given() -> Any:
        return jax.block_until_ready(jax.tree_util.tree_map(copy, (args, kwargs)))

    return autotune.Fresh(given, run)
