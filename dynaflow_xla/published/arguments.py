"""What arguments of published strategies have to be: checked here, so that a file holds a strategy alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dynaflow_xla.errors import PlanError, PlanTypeError, checks
from dynaflow_xla.strategies.base import Strategy

Check = Callable[[str, Any], None]
"""Gets what is checked, for the message, and the value."""


def checked(cls: type[Strategy], **arguments: Check) -> None:
    """Has a strategy look at its arguments.

    Args:
        cls: A data class.
        arguments: By name of the argument what it has to be.
    """
    make = cls.__init__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for name, check in arguments.items():
            check(f"{cls.__name__}: {name}", getattr(self, name))

    cls.__init__ = init  # type: ignore[method-assign]


def at_least(least: int, *, optional: bool = False) -> Check:
    """That it is an integer and no less; None, too, if it is optional."""

    def check(what: str, given: Any) -> None:
        if optional and given is None:
            return
        made = checks.integer(given)
        if made is None or made < least:
            kind = PlanTypeError if made is None else PlanError
            raise kind(f"{what} must be an integer >= {least}; got {given!r}")

    return check


def kernel(*, optional: bool = False) -> Check:
    """That it can be called; None, too, if it is optional."""

    def check(what: str, given: Any) -> None:
        if not callable(given) and not (optional and given is None):
            raise PlanTypeError(
                f"{what} must be a function from a region's inputs to its outputs, or a dfx.CudaKernel; got "
                f"{given!r}"
            )

    return check


def text(meaning: str) -> Check:
    """That it is a text, which is ``meaning``."""

    def check(what: str, given: Any) -> None:
        if not isinstance(given, str):
            raise PlanTypeError(f"{what} must be {meaning}; got {given!r}")

    return check
