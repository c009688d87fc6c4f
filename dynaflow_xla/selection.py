"""Several plans of one function side by side, and a user's function that chooses among them at each call."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynaflow_xla.errors import PlanError, PlanTypeError, checks
from dynaflow_xla.watching import telling

ORIGINAL = "original"
"""The value of a mapping that stands for the original, without a plan."""


class Call:
    """What ``select`` gets of a call.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        context: The mapping given as ``schedule(context=...)``: itself, so what it holds now.
    """

    __slots__ = ("_batch", "args", "context", "kwargs")

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: Mapping[str, Any],
        batch: Callable[[Any, Any], int | None],
    ) -> None:
        self.args, self.kwargs, self.context = args, kwargs, context
        self._batch = batch

    @property
    def batch(self) -> int | None:
        """Rows of the batch, if ``in_axes`` says where it is; else None."""
        return self._batch(self.args, self.kwargs)

    def given(self, args: tuple[Any, ...]) -> Call:
        """The same call with its arguments as the user gave them, where what chooses got them otherwise."""
        return Call(args, {}, self.context, lambda *_: self.batch)


@dataclass(frozen=True)
class Recipe:
    """What was given to ``schedule``.

    Attributes:
        strategies: Strategies by name, None for the original.
        choose: The user's ``select``.
        context: The user's mapping itself.
    """

    strategies: dict[str, Any]
    choose: Callable[[Call], Any]
    context: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"select among {', '.join(self.strategies)}"


def recipe(
    strategy: Any,
    select: Any,
    context: Mapping[str, Any] | None,
    resolve: Callable[[Any], Any],
) -> Recipe | None:
    """What ``strategy=`` and ``select=`` ask for together; None if they ask for one strategy.

    Args:
        strategy: As given to ``schedule``.
        select: As given to ``schedule``.
        context: As given to ``schedule``.
        resolve: From the name of a strategy to the strategy.

    Raises:
        PlanError: one without the other, or something in them cannot be.
    """
    if select is None and not isinstance(strategy, Mapping):
        return None
    if not isinstance(strategy, Mapping):
        raise PlanTypeError(
            "select chooses among several strategies, so strategy must be a mapping of names to "
            f"strategies, such as {{'whole': 'sequential', 'split': dfx.NanoBatch(2)}}; got {strategy!r}"
        )
    if select is None:
        raise PlanTypeError(
            "strategy is a mapping, so something must choose at each call: give select=, a function of the "
            f"call that returns one of {', '.join(map(repr, strategy)) or 'its names'}"
        )
    if not callable(select):
        raise PlanTypeError(f"select must be a function of the call; got {select!r}")
    if not _takes_the_call(select):
        raise PlanTypeError(
            f"select is called with one argument, the call (call.args, call.kwargs, call.batch, "
            f"call.context), and {_where(select)} takes {inspect.signature(select)}"
        )
    if not strategy:
        raise PlanError("strategy must name at least one strategy for select; got an empty mapping")
    for key in strategy:
        if not isinstance(key, str):
            raise PlanTypeError(f"names of strategies for select must be text; got {key!r}")
    made = {
        key: None if isinstance(value, str) and value == ORIGINAL else resolve(value)
        for key, value in strategy.items()
    }
    return Recipe(made, select, {} if context is None else context)


class Selection:
    """Chooses, and counts what ran.

    Args:
        name: Of the function.
        recipe: What to choose among.
        batch: Rows of the batch of a call's arguments, or None.
    """

    def __init__(self, name: str, recipe: Recipe, batch: Callable[[Any, Any], int | None]) -> None:
        self.name, self.recipe = name, recipe
        self.names = tuple(recipe.strategies)
        self._batch = batch
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Sets the counts to nothing."""
        self._calls = dict.fromkeys(self.names, 0)
        self._traced = dict.fromkeys(self.names, 0)
        self._by_value = 0
        self._last = ""

    def answer(self, args: Any, kwargs: Any) -> Any:
        """What ``select`` returns for a call.

        Raises:
            PlanError: it raised.
        """
        choose = self.recipe.choose
        try:
            return choose(Call(args, kwargs, self.recipe.context, self._batch))
        except Exception as error:
            raise PlanError(
                f"{self.name!r}: select ({_where(choose)}) raised {type(error).__name__}: "
                f"{_first_line(error)}"
            ) from error

    def named(self, answer: Any) -> str:
        """The name that an answer means: a name, an index into the mapping, or a truth value for two.

        Raises:
            PlanError: it means none.
        """
        if isinstance(answer, str) and answer in self.recipe.strategies:
            return answer
        index = checks.integer(answer)
        truth = checks.truth(answer)
        if truth is not None and len(self.names) == 2:
            index = int(truth)
        if index is not None and 0 <= index < len(self.names):
            return self.names[index]
        kind = PlanError if isinstance(answer, str) or index is not None else PlanTypeError
        between = ", or a truth value" if len(self.names) == 2 else ""
        raise kind(
            f"{self.name!r}: select ({_where(self.recipe.choose)}) must return one of "
            f"{', '.join(map(repr, self.names))}, an index from 0 to {len(self.names) - 1}{between}; got "
            f"{answer!r}"
        )

    def ran(self, name: str, *, traced: bool = False) -> None:
        """Counts a call, or a program that a plan was traced into."""
        with self._lock:
            (self._traced if traced else self._calls)[name] += 1
            before, self._last = self._last, name
        telling.count("selected")
        if before and before != name:
            telling.count("switches")
            telling.told(
                "plan", f"{self.name}: select chooses {name!r} after {before!r}", logging.DEBUG,
                function=self.name, chosen=name, before=before,
            )  # fmt: skip

    def lowered(self) -> None:
        """Counts a program in which a value decides."""
        with self._lock:
            self._by_value += 1

    def lines(self, name: str, what: Mapping[str, str] | None = None) -> list[str]:
        """For ``explain``.

        Args:
            name: What is chosen now.
            what: What there is to say of each plan.
        """
        made = [f"{self.name}: select chooses {name!r} for these arguments"]
        for each, strategy in self.recipe.strategies.items():
            text = "the original" if strategy is None else repr(strategy)
            parts = [_count(self._calls[each], "call")]
            if self._traced[each]:
                parts.append(f"traced into {_count(self._traced[each], 'program')}")
            if each == self._last:
                parts.append("ran last")
            if what and each in what:
                parts.append(what[each])
            made.append(f"select:   {each}: {text}, {', '.join(parts)}")
        if self._by_value:
            made.append(
                f"select: in {_count(self._by_value, 'program')} a value decides when it runs, which is not "
                "counted"
            )
        return made


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _takes_the_call(select: Callable[..., Any]) -> bool:
    """Whether it can be called with one argument, as far as that is known."""
    try:
        inspect.signature(select).bind(None)
    except ValueError:  # of some builtins nothing is known
        return True
    except TypeError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _where(function: Any) -> str:
    """A function's name with the line where it begins."""
    made = type(function).__dict__.get("__call__")
    code = getattr(function, "__code__", None) or getattr(made, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"
