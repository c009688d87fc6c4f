"""What stands around a function that can be scheduled: another library's jit, arguments bound to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from dynaflow_xla.errors import checks

Axes: TypeAlias = tuple[Any, Any]
"""``in_axes`` and ``out_axes``."""


def array_copies(tree: Any) -> Any:
    """The same tree with arrays of its own, which a call may take."""
    return jax.tree_util.tree_map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


def same(tree: Any) -> Any:
    """The tree."""
    return tree


@dataclass(frozen=True)
class Wrapper:
    """A callable that makes of each call one of a function inside.

    Attributes:
        name: What it is, for messages.
        inside: The function to schedule.
        around: Makes the callable with another function in the place of ``inside``.
        axes: From the user's axes to those of ``inside``.
        copies: Arguments with memory of their own: what a call does to them stays there.
        values: What is compared of results and arguments: a tree of arrays and constants.
        compares: Calls are compared at this level, with the arguments that ``around`` takes.
    """

    name: str
    inside: Callable[..., Any]
    around: Callable[[Any], Callable[..., Any]]
    axes: Callable[[Any, Any], Axes]
    copies: Callable[[Any], Any] = array_copies
    values: Callable[[Any], Any] = same
    compares: bool = True

    @property
    def label(self) -> str:
        """A name for what is inside."""
        return checks.name_of(self.inside)


class Seat:
    """The place inside a wrapper; for a moment something else may sit there.

    Args:
        fn: Who sits there.
    """

    def __init__(self, fn: Any) -> None:
        self._fn = fn
        self._now = threading.local()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls who sits there."""
        other = getattr(self._now, "other", None)
        if other is None:
            return self._fn(*args, **kwargs)
        self._now.other = None
        return other(*args, **kwargs)

    @contextlib.contextmanager
    def next_call(self, fn: Callable[..., Any]) -> Iterator[None]:
        """A block in which this thread's next call goes to ``fn``."""
        self._now.other = fn
        try:
            yield
        finally:
            self._now.other = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fn, name)
