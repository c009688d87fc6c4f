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


def optional(check: Check) -> Check:
    """The same, or None."""
    return lambda what, given: None if given is None else check(what, given)


def at_least(least: int) -> Check:
    """That it is an integer and no less."""

    def check(what: str, given: Any) -> None:
        made = checks.integer(given)
        if made is None or made < least:
            kind = PlanTypeError if made is None else PlanError
            raise kind(f"{what} must be an integer >= {least}; got {given!r}")

    return check


def kernel(what: str, given: Any) -> None:
    """That it can be called."""
    if not callable(given):
        raise PlanTypeError(
            f"{what} must be a function from a region's inputs to its outputs, or a dfx.CudaKernel; got "
            f"{given!r}"
        )


def text(meaning: str) -> Check:
    """That it is a text, which is ``meaning``."""

    def check(what: str, given: Any) -> None:
        if not isinstance(given, str):
            raise PlanTypeError(f"{what} must be {meaning}; got {given!r}")

    return check
