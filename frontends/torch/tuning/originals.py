"""Calls whose plan is the original program: from the second one on they run the original itself.

A plan whose regions all have all cores, in program order, does what the original does. What is around it,
guards of the capture and Python between regions, makes it some percent slower where operators are short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.frontends.torch._compat import modes
from dynaflow_xla.frontends.torch.native.entry import NativeEntry
from dynaflow_xla.frontends.torch.tuning import call_signature
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.strategies.sequential import Sequential

_MAX_SIGNATURES = 1024


class SameAsOriginal:
    """Which calls of one callable have such a plan.

    Only the first call of a signature runs its regions; so does one that a profiler of PyTorch's looks at,
    which then sees their names.

    Args:
        original: The callable.
        strategy: What plans it.
    """

    def __init__(self, original: Callable[..., Any], strategy: Strategy) -> None:
        self._original = original
        self._any_size = type(strategy) is Sequential  # others may decide otherwise for other sizes
        self._known: Recent[Any, bool] = Recent(_MAX_SIGNATURES)

    def has(self, args: Any, kwargs: Any) -> bool:
        """Whether a call with these arguments may run the original in place of its plan."""
        if not self._known or modes.profiler_enabled():
            return False
        return self._known.get(self._key(args, kwargs), False)

    def learn(self, ran: Sequence[Any], args: Any, kwargs: Any) -> None:
        """After a call: notes its signature if all that it ran is the original program."""
        if ran and all(map(_is_original, ran)):
            self._known[self._key(args, kwargs)] = True

    def _key(self, args: Any, kwargs: Any) -> Any:
        signature = call_signature.of(self._original, args, kwargs)
        return call_signature.without_sizes(signature) if self._any_size else signature


def _is_original(entry: Any) -> bool:
    """Whether a graph's plan is the original program, and so is that of its backward, if it has one."""
    if not isinstance(entry, NativeEntry) or not entry.is_original:
        return False
    if entry.kind == "inference":
        return True
    # That of the backward is made when the first backward runs.
    backward = entry.backward if entry.later is None else entry.later()
    return backward is not None and _is_original_alone(backward)


def _is_original_alone(entry: Any) -> bool:
    return isinstance(entry, NativeEntry) and entry.is_original
