"""Errors raised by dynaflow_xla. Every one derives from :class:`DynaflowError`.

Each is one of Python's own errors, too, so that a caller who does not know this package catches what
the same mistake raises elsewhere:

    PlanError, RuleError, SeparabilityError   ValueError (bad arguments; of a wrong type: TypeError, too)
    UnsupportedError                          NotImplementedError (of a wrong type: TypeError, too)
    VerificationError                         AssertionError
    EngineError                               RuntimeError

The other side of it: ``except ValueError`` around somebody else's code also catches what this package
raises inside of it. Where that must not be taken for the other's error, ``except DynaflowError: raise``
comes first.
"""

from __future__ import annotations


class DynaflowError(Exception):
    """Base class of every error that dynaflow_xla raises on purpose."""


class PlanError(DynaflowError, ValueError):
    """A plan or a strategy breaks a rule (forgotten region, missing wait, lane out of range, ...)."""


class PlanTypeError(PlanError, TypeError):
    """An argument of ``schedule``, of a strategy or of a kernel is of a wrong type."""


class RuleError(DynaflowError, ValueError):
    """A partition rule is malformed, matches nothing, or contradicts another rule."""


class RuleTypeError(RuleError, TypeError):
    """A partition rule, or what it is made of, is of a wrong type."""


class SeparabilityError(DynaflowError, ValueError):
    """A function cannot be split over the requested axis without changing its meaning."""


class UnsupportedError(DynaflowError, NotImplementedError):
    """A feature, value or transformation is outside what the chosen backend can do."""


class UnsupportedTypeError(UnsupportedError, TypeError):
    """What was given is nothing that this function takes."""


class VerificationError(DynaflowError, AssertionError):
    """A scheduled callable returned something else than the original."""


class EngineError(DynaflowError, RuntimeError):
    """The run-time engine failed, or a step failed while it ran."""


def bad_argument(got: object, kind: type | tuple[type, ...], text: str) -> PlanError:
    """The error for an argument that must be of some kind and hold more; a ``TypeError`` if it is not."""
    return PlanError(text) if _is_a(got, kind) else PlanTypeError(text)


def bad_rule(got: object, kind: type | tuple[type, ...], text: str) -> RuleError:
    """As :func:`bad_argument`, for rules and marks."""
    return RuleError(text) if _is_a(got, kind) else RuleTypeError(text)


def _is_a(got: object, kind: type | tuple[type, ...]) -> bool:
    # Nobody who writes True means a number.
    return isinstance(got, kind) and not isinstance(got, bool)


class FallbackWarning(UserWarning):
    """Something runs in a slower or plainer way than asked for; ``explain()`` says the same."""
