"""Operators that may not share a region: those that run once beside those of each nano-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Phases:
    """In which order operators that run once, and those of each nano-batch, follow each other.

    Attributes:
        of: Operator -> its phase. A value that is put together, or cut, goes to a later one; a region
            holds operators of one phase.
        once: Operator that runs once, on all rows -> why.
        copies: Such an operator -> operators that it needs on all rows, too, although these run in each
            nano-batch: its region repeats them.
    """

    of: Mapping[int, int] = field(default_factory=dict)
    once: Mapping[int, str] = field(default_factory=dict)
    copies: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def phase(self, op: int) -> int:
        """The phase of an operator."""
        return self.of.get(op, 0)

    def repeatable(self, op: int, reader: int) -> bool:
        """Whether the region of ``reader`` may repeat ``op`` for itself."""
        return self.phase(op) == self.phase(reader) or (reader in self.once and op not in self.once)


ONE_PHASE = Phases()
