"""What is made for fixed sizes, where sizes may change at every call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

AT_ONCE = 8
"""For so many sizes a program is compiled when they come; for others when they come again."""

MAX_KEPT = 32
"""So many programs are kept: those used last."""

MAX_SEEN = 1024
"""Of so many sizes it is remembered that they came once."""


class ForSizes(Generic[T]):
    """Compiled programs by sizes.

    A sequence that grows by a token has new sizes at every call: to compile for each would cost seconds
    a call, and none would run twice. So the first few sizes get a program when they come, later ones when
    they come for the second time.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._lock = threading.RLock()
        self.made = 0

    def __len__(self) -> int:
        return len(self._kept)

    def kept(self) -> list[T]:
        """All that is there."""
        with self._lock:
            return list(self._kept.values())

    def get(self, key: Hashable, make: Callable[[], T]) -> T | None:
        """What was made for these sizes; None if they came once only and there are many others."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
            if self.made >= AT_ONCE and key not in self._seen:
                self._seen[key] = None
                if len(self._seen) > MAX_SEEN:
                    self._seen.popitem(last=False)
                return None
            found = self._kept[key] = make()
            self.made += 1
            self._seen.pop(key, None)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return found

    def describe(self, what: str) -> str:
        """For ``explain``."""
        return (
            f"sizes may change: {what} for each of the first {AT_ONCE} and for those that come again "
            f"({MAX_KEPT} are kept); sizes that came once only run operator by operator in PyTorch"
        )


def boxed(inputs: Any) -> list[Any]:
    """The inputs as a list of our own; a list of inputs is emptied."""
    given = list(inputs)
    if isinstance(inputs, list):
        inputs.clear()
    return given
