"""A dictionary of what was used last: every cache that lives as long as an object or module is one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar, overload

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")

_NOTHING: Any = object()


class Recent(Generic[K, V]):
    """Keeps the entries that were read or written last; several threads may use it.

    Args:
        size: At most so many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: T) -> V | T: ...
    def get(self, key: K, default: T | None = None) -> V | T | None:
        """What is kept under a key, which counts as a use; else the default."""
        with self._lock:
            value = self._kept.get(key, _NOTHING)
            if value is _NOTHING:
                return default
            self._kept.move_to_end(key)
            return value  # type: ignore[no-any-return]

    def __getitem__(self, key: K) -> V:
        with self._lock:
            value = self._kept[key]
            self._kept.move_to_end(key)
            return value

    def __setitem__(self, key: K, value: V) -> None:
        with self._lock:
            self._put(key, value)

    def setdefault(self, key: K, value: V) -> V:
        """What is kept under a key; the value, kept from now on, where there is nothing."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            self._put(key, value)
            return value

    def _put(self, key: K, value: V) -> None:
        self._kept[key] = value
        self._kept.move_to_end(key)
        while len(self._kept) > self.size:
            self._kept.popitem(last=False)

    def pop(self, key: K, default: T | None = None) -> V | T | None:
        """Removes an entry and gives it."""
        with self._lock:
            return self._kept.pop(key) if key in self._kept else default

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[K]:
        with self._lock:
            return iter(list(self._kept))

    def values(self) -> list[V]:
        """What is kept, the one used last at the end."""
        with self._lock:
            return list(self._kept.values())

    def items(self) -> list[tuple[K, V]]:
        """What is kept with its keys, the one used last at the end."""
        with self._lock:
            return list(self._kept.items())

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._kept.clear()
