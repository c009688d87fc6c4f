"""What the public functions know of a frontend and of what it makes, and what all of that has in common."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from dynaflow_xla.debugging.report import DebugReport, DeterminismReport
from dynaflow_xla.errors import DynaflowError, PlanError
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.selection import Selection
from dynaflow_xla.settings import Settings
from dynaflow_xla.timelines.timeline import Timeline
from dynaflow_xla.verification import Report


def stands_at(fn: Any) -> bool:
    """Whether importing a function's qualified name finds the very object, as it does what is decorated.

    Not so for cloudpickle, which pickles functions of a script or of a notebook by value: where these are
    read, the name is another program's.
    """
    name = getattr(fn, "__qualname__", None)
    if not isinstance(name, str) or (fn.__module__ == "__main__" and _pickled_by_value()):
        return False
    found: Any = sys.modules.get(fn.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is fn


def _pickled_by_value() -> bool:
    caller = sys._getframe(2).f_back  # of ``__reduce__``; pickle itself is in C, without a frame
    name = "" if caller is None else caller.f_globals.get("__name__", "")
    return "cloudpickle" in name.split(".")  # Ray and joblib have copies of it among their modules


class PassesOn:
    """What stands in the place of a function, and has the attributes that were put on it, too."""

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.__dict__.get("__wrapped__"), "__dict__", {})
        if name in own and not (name.startswith("__") and name.endswith("__")):
            return own[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class LikeAFunction:
    """What binds like a function, so that methods can be scheduled, and like one is its own copy."""

    def __get__(self: Any, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class Planned(Protocol):
    """One signature of a scheduled callable."""

    @property
    def pg(self) -> PartitionedGraph:
        """Its regions."""

    @property
    def plan(self) -> Plan:
        """Its validated plan."""

    @property
    def streams(self) -> bool:
        """Whether it computes on an accelerator, whose lanes have no cores."""

    @property
    def program_ns(self) -> float:
        """What the framework takes if any region is wide, see ``strategies.base.Context``."""

    @property
    def caller_ns(self) -> float:
        """What one lane may take to run on the thread that calls, see ``strategies.base.Context``."""


class Scheduled(Protocol):
    """What serves one call's arguments inside of a scheduled callable.

    Every method takes the arguments of a call: a tuple and a dictionary.
    """

    def planned(self, args: Any, kwargs: Any) -> Planned:
        """The graph and the plan of these arguments."""

    def beside_the_plan(self, args: Any, kwargs: Any) -> str:
        """What to know of that plan if it is not what a call runs, else ""."""

    def known_costs(self, args: Any, kwargs: Any) -> dict[int, float] | None:
        """Nanoseconds of the plan's regions, if they were measured."""

    def explain(self, args: Any, kwargs: Any, *, deep: bool) -> str:
        """The text of ``dynaflow_xla.explain``; ``deep``: with what the compiler made of the plan."""

    def verify(self, args: Any, kwargs: Any) -> Report:
        """Runs original and scheduled; VerificationError names the first output that differs."""

    def profile(self, args: Any, kwargs: Any) -> Timeline:
        """Runs with time stamps; the measured timeline."""

    def alone(self, args: Any, kwargs: Any, cores: int) -> Timeline | None:
        """The plan's regions measured one after another, on one core or (0) on all; None: it cannot be."""

    def timed(self, args: Any, kwargs: Any, rounds: int) -> tuple[list[int], list[int]]:
        """Nanoseconds of calls on copies, in turns: of the original, and of the plan.

        Raises:
            UnsupportedError: calls have effects that cannot be put back.
        """

    def tune(self, args: Any, kwargs: Any, budget_s: float) -> Any:
        """Measures the candidates within the seconds given, keeps and returns the decision."""

    def debug(self, args: Any, kwargs: Any, rounds: int, seed: int) -> DebugReport:
        """Runs it in other orders and with pauses; VerificationError names the first region that differs."""

    def check_determinism(self, args: Any, kwargs: Any, runs: int) -> DeterminismReport:
        """Calls it several times; VerificationError names the first output that differs."""

    def compile(self, args: Any, kwargs: Any, target: object) -> Any:
        """Compiles for the GPU ``target``, read back as a report; None: the one of ``schedule``."""

    def compiler_options(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The XLA options under which the program has its plan's order."""


class Arguments:
    """Arguments of one function of a ``together``, where it takes some by position and some by keyword.

    Args:
        *args: Positional arguments.
        **kwargs: Keyword arguments.
    """

    __slots__ = ("args", "kwargs")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __repr__(self) -> str:
        parts = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"Arguments({', '.join(parts)})"


@dataclass(frozen=True)
class BoundFunction:
    """A function, and arguments of it that a callable carries along (a model that is called, say)."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One of several functions that make one plan, and which of all arguments are its own.

    Attributes:
        name: What strategies call it.
        function: The function.
        positional: How many of the next arguments it gets by position,
        keywords: and then by which names the next ones.
    """

    name: str
    function: Callable[..., Any]
    positional: int
    keywords: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many arguments it takes."""
        return self.positional + len(self.keywords)

    @property
    def places(self) -> list[str]:
        """What messages call each of these."""
        return [
            f"argument {w!r} of {self.name!r}" for w in (*range(self.positional), *self.keywords)
        ]

    def call(self, flat: Sequence[Any]) -> Any:
        """The function's result for its arguments, one after the other."""
        named = dict(zip(self.keywords, flat[self.positional :], strict=True))
        return self.function(*flat[: self.positional], **named)


class Frontend(Protocol):
    """One framework. Each has a module ``frontend`` with these functions."""

    def schedule(self, fn: Any, settings: Settings) -> Any:
        """The scheduled form of something that belongs to this framework.

        Raises:
            UnsupportedError: the settings ask for what it does not have.
        """

    def serving(self, fast: Any, args: Any, kwargs: Any) -> Scheduled | None:
        """What serves these arguments inside of a callable; None if it is not of this frontend."""

    def unbound(self, fn: Any) -> BoundFunction:
        """A callable without the arguments that it carries along and that have to stay arguments.

        Raises:
            UnsupportedError: it cannot be one of several.
        """

    def combined(self, parts: Sequence[Part]) -> Callable[..., Any]:
        """One function of all arguments, which calls several one after the other: a tuple of results.

        Each operator knows whose it is (``ir.graph.Operator.function``).
        """

    def about(self) -> dict[str, Any]:
        """Its ``version``, ``devices``, and ``gpu``: whether one is among them; for people, too."""

    def cases(self) -> dict[str, Callable[..., Any]]:
        """By name small functions, for trials: those that ``cli.cases`` has arguments for."""

    def works(self) -> dict[str, Callable[..., Any]]:
        """By name functions to measure a machine with, see ``calibration``.

        One for each kind of work that is nothing else; ``pair``: two operators on two arrays; ``chain``: of
        nine operators each on the result of the one before. Where operators have steps that threads share,
        ``steps``: of a recurrent layer, with an input and three weights.
        """

    def example(self, shape: Sequence[int], dtype: str, seed: int) -> Any:
        """An array of random values."""

    def copies(self, tree: Any) -> Any:
        """Arguments with copies of its arrays, which a call may change or take away.

        Raises:
            UnsupportedError: one cannot be copied.
        """

    def wait(self, result: Any) -> None:
        """Returns when a result is there."""

    def opponents(
        self, original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Callable[[], Any]]:
        """By name, calls of a function without a plan that return when the results are there."""


class Chosen:
    """``Scheduled`` for several plans: the one that ``select`` names for these arguments serves them.

    Args:
        selection: What chooses.
        name: What it chose.
        member: What serves the arguments then; None: the original, which has no plan.
        others: By name what would serve them under other plans, where looking at these runs nothing.
    """

    def __init__(
        self,
        selection: Selection,
        name: str,
        member: Scheduled | None,
        others: Mapping[str, Scheduled] | None = None,
    ) -> None:
        self._selection, self._name, self._member = selection, name, member
        self._others = others or {}

    @property
    def _planned(self) -> Scheduled:
        if self._member is None:
            raise PlanError(
                f"{self._selection.name!r}: select chooses {self._name!r} for these arguments, which is the "
                "original: it has no plan"
            )
        return self._member

    def explain(self, args: Any, kwargs: Any, *, deep: bool) -> str:
        """All plans and how often each ran, then the chosen one."""
        made: dict[str, str] = {}
        most, largest = 0, ""
        for name, other in self._others.items():
            try:
                plan = other.planned(args, kwargs).plan
            except DynaflowError as error:
                made[name] = f"not for these arguments: {(str(error).splitlines() or [''])[0]}"
                continue
            made[name] = f"scratch {plan.scratch_bytes} bytes"
            most, largest = max((most, largest), (plan.scratch_bytes, name))
        told = self._selection.lines(self._name, made)
        if most:
            told.append(
                f"select: plans share their scratch: for calls one after another it is that of the largest, "
                f"{largest!r}, {most} bytes"
            )
        lines = "\n".join(told)
        if self._member is None:
            return f"{lines}\nthe original runs: it has no plan"
        return f"{lines}\n{self._member.explain(args, kwargs, deep=deep)}"

    def verify(self, args: Any, kwargs: Any) -> Report:
        """Where the original is chosen nothing can differ."""
        return Report(()) if self._member is None else self._member.verify(args, kwargs)

    def beside_the_plan(self, args: Any, kwargs: Any) -> str:
        """Which one is chosen, and what there is to know of it."""
        aside = self._planned.beside_the_plan(args, kwargs)
        chosen = f"select chooses {self._name!r} for these arguments"
        return f"{chosen}; {aside}" if aside else chosen

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of what is being copied there may be no member yet
            raise AttributeError(name)
        return getattr(self._planned, name)  # the rest is the chosen one's


class Fixed:
    """``Scheduled`` for arguments that stand in another form: those given here take their place.

    Args:
        member: What serves the arguments.
        args: The arguments as it takes them.
        kwargs: Those by keyword.
    """

    def __init__(
        self, member: Scheduled, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._member, self._args, self._kwargs = member, args, dict(kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of what is being copied there may be no member yet
            raise AttributeError(name)
        method = getattr(self._member, name)
        return lambda args, kwargs, *more, **options: method(
            self._args, self._kwargs, *more, **options
        )
