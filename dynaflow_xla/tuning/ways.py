"""Ways to run one function, called one after another as far as a decision's budget allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dynaflow_xla.machine import memory
from dynaflow_xla.tuning import autotune, budget, quiet

SLOW = 5.0
"""What takes so many times as long as the original in a few calls is not measured further."""

_AGAIN = 3


class Ways:
    """The original and candidates, each called twice.

    Args:
        spending: What the decision may take.

    Attributes:
        spending: The same.
        runs: Name -> a run to completion.
        refused: Why something was left out for want of time, or "".
        without_room: Whether something was left out for want of a device's memory.
        plain: Of these the original, and what one would run instead of a schedule.
    """

    def __init__(self, spending: budget.Budget) -> None:
        self.spending = spending
        self.runs: dict[str, Callable[[], None]] = {}
        self.refused = ""
        self.without_room = False
        self.plain: list[str] = []
        self._calls: dict[str, float] = {}
        self._pages: dict[str, int] = {}

    @property
    def call_s(self) -> float:
        """Seconds of a call of the original, as the fastest of the ways that are there anyway."""
        return min(self._calls[name] for name in self.plain)

    def original(
        self, run: Callable[[], None], at_least_s: float = 0.0, name: str = "original"
    ) -> float:
        """Calls the original, or another way that one would take instead of a schedule.

        Args:
            run: Runs it to completion.
            at_least_s: As for ``Budget.original``.
            name: Which way.

        Returns:
            Seconds of its first call.
        """
        took = self._twice(name, run)
        self.plain.append(name)
        self.spending.original(took, at_least_s, self._calls[name])
        return took

    def failed(self, name: str, took_s: float) -> None:
        """One of the ways that are there anyway raised: what it took does not count."""
        self.drop(name)
        self.spending.original(took_s)

    def _twice(self, name: str, run: Callable[[], None]) -> float:
        """Seconds of the first call; the second one's are kept."""
        start = budget.clock()
        run()
        then = budget.clock()
        once = partial(run.with_given, run.given()) if isinstance(run, autotune.Fresh) else run
        before = memory.faults()
        once()
        self._pages[name] = memory.faults() - before
        self._calls[name] = budget.clock() - then
        self.runs[name] = run
        return then - start

    def fresh_memory(self) -> str:
        """What a call of the fastest plain way takes from the system each time; "" where that is little."""
        name = min(self.plain, key=lambda plain: self._calls[plain])
        return memory.told(self._pages[name], self._calls[name] * 1e9)

    def _measuring_s(self, more: int) -> float:
        """Seconds of the fewest rounds over all so far and ``more`` like the original."""
        calls = [*self._calls.values(), *[self.call_s] * more]
        each = 1 + autotune.untimed_calls(calls)
        return autotune.MIN_ROUNDS * sum(each * call + autotune.SAMPLE_S for call in calls)

    def refuses(self, name: str, compile_s: float) -> str:
        """Why one more is not compiled, called and measured, or ""."""
        needed = compile_s + 2 * self.call_s + self._measuring_s(1)
        if reason := self.spending.refuses(f"compiling and measuring {name}", needed):
            self.refused = reason
        return reason

    def compiled(self, name: str, run: Callable[[], None]) -> float:
        """Calls a candidate for the first times; seconds of what came before it ran."""
        return max(0.0, self._twice(name, run) - self._calls[name])

    def too_slow(self, name: str) -> str:
        """Why a candidate that was called is not measured, or ""."""
        slow = SLOW * max(self.call_s, autotune.SAMPLE_S)
        for _ in range(_AGAIN):
            if self._calls[name] > slow:  # a call may meet a busy machine
                start = budget.clock()
                self.runs[name]()
                self._calls[name] = min(self._calls[name], budget.clock() - start)
        if self._calls[name] <= slow:
            return ""
        call = self._calls[name] * 1e3
        self.drop(name)
        return f"a call took {call:.3g} ms, the original's {self.call_s * 1e3:.3g}"

    def drop(self, name: str) -> None:
        """Takes a candidate out."""
        self.runs.pop(name, None)
        self._calls.pop(name, None)
        self.plain = [other for other in self.plain if other != name]

    def too_small(self) -> autotune.BudgetTooSmall:
        """The error for seconds of the user's that suffice for no candidate."""
        return autotune.BudgetTooSmall(
            f"{self.spending.limit_s:g} s do not suffice to measure any candidate: {self.refused}"
        )

    def medians(
        self, runs: dict[str, Any], watch: quiet.ActivityWatch, *, strict: bool, **options: Any
    ) -> autotune.Medians:
        """Milliseconds by name, with their samples.

        Args:
            runs: What to measure: ``self.runs``, or the same with something around each.
            watch: Of this thread's turn to measure.
            strict: Too little time is an error; else what was compiled is measured all the same, for
                the fewest rounds.
            options: As for ``autotune.measure``.

        Raises:
            autotune.BudgetTooSmall: the seconds do not suffice, and ``strict``.
            quiet.Disturbed: something else ran.
        """
        left_s = max(0.0, self.spending.left_s)
        try:
            return autotune.measure(
                runs,
                budget_s=left_s,
                regardless=not strict,
                plain=self.plain,
                watch=watch,
                **options,
            )
        except autotune.BudgetTooSmall as error:
            raise autotune.BudgetTooSmall(
                f"{error}; compiling and first calls took the rest of {self.spending.limit_s:.3g} s"
            ) from None
