"""Errors raised by dynaflow_xla. Every one derives from :class:`DynaflowError`.

Each is one of Python's own errors, too, so that a caller who does not know this package catches what
the same mistake raises elsewhere:

    PlanError, RuleError, SeparabilityError   ValueError (bad arguments; of a wrong type: TypeError, too)
    UnsupportedError                          NotImplementedError (of a wrong type: TypeError, too)
    VerificationError                         AssertionError
    EngineError                               RuntimeError (of a step that failed: what it raised, too)

The other side of it: ``except ValueError`` around somebody else's code also catches what this package
raises inside of it. Where that must not be taken for the other's error, ``except DynaflowError: raise``
comes first.
"""

from __future__ import annotations

import functools
from typing import Any


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
    """A scheduled callable returned something else than the original, or than in another run of it.

    Attributes:
        report: What ``debug`` (a ``DebugReport``) and ``check_determinism`` (a ``DeterminismReport``) found
            out; None where results were compared with the original's, which ends at the first that differs.
    """

    report: Any = None


class EngineError(DynaflowError, RuntimeError):
    """The run-time engine failed, or a step failed while it ran."""


def step_failed(text: str, cause: BaseException) -> EngineError:
    """The error for a step that raised: also an error of the step's own kind, with what is noted on it.

    So ``except torch.linalg.LinAlgError`` around a call catches what it catches around the original.
    """
    made = _failed(type(cause), text)
    if type(made) is not EngineError:
        made.__dict__.update(vars(cause))
    return made


def _failed(kind: type[BaseException], text: str) -> EngineError:
    try:
        return _engine_error_of(kind)(text)  # type: ignore[arg-type]
    except Exception:  # classes whose memory differs, or that nobody can make or derive from
        return EngineError(text)


@functools.lru_cache(maxsize=256)
def _engine_error_of(kind: type[BaseException]) -> type[EngineError]:
    plain = issubclass(EngineError, kind) or not issubclass(kind, Exception)
    # In a generator Python takes an error of these for its end.
    if plain or issubclass(kind, StopIteration | StopAsyncIteration):
        return EngineError

    # What the other class does when its errors are made and shown is for its own arguments.
    def begin(self: Any, text: str) -> None:
        Exception.__init__(self, text)

    def show(self: Any) -> str:
        return str(self.args[0])

    def reduce(self: Any) -> Any:
        return _failed, (kind, str(self)), dict(vars(self))

    names = {
        "__doc__": EngineError.__doc__,
        "__module__": __name__,
        "__qualname__": EngineError.__qualname__,
        "__init__": begin,
        "__str__": show,
        "__repr__": lambda self: f"{EngineError.__name__}({str(self)!r})",
        "__reduce__": reduce,
    }
    return type(EngineError.__name__, (EngineError, kind), names)


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
