"""What ``Auto`` keeps for one callable: its candidates, what was decided, and what deciding may take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.machine import distance
from dynaflow_xla.strategies import identity
from dynaflow_xla.strategies.auto import on_lanes_only
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.tuning import autotune, budget, quiet
from dynaflow_xla.tuning.choice import Choice
from dynaflow_xla.watching import telling

_MAX_DECISIONS = 1024
_MAX_MET = 4096

UNUSED = 16
"""So many decisions may be for signatures that did not come again; then new ones are decided for later."""

_LOOKS = 16
"""So often it is looked at which signature calls have, where they need no Python."""

_MEASURED_FAR = 3
"""So often a decision is measured while the cores are far from each other; then it stays."""

C = TypeVar("C", bound=Choice)


class Decisions(Generic[C]):
    """The decisions of one callable, by signature.

    Args:
        unmeasured: Makes the decision of which nothing was measured, from the reason.
        most_unused: So many decisions may be for signatures that are not known to have come again. After
            that one is decided for when it comes for the second time: where something is another one at
            every call, a string say, each would pay for a decision and none gain by it.

    Attributes:
        purse: What decisions may still take.
        put_off: Those that something else of the process disturbed.
        changes: How often decisions were made or forgotten.
    """

    def __init__(self, unmeasured: Callable[[str], C], most_unused: int = UNUSED) -> None:
        self.purse = budget.Purse()
        self.put_off = quiet.PutOff()
        self.changes = 0
        self._unmeasured = unmeasured
        self._made: Recent[Any, C] = Recent(_MAX_DECISIONS)
        self._while_far: Recent[Any, tuple[C, int]] = Recent(_MAX_DECISIONS)
        self._calls: Recent[Any, int] = Recent(_MAX_DECISIONS)
        self._checked: Recent[Any, C] = Recent(_MAX_DECISIONS)  # what is measured once more
        self._last: tuple[Any, C, bool] | None = None  # and whether it is known to have come again
        # By what a signature hashes to: two that share a number are decided for a call earlier or later.
        self._unused: Recent[int, bool] = Recent(most_unused)
        self._met: Recent[int, bool] = Recent(_MAX_MET)
        self._warned = False
        self._lock = threading.Lock()
        self._candidates: dict[tuple[int, bool], dict[str, Strategy]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def __contains__(self, signature: Any) -> bool:
        return signature in self._made

    def decided(self, signature: Any) -> C | None:
        """What was decided, or None."""
        last = self._last  # read once: another thread may replace it
        if last is not None and last[2] and last[0] == signature:  # cheaper than a hash
            return last[1]
        with self._lock:  # or a decision that another thread replaces now would come back
            choice = self._made.get(signature)
            if choice is not None:
                if (number := hash(signature)) in self._unused:
                    self._unused.pop(number)
                self._last = (signature, choice, True)
        return choice

    def measured(self, signature: Any) -> C | None:
        """The last decision that was measured, also where it is to be measured once more; else None."""
        with self._lock:
            far, _ = self._while_far.get(signature, (None, 0))
            for choice in (self._made.get(signature), far, self._checked.get(signature)):
                if choice is not None:
                    return choice if choice.medians_ms else None
        return None

    def values(self) -> list[C]:
        """All that was decided."""
        return self._made.values()

    def is_final(self, signature: Any) -> bool:
        """Whether something is decided, and nobody counts calls to decide once more."""
        choice = self._made.get(signature)
        return choice is not None and choice.later is None

    def due(self, signature: Any, choice: C, calls: int = 1) -> bool:
        """Whether to decide once more, and calls took long enough since.

        Args:
            signature: Of a call.
            choice: What is decided for it.
            calls: So many were there since the last one that asked, this one included.
        """
        if choice.later is None:
            return False
        self._calls[signature] = made = self._calls.get(signature, 0) + calls
        return made >= choice.later.calls

    def once_more(self, signature: Any, choice: C) -> None:
        """What is decided is forgotten, and may take what it lacked, or is measured a second time."""
        if choice.later is None:
            return
        with self._lock:
            if self._made.get(signature) is not choice:
                return  # another thread was here
            self._made.pop(signature)
            self._last = None
            self._calls.pop(signature)
            if choice.later.checks or choice.medians_ms:
                self._checked[signature] = choice
            self.purse.earned(choice.later)
            self.changes += 1

    def look_every(self) -> int:
        """After so many calls one should ask whether its decision is due; 0: none has to."""
        waiting = [choice.later.calls for choice in self._made.values() if choice.later is not None]
        return max(1, min(waiting) // _LOOKS) if waiting else 0

    def put(self, signature: Any, choice: C) -> C:
        """Keeps a decision."""
        self.put_off.done(signature)
        self._while_far.pop(signature, None)
        self._checked.pop(signature, None)
        with self._lock:
            self.changes += 1
            self._made[signature] = choice
            self._last = (signature, choice, False)
            self._unused[hash(signature)] = True
        telling.count("decisions")
        telling.told(
            "auto", f"{choice.name} runs; {choice.reason}", chosen=choice.name, reason=choice.reason,
            measured_ms=choice.medians_ms, predicted_ms=choice.predicted_ms, seconds=choice.seconds,
        )  # fmt: skip
        return choice

    def now(
        self,
        signature: Any,
        choose: Callable[[quiet.ActivityWatch], C],
        keep: Callable[[Any, C], C],
        margin: float,
        warn: Callable[[str], None] = telling.fallback,
    ) -> C | None:
        """Decides by measuring, unless something else of this process runs, or it is left for a second call.

        Where it is the cores' distance that a faster way is not chosen for, it is measured again once
        they are near; the original runs until then.

        Args:
            signature: What is decided for.
            choose: Measures.
            keep: Keeps what was decided; it calls ``put``.
            margin: What a faster way has to gain where the cores are near.
            warn: Tells the user once that new signatures are left for a second call.

        Returns:
            The decision; None if it has to wait.
        """
        if self._left(signature):
            if not self._warned:
                self._warned = True
                warn(
                    f"new signatures keep coming: Auto decided for {self._unused.size} that are not known to "
                    "have come again, so for a further one it decides when that comes for the second time. "
                    "Look for what changes from call to call (a string, a static argument, a shape), and "
                    "pass it as an array or tensor, or not at all"
                )
            return None

        def measured(watch: quiet.ActivityWatch) -> C:
            if (made := self.decided(signature)) is not None:  # another thread may have been here
                return made
            checked = self._checked.get(signature)
            if checked is not None and _is_check(checked):
                return keep(signature, _second(checked, choose, watch))
            before, times = self._while_far.get(signature, (None, 0))
            if before is not None and distance.are_far() and distance.may_come_near():
                raise quiet.CoresFar(before.reason)
            try:
                made = choose(watch)
            except autotune.BudgetTooSmall as error:
                made = self._unmeasured(str(error))
            if checked is not None and not made.medians_ms:
                made = _final(checked)  # what it was measured with cannot be measured any more
            elif before and not made.planned and _fastest(before) not in made.medians_ms:
                made = before  # there are no seconds left for more
            elif _may_change(made, margin) and times + 1 < _MEASURED_FAR:
                self.wait_for_near(signature, made, times + 1)
                raise quiet.CoresFar(made.reason)
            return keep(signature, made)

        def give_up(reason: str) -> C:
            before, _ = self._while_far.get(signature, (None, 0))
            checked = self._checked.get(signature)
            if checked is not None and (before is None or _is_check(checked)):
                return keep(signature, _final(checked))
            return keep(signature, before or self._unmeasured(reason))

        with telling.warning_last():
            return self.put_off.decide(signature, measured, give_up)

    def _left(self, signature: Any) -> bool:
        """Whether this call decides nothing, as there were too many signatures that came once."""
        if not self._is_full() or self._met.pop(hash(signature)):
            return False
        self._met[hash(signature)] = True
        return True

    def _is_full(self) -> bool:
        return len(self._unused) >= self._unused.size

    def why_undecided(self, signature: Any) -> str:
        """Why nothing is decided for a signature, as far as that is known; else ""."""
        if why := self.put_off.reason(signature):
            return why
        if not self._is_full():
            return ""
        return (
            f"{self._unused.size} decisions were for signatures that are not known to have come again; the "
            "second call with one decides, and dfx.tune at any time"
        )

    def wait_for_near(self, signature: Any, made: C, times: int) -> None:
        """Keeps what was measured, for the so many-th time, until the cores are near."""
        self._while_far[signature] = made, times

    def waits_for_near(self, signature: Any) -> bool:
        """Whether something is kept so."""
        return len(self._while_far) > 0 and signature in self._while_far

    def candidates(
        self,
        strategy: Any,
        lanes: int,
        *,
        batched: bool,
        reserved: tuple[str, ...],
        wide: bool = False,
    ) -> dict[str, Strategy]:
        """Auto's candidates by name; asked for once, since a strategy may be known by its object only.

        Args:
            strategy: The ``Auto``.
            lanes: As the user asked.
            batched: Whether nano-batches are among them.
            reserved: Names that are no candidate's.
            wide: Whether regions may have all cores.
        """
        key = lanes, batched
        if key not in self._candidates:
            made = strategy.candidates(lanes, batched=batched)
            if not wide:
                made = on_lanes_only(made)
            self._candidates[key] = identity.candidates(made, reserved)
        return self._candidates[key]

    def clear(self) -> None:
        """Forgets candidates and decisions, not what they took."""
        with self._lock:  # or a decision that another thread reads now would come back
            self.changes += 1
            self._made.clear()
            self._last = None
        self._unused.clear()
        self._met.clear()
        self._candidates.clear()
        self._while_far.clear()
        self._calls.clear()
        self._checked.clear()
        self.put_off.clear()


def _second(first: C, choose: Callable[[quiet.ActivityWatch], C], watch: quiet.ActivityWatch) -> C:
    """What is decided the second time; where it does not tell of the first one's choice, that one."""
    try:
        made = choose(watch)
    except autotune.BudgetTooSmall:
        return _final(first)
    return made if first.candidate in made.medians_ms else _final(first)


def _is_check(made: Choice) -> bool:
    return made.later is not None and made.later.checks


def _final(made: C) -> C:
    """The same, which nothing changes any more."""
    return replace(made, unsure=False, later=None)


def _fastest(made: Choice) -> str:
    return min(made.medians_ms, key=lambda name: made.medians_ms[name])


def _may_change(made: Choice, margin: float) -> bool:
    """Whether something else would have been chosen, had the cores been near.

    What a plan gains over the original shrinks then, as the original shares most: who gains too little for
    near cores is out in any case.
    """
    if not made.far or made.planned or not distance.may_come_near():
        return False
    base = made.medians_ms.get(made.candidate or "original", 0.0)
    return min(made.medians_ms.values()) <= (1 - margin) * base
