"""What ``Auto`` decided for one signature, and how that is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, TypeVar

from dynaflow_xla.errors import PlanError, bad_argument, checks
from dynaflow_xla.ir.graph import Region
from dynaflow_xla.machine import distance
from dynaflow_xla.strategies.auto import Auto
from dynaflow_xla.tuning import autotune, budget, quiet
from dynaflow_xla.tuning.autotune import RegionCosts, the
from dynaflow_xla.watching import telling

T = TypeVar("T")
C = TypeVar("C", bound="Choice")

_SURE = 0.75
"""What takes less than this share of the original's time is not measured a second time."""

_HERE = ("child", "candidate", "later")
"""Fields of a decision that are this process's own, or have another name on disk."""


@dataclass(frozen=True)
class Choice:
    """What Auto decided for one signature.

    Attributes:
        child: What is called, scheduled under the chosen strategy; None for the original.
        reason: One sentence.
        medians_ms: Candidate -> milliseconds (``rounds.typical``); empty if nothing was measured.
        predicted_ms: Candidate -> milliseconds that the simulator expects.
        left_out: Candidate -> why it was not measured.
        seconds: What the decision took.
        costs: Measured costs of regions, if ``dfx.tune`` decided and measured them.
        candidate: What was chosen, by name: a candidate, or a way to run the original.
        memory: What a call of the original takes from the system each time, where that is much; else "".
        far: Whether the two cores were far from each other when it was measured, see ``machine.distance``.
        unsure: Whether its gain is so small that it is measured a second time, at another moment.
        later: When it is decided once more: because of that, or if what is not measured was left out for
            want of time.
    """

    child: Any
    reason: str
    medians_ms: dict[str, float] = field(default_factory=dict)
    predicted_ms: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    costs: RegionCosts | None = None
    candidate: str = ""
    memory: str = ""
    far: bool = False
    unsure: bool = False
    later: budget.Later | None = None

    @property
    def planned(self) -> bool:
        """Whether what runs has a plan."""
        return self.child is not None and getattr(self.child, "plans", True)

    @property
    def name(self) -> str:
        """What runs: "original" or the candidate."""
        return "original" if self.child is None else self.candidate or "a candidate"

    def lines(self) -> list[str]:
        """The decision, for ``explain``."""
        lines = [f"auto: {the(self.name)} runs; {self.reason}"]
        for candidate in dict.fromkeys([*self.medians_ms, *self.predicted_ms, *self.left_out]):
            parts = []
            if candidate in self.predicted_ms:
                parts.append(f"predicted {self.predicted_ms[candidate]:.3g} ms")
            if candidate in self.medians_ms:
                parts.append(f"measured {self.medians_ms[candidate]:.3g} ms")
            if candidate in self.left_out:
                parts.append(f"not measured: {self.left_out[candidate]}")
            lines.append(f"auto:   {candidate}: {', '.join(parts)}")
        if self.later is not None and self.later.checks:
            lines.append(
                f"auto: so small a gain is measured a second time, which decides: after {self.later.calls} "
                "calls like this"
            )
        elif self.later is not None:
            lines.append(
                "auto: what there was no time for is measured once calls took "
                f"{budget.SHARE} times as long as that will: after {self.later.calls} calls like this"
            )
        if self.memory:
            lines.append(f"auto: {self.memory}")
        if self.medians_ms:
            costs = "estimated" if self.costs is None else "measured"
            lines.append(
                f"auto: the decision took {self.seconds:.2f} s; predictions use {costs} costs of regions"
            )
        return lines


def beside_the_plan(choice: Choice | None, shown: Any) -> str:
    """A sentence for a plan that is shown though a call runs something else, else "".

    Args:
        choice: What was decided; None: nothing yet.
        shown: The strategy whose plan is shown.
    """
    if choice is not None and choice.planned:
        return ""
    what = "nothing is decided yet" if choice is None else f"{the(choice.name)} runs"
    return f"{what}: this is the plan of {shown!r}, a candidate of Auto's, which does not run"


def what_runs(name: str, choice: Choice | None, why: str, meanwhile: str = "original") -> list[str]:
    """What a call runs under ``Auto``, for ``explain``.

    Args:
        name: Of the function.
        choice: What was decided; None: nothing yet.
        why: Nothing is.
        meanwhile: Name of what runs then.
    """
    if choice is not None:
        return [f"{name}: {the(choice.name)} runs", *choice.lines()]
    return [f"{name}: {the(meanwhile)} runs, as nothing is decided yet for these arguments ({why})"]


def too_small(regions: Iterable[Region], strategy: Auto) -> str:
    """Why no plan of these regions is measured, or ""."""
    total_ns = sum(region.cost_ns for region in regions)
    if total_ns >= strategy.min_cost_ns:
        return ""
    return (
        f"estimated work {total_ns / 1e3:.0f} us is under {strategy.min_cost_ns / 1e3:.0f} us: "
        "hand-offs would cost more than overlap gains"
    )


def from_disk(key: str | None, child: Callable[[str], Any], made: type[C]) -> C | None:
    """A decision that an earlier process kept; None without one.

    One that was measured while the cores were far from each other holds for processes that find them so.

    Args:
        key: Its name on disk, if it has one.
        child: By a candidate's name what is called then.
        made: The frontend's class of decisions.
    """
    cached = autotune.load(key) if key else None
    if cached is None or (cached["far"] and not distance.are_far()):
        return None
    name, reason = cached.pop("choice"), cached.pop("reason")
    telling.count("decisions_from_disk")
    later = None
    if cached["unsure"]:
        later = budget.to_check(cached["seconds"], cached["medians_ms"].get(name, 0.0) / 1e3)
    return made(child(name), f"cached: {reason}", **cached, candidate=name, later=later)


def checked_later(choice: C, baseline: str, spending: budget.Budget) -> C:
    """The same decision; where its gain is small, with when it is measured a second time.

    Cores and memory that are shared are faster at one moment than at another, for seconds: of a gain
    of some per cent, rounds at one moment do not tell whether it is there at others.

    Args:
        choice: A candidate that beat the baseline.
        baseline: The original, or what one would run instead.
        spending: What the decision was made with. What the user gave is all that it may take.
    """
    took_ms = choice.medians_ms[choice.candidate]
    small = took_ms > _SURE * choice.medians_ms[baseline]
    if spending.asked or spending.checks or not small:
        return choice
    return replace(choice, unsure=True, later=budget.to_check(choice.seconds, took_ms / 1e3))


def to_disk(key: str | None, choice: Choice) -> None:
    """Keeps a decision that was measured for later processes.

    One that was measured while the cores were far from each other takes the place of none that was not.
    """
    known = autotune.load(key) if key and choice.far else None
    if key and (known is None or known["far"]):
        decision = {f.name: getattr(choice, f.name) for f in fields(choice) if f.name not in _HERE}
        autotune.store(key, {"choice": choice.candidate, **decision})


def instead_of(before: C | None, made: C, name: str) -> C:
    """What holds after ``dfx.tune``: what it made, unless that measured nothing and what was before did.

    Args:
        before: What was decided by measuring before; None: nothing.
        made: What is decided now.
        name: Of the function.
    """
    if before is None or made.medians_ms:
        return made
    telling.fallback(
        f"tune measured nothing of {name!r} ({made.reason}); what was measured before stays: "
        f"{the(before.name)} runs"
    )
    return before


def tuned(strategy: Any, budget_s: Any, choose: Callable[[quiet.ActivityWatch], T]) -> T:
    """Decides within the user's seconds, while nothing else of this process is measured.

    Args:
        strategy: Of the function.
        budget_s: Seconds, as given.
        choose: Decides.

    Raises:
        PlanError: there is nothing to choose, or the seconds are no such.
    """
    if not isinstance(strategy, Auto):
        raise PlanError(
            f"tune measures Auto's candidates; this function has {strategy!r}: schedule it with "
            "strategy='auto'"
        )
    seconds = checks.real(budget_s)
    if seconds is None or not seconds > 0:
        raise bad_argument(
            budget_s, Real, f"budget_s must be a positive number of seconds; got {budget_s!r}"
        )
    with telling.warning_last(), quiet.turn(wait_s=seconds) as watch:
        return choose(watch)
