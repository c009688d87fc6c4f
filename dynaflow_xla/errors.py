"""Errors raised by dynaflow_xla. Every one derives from :class:`DynaflowError`."""

from __future__ import annotations


class DynaflowError(Exception):
    """Base class of every error that dynaflow_xla raises on purpose."""


class PlanError(DynaflowError):
    """A plan or a strategy breaks a rule (forgotten region, missing wait, lane out of range, ...)."""


class RuleError(DynaflowError):
    """A partition rule is malformed, matches nothing, or contradicts another rule."""


class SeparabilityError(DynaflowError):
    """A function cannot be split over the requested axis without changing its meaning."""


class UnsupportedError(DynaflowError):
    """A feature, value or transformation is outside what the chosen backend can do."""


class VerificationError(DynaflowError):
    """A scheduled callable returned something else than the original."""


class EngineError(DynaflowError):
    """The run-time engine failed, or a step failed while it ran."""


class FallbackWarning(UserWarning):
    """Something runs in a slower or plainer way than asked for; ``explain()`` says the same."""
