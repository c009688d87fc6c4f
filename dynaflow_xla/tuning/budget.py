"""What a decision may take, compiling included: in proportion to the original's own first call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from dynaflow_xla.tuning import quiet

EXTRA_S = 1.0
"""Seconds beyond proportion for all decisions of one function together, where calls are short."""

_CALLS, _CALLS_S = 20, 5.0
"""Where so many calls of the original take longer than that, the seconds that they take, or so many seconds:
some calls of each of two ways tell what a gain of a long call is, and few calls more pay for them."""

_MOST_OFF = 8.0
"""One compilation that was oddly fast, from a cache say, or slow changes predictions by this at most."""

SHARE = 40
"""What a decision lacked time for is done once calls took so many times as long as that will take."""

_LONG_S = 3e-3
"""Calls of at least so long are counted: that takes some microseconds of each."""

clock: Callable[[], float] = time.perf_counter
"""What budgets go by."""


@dataclass(frozen=True)
class Later:
    """When to decide once more, and what there is to spend then.

    Attributes:
        calls: After so many calls.
        more_s: Seconds that it may take besides: those that were lacking, or that the first decision took.
        first_s: Seconds of the original's first call, which by then is compiled.
        checks: Whether nothing was lacking, and what was decided is measured a second time.
    """

    calls: int
    more_s: float
    first_s: float
    checks: bool = False


def to_check(took_s: float, call_s: float) -> Later | None:
    """When a decision is measured a second time; None where calls are too short to be counted.

    Args:
        took_s: Seconds of the first decision.
        call_s: Seconds of a call.
    """
    if call_s < _LONG_S:
        return None
    return Later(math.ceil(SHARE * took_s / call_s), took_s, 0.0, checks=True)


class Purse:
    """What is left of the seconds that all decisions of one function share.

    Attributes:
        left_s: Seconds.
        rate: Seconds that compiling a candidate took for a predicted second.
        earned_s: Of what is decided once more, seconds that it may take besides; else 0.
        first_s: Of the same, seconds of the original's first call.
        checks: Whether that measures a second time what is decided.
    """

    def __init__(self, left_s: float = EXTRA_S) -> None:
        self.left_s = self._put_in_s = left_s
        self.rate = 1.0
        self.earned_s = self.first_s = 0.0
        self.checks = False

    def calls_take(self, call_s: float) -> None:
        """Puts in what long calls of the function need to be measured, once for all decisions."""
        wanted = min(_CALLS * call_s, _CALLS_S)
        if wanted > self._put_in_s:
            self.left_s += wanted - self._put_in_s
            self._put_in_s = wanted

    def earned(self, later: Later) -> None:
        """Calls took so long that what they are decided by may take what it lacked."""
        self.earned_s, self.first_s, self.checks = later.more_s, later.first_s, later.checks


class Budget:
    """Seconds that one decision may take beside the original's own first call.

    That first call is made in any case. By default a decision may take as long again, plus what is left
    in the function's purse: so the whole is at most twice the original's time, plus a second, or twenty
    calls if these take longer (up to five seconds).

    Args:
        purse: Of the function.
        asked_s: Seconds that the user gives instead.

    Attributes:
        checks: Whether the decision is made a second time, because its gain is small.
    """

    def __init__(self, purse: Purse, asked_s: float | None = None) -> None:
        self._purse, self._asked_s = purse, asked_s
        self._start = clock()
        self._own_s = self._proportion_s = 0.0
        self._forgotten = False
        self.checks = purse.checks
        self._lacking_s = 0.0

    @property
    def asked(self) -> bool:
        """Whether the user gave it."""
        return self._asked_s is not None

    @property
    def limit_s(self) -> float:
        """Seconds in all."""
        if self._asked_s is not None:
            return self._asked_s
        return self._proportion_s + self._purse.left_s + self._purse.earned_s

    @property
    def rate(self) -> float:
        """Seconds that compiling a candidate of this function took for a predicted second."""
        return self._purse.rate

    @property
    def own_s(self) -> float:
        """Seconds of the original's first call."""
        return self._own_s

    @property
    def anew_s(self) -> float:
        """Seconds that the original's first call took when this was decided before; else 0."""
        return self._purse.first_s

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.limit_s - (clock() - self._start - self._own_s)

    def original(self, took_s: float, at_least_s: float = 0.0, call_s: float = 0.0) -> None:
        """Tells of the original's first call, or of a part of it.

        Args:
            took_s: Its seconds, which do not count.
            at_least_s: What it would take to compile it anew, if it was compiled before.
            call_s: Seconds of a call after it, if that is known.
        """
        self._own_s += took_s
        self._purse.calls_take(call_s)
        self._proportion_s = max(self._own_s, at_least_s, self.anew_s)

    def compiled(self, predicted_s: float, took_s: float) -> None:
        """Tells how long compiling took, for the next prediction."""
        if predicted_s > 0.0:
            rate = self._purse.rate * took_s / predicted_s
            self._purse.rate = min(max(rate, 1 / _MOST_OFF), _MOST_OFF)

    def refuses(self, what: str, seconds: float) -> str:
        """Why something is not done that would take so many seconds, or ""."""
        left = self.left_s
        if seconds <= left:
            return ""
        self._lacking_s += seconds
        return (
            f"{what} would take about {seconds:.2g} s, and {max(left, 0.0):.2g} s are left of "
            f"{self.limit_s:.2g} s: dfx.tune(..., budget_s=...) spends more"
        )

    @property
    def lacked(self) -> bool:
        """Whether something was left out for want of time."""
        return self._lacking_s > 0

    def later(self, call_s: float) -> Later | None:
        """When to decide once more, if time was lacking that nobody limited.

        Args:
            call_s: Seconds of a call.
        """
        if self.asked or not self._lacking_s or call_s < _LONG_S:
            return None
        calls = math.ceil(SHARE * (self.limit_s + self._lacking_s) / call_s)
        return Later(calls, self._lacking_s, self._proportion_s)

    def __enter__(self) -> Budget:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes it; of what was disturbed the purse keeps what it has: what was compiled is there."""
        if kind is not None and issubclass(kind, quiet.Disturbed):
            self.forget()
        self.close()

    def forget(self) -> None:
        """Nothing was decided: the purse keeps what it has."""
        self._forgotten = True

    def close(self) -> None:
        """Takes from the purse what was spent beyond proportion."""
        if self._asked_s is None and not self._forgotten:
            beyond = self._purse.left_s - self.left_s  # what was earned is spent first
            self._purse.left_s = max(0.0, self._purse.left_s - max(0.0, beyond))
        self.end()

    def end(self) -> None:
        """What was earned and not spent is gone, unless nothing was decided."""
        if not self._forgotten:
            self._purse.earned_s = self._purse.first_s = 0.0
            self._purse.checks = False
