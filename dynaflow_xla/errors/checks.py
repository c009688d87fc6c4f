"""What arguments are, whichever library their type comes from."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from dynaflow_xla.errors import PlanTypeError


def integer(value: Any) -> int | None:
    """The value as ``int`` if it is an integer of any library (NumPy's, an array without axes), else None.

    A truth value is no integer here: ``lanes=True`` is a mistake.
    """
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    if tuple(getattr(value, "shape", ())) != ():
        return None  # an array of one number is a sequence
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except Exception:  # whatever a type's own ``__index__`` raises: a traced value is no integer
        return None


def real(value: Any) -> float | None:
    """The value as ``float`` if it is a number of any library and not "not a number", else None."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    number = float(value)
    return None if math.isnan(number) else number


def items(value: Any) -> tuple[Any, ...] | None:
    """What a value yields (a generator's elements, too); None if it is no several things."""
    try:
        each = iter(value)
    except TypeError:
        return None
    return tuple(each)


def truth(value: Any) -> bool | None:
    """The value as ``bool`` if it is a truth value of any library (an array without axes, too), else None."""
    if isinstance(value, bool):
        return value
    if "bool" not in str(getattr(value, "dtype", "")) or tuple(getattr(value, "shape", ())) != ():
        return None
    return bool(value)


def flag(name: str, value: Any) -> bool:
    """An argument that must be a truth value.

    Raises:
        PlanTypeError: it is none; ``name`` is what the message calls it.
    """
    found = truth(value)
    if found is None:
        raise PlanTypeError(f"{name} must be True or False; got {value!r}")
    return found


def name_of(fn: Any) -> str:
    """The name of what is called: its type's if it has none.

    ``__name__`` may be anything: equinox puts an object of its own there when it builds a module anew.
    """
    name = getattr(fn, "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__
