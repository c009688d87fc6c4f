"""Which calls of a function, alone, run programs with compiler options of their plan's own.

Compiler options are a program's. So a function whose plans differ in them has several programs for calls that
are not a part of something larger, and each knows which signatures are its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from dynaflow_xla.caches.recent import Recent

T = TypeVar("T")

Key = tuple[tuple[str, Any], ...]

_MAX_SIGNATURES = 1024


class OtherProgram(Exception):
    """A program is traced for a signature that is another one's."""


def key_of(options: Mapping[str, Any]) -> Key:
    """What is equal for options that make one program."""
    return tuple(sorted(options.items()))


class OwnOptions:
    """The compiler options of signatures' plans.

    Args:
        find: Finds the options of arguments' plan.
        signature: What names the arguments; TypeError: nothing does.
    """

    def __init__(
        self,
        find: Callable[[Any, Any], Mapping[str, Any]],
        signature: Callable[[Any, Any], Hashable],
    ) -> None:
        self._find, self._signature = find, signature
        self._options: Recent[Hashable, tuple[Mapping[str, Any], int]] = Recent(_MAX_SIGNATURES)
        self._generation = 0
        self._here = threading.local()

    def of(self, args: Any, kwargs: Any) -> Mapping[str, Any]:
        """The options of these arguments' program; none: it is the one without."""
        return self.known(args, kwargs)[0]

    def renew(self) -> None:
        """Signatures that are met from now on have programs of their own.

        JAX runs in Python, for ever, what a jitted function raised for when it was first called with it.
        """
        self._generation += 1

    def known(self, args: Any, kwargs: Any) -> tuple[Mapping[str, Any], int]:
        """The options, and how often ``renew`` was called before these arguments were met."""
        try:
            signature = self._signature(args, kwargs)
            known = self._options.get(signature)
        except (TypeError, OverflowError):
            return (
                {},
                0,
            )  # no hash, or a number that is too large: JAX's own error comes with the call
        if getattr(self._here, "anew", False):
            return self._find(args, kwargs), self._generation
        if known is None:
            known = self._options[signature] = self._find(args, kwargs), self._generation
        return known

    @property
    def alike(self) -> bool:
        """Whether one program serves all signatures that were met."""
        return len({(key_of(options), number) for options, number in self._options.values()}) == 1

    def check(self, args: Any, kwargs: Any, key: Key) -> None:
        """Raises ``OtherProgram`` if these arguments' plan is not for the program that is being traced.

        Args:
            args: Tracers.
            kwargs: Tracers.
            key: Of the program's options.
        """
        if key_of(self._find(args, kwargs)) != key:
            raise OtherProgram

    def again(self, call: Callable[[], T]) -> T:
        """Calls; once more if JAX's settings, and with them plans, have changed since signatures were met.

        They may be this thread's only: what it does then is nobody else's to find.
        """
        try:
            return call()
        except OtherProgram:
            self.clear()
            self._here.anew = True
            try:
                return call()
            finally:
                self._here.anew = False

    def clear(self) -> None:
        """Forgets all signatures."""
        self._options.clear()
