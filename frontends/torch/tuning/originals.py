"""Calls whose plan is the original program: from the second one on they run the original itself.

A plan whose regions all have all cores, in program order, does what the original does. What is around it,
guards of the capture and Python between regions, makes it some percent slower where operators are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.frontends.torch._compat import modes
from dynaflow_xla.frontends.torch.native.entry import NativeEntry
from dynaflow_xla.frontends.torch.tuning import call_signature
from dynaflow_xla.strategies.base import Strategy
from dynaflow_xla.strategies.sequential import Sequential

_MAX_SIGNATURES = 1024


class SameAsOriginal:
    """Which calls of one callable have such a plan, by their signatures.

    Only the first call of a signature runs its regions; so does one that a profiler of PyTorch's looks at,
    which then sees their names, and one under hooks on saved tensors (``Core``).

    Args:
        strategy: What plans them.
    """

    def __init__(self, strategy: Strategy) -> None:
        # Others may decide otherwise for other sizes, and for a backward.
        self._one_after_another = type(strategy) is Sequential
        self._known: Recent[Any, bool] = Recent(_MAX_SIGNATURES)
        self._last: Any = None

    def any(self) -> bool:
        """Whether there are such calls at all."""
        return self._last is not None

    def has(self, signature: Any) -> bool:
        """Whether a call may run the original in place of its plan."""
        if signature != self._last:  # that is cheaper than a hash
            if not self._known.get(self._key(signature), False):
                return False
            self._last = signature
        return not modes.profiler_enabled()

    def learn(self, ran: Sequence[Any], original: Any, args: Any, kwargs: Any) -> None:
        """After a call: notes its signature if all that it ran is the original program."""
        if ran and all(self._stays_original(entry) for entry in ran):
            signature = call_signature.of(original, args, kwargs)
            self._known[self._key(signature)] = True
            self._last = signature

    def _stays_original(self, entry: Any) -> bool:
        """Whether a graph's plan is the original program, and so is that of its backward, if it has one."""
        if not _is_original(entry) or entry.kind == "inference":
            return _is_original(entry)
        # That of the backward is made when the first backward runs; until then it is None.
        backward = entry.backward if entry.later is None else entry.later()
        return self._one_after_another if backward is None else _is_original(backward)

    def _key(self, signature: Any) -> Any:
        return call_signature.without_sizes(signature) if self._one_after_another else signature


def _is_original(entry: Any) -> bool:
    return isinstance(entry, NativeEntry) and entry.is_original
