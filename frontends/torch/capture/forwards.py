"""What a call runs: methods that classes get after a capture, and bodies that run later than the call."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

_FORWARD = operator.attrgetter("forward")


class Forwards:
    """What the classes of a module and of all modules in it have under ``forward``.

    Dynamo guards that a module has no ``forward`` of its own and is of its class, and takes for granted
    that the class stays as it is. Other methods are not looked at, which would be hundreds at each call:
    as under ``torch.compile``, one that is put into a class after a capture is not seen.

    Args:
        original: The module; anything else has none.
    """

    def __init__(self, original: Any) -> None:
        found = original.modules() if isinstance(original, torch.nn.Module) else ()
        classes = dict.fromkeys(map(type, found))
        self._plain = [cls for cls in classes if _FORWARD(cls) is _FORWARD(cls)]
        # What a descriptor makes anew at each look: these take longer to look up.
        self._others = [cls for cls in classes if _FORWARD(cls) is not _FORWARD(cls)]
        self.known = self.now()

    def now(self) -> list[Any]:
        """What they have, to be compared with ``known``."""
        seen = list(map(_FORWARD, self._plain))
        if self._others:
            seen += [inspect.getattr_static(cls, "forward") for cls in self._others]
        return seen


def class_forward(original: Any) -> Any:
    """What a module's class has under ``forward``, as it is there; None for anything else."""
    for cls in type(original).__mro__ if isinstance(original, torch.nn.Module) else ():
        if "forward" in cls.__dict__:
            return cls.__dict__["forward"]
    return None


def why_later(original: Any, name: str) -> str:
    """Why a call's body is no call's: it runs when the result is asked for its values; "" if it is one's."""
    called = original.forward if isinstance(original, torch.nn.Module) else original
    for kind, is_of in _LATER.items():
        if is_of(called) or is_of(inspect.getattr_static(type(called), "__call__", None)):
            return (
                f"{name!r} is {kind}, whose body runs when its values are asked for, not when it is called, "
                "so the original runs. Schedule what computes the values: a function that it calls"
            )
    return ""


_LATER: Mapping[str, Callable[[Any], bool]] = {
    "a generator function (it has a yield)": inspect.isgeneratorfunction,
    "an async function": inspect.iscoroutinefunction,
    "an async generator function": inspect.isasyncgenfunction,
}
