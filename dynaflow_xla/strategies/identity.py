"""When two strategies are one, what each is called, and what of them may stand in a key on disk.

A strategy's text is for people: it may leave out what the strategy does, so nothing is found by it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from dynaflow_xla.errors import PlanError
from dynaflow_xla.strategies.base import Strategy

_PACKAGE = __name__.partition(".")[0]


class _Object:
    """Equal to itself's object only, which it keeps alive: another one never gets its address."""

    __slots__ = ("_held",)

    def __init__(self, held: object) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other._held is self._held

    def __hash__(self) -> int:
        return id(self._held)


def identity(strategy: Strategy) -> Hashable:
    """Equal for what is the same strategy: equal frozen dataclasses of one class, else the same object.

    A class that derives from a frozen dataclass and is none itself may hold more than the fields that
    its base compares.
    """
    return (type(strategy), strategy) if _has_value(strategy) else _Object(strategy)


def _has_value(strategy: Strategy) -> bool:
    parameters = vars(type(strategy)).get("__dataclass_params__")
    if parameters is None or not (parameters.frozen and parameters.eq):
        return False
    try:
        hash(strategy)
    except TypeError:  # a field is a list, say, which may change
        return False
    return True


def named(strategies: Iterable[Any], taken: Iterable[str] = ()) -> dict[str, Strategy]:
    """Each strategy under its text; another one with the same text gets a number behind it.

    Args:
        strategies: What is the same as an earlier one (``identity``) is left out.
        taken: Names that none gets.

    Raises:
        PlanError: something is no strategy.
    """
    made: dict[str, Strategy] = {}
    seen: set[Hashable] = set()
    reserved = set(taken)
    for strategy in strategies:
        if not isinstance(strategy, Strategy):
            raise PlanError(f"candidates must be dynaflow_xla.Strategy objects; got {strategy!r}")
        key = identity(strategy)
        if key in seen:
            continue
        seen.add(key)
        text = name = repr(strategy)
        number = 1
        while name in made or name in reserved:
            number += 1
            name = f"{text} #{number}"
        made[name] = strategy
    return made


def candidates(strategies: Any, taken: Iterable[str] = ()) -> dict[str, Strategy]:
    """What ``Auto.candidates`` returned, by name.

    Raises:
        PlanError: there are none, something is no strategy, or it is an ``Auto`` itself.
    """
    given = list(strategies) if isinstance(strategies, Iterable) else []
    made = named(given, taken)
    choosing = [name for name, one in made.items() if hasattr(one, "candidates")]
    if not made or choosing:
        raise PlanError(
            "candidates() must return at least one strategy, and none that chooses itself; got "
            f"{strategies!r}"
        )
    return made


def on_disk(strategies: Iterable[Strategy], user: Mapping[str, Any]) -> tuple[str, ...] | None:
    """What a key on disk holds of strategies, or None if it cannot hold all that they are.

    That is the class, what is written in it, and the values of its fields. An object without such
    values, a class made in a function, or a strategy that may look at a context which has no lasting
    text, would be mistaken for another one in a later process.

    Args:
        strategies: In their order.
        user: The user's context: a strategy outside this package may look at all of it, those of this
            package at what ``weights`` and ``boundaries`` name.
    """
    made: list[str] = []
    for strategy in strategies:
        text = _lasting(strategy)
        if text is None:
            return None
        if looks := _looked_at(strategy, user):
            context = _lasting(looks[0])
            if context is None:
                return None
            text += f" given {context}"
        made.append(text)
    return tuple(made)


def _looked_at(strategy: Strategy, user: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What of the context a strategy may look at; [] for nothing."""
    if not ours(type(strategy)):
        return [dict(user)]
    keys = [getattr(strategy, name, None) for name in ("weights", "boundaries")]
    named = {key: user.get(key) for key in keys if isinstance(key, str)}
    return [named] if named else []


def ours(cls: type) -> bool:
    """Whether a class is of this package."""
    return cls.__module__.partition(".")[0] == _PACKAGE


def _lasting(value: Any) -> str | None:
    """A text that equal values have in every process, and no others; None if there is none."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return f"{type(value).__name__}:{value!r}"
    if type(value) in (tuple, list):
        return _joined(type(value).__name__, [_lasting(v) for v in value])
    if type(value) in (set, frozenset):
        texts = [_lasting(v) for v in value]
        return _joined("set", texts if None in texts else sorted(map(str, texts)))
    if type(value) is dict:
        pairs = [_joined("", [_lasting(k), _lasting(v)]) for k, v in value.items()]
        return _joined("dict", pairs if None in pairs else sorted(map(str, pairs)))
    if isinstance(value, type):
        return _class_text(value)
    cls = _class_text(type(value))
    if cls is None:
        return None
    if isinstance(value, enum.Enum):
        return f"{cls}.{value.name}"
    if isinstance(value, Strategy) and not _has_value(value):
        return None
    parameters = vars(type(value)).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        return None
    fields = [_lasting(getattr(value, f.name)) for f in dataclasses.fields(value)]
    return _joined(cls, fields)


def _joined(what: str, texts: Iterable[str | None]) -> str | None:
    found = list(texts)
    if None in found:
        return None
    return f"{what}({', '.join(f'{len(str(t))} {t}' for t in found)})"


def _class_text(cls: type) -> str | None:
    """A class by its name and what is written in it and its bases; None if it was made in a function."""
    if "<locals>" in cls.__qualname__:
        return None
    texts = [f"{cls.__module__}.{cls.__qualname__}"]
    for base in cls.__mro__:
        if base.__module__ in ("builtins", "enum", "typing", "abc") or ours(base):
            continue
        try:
            texts.append(hashlib.sha256(inspect.getsource(base).encode()).hexdigest()[:16])
        except (OSError, TypeError):
            return None
    return "/".join(texts)
