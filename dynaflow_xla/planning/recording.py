"""What a strategy decided, in order: the input of plan building."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dynaflow_xla.ir.graph import Source


@dataclass(frozen=True)
class Decision:
    """One ``execute``: region, lane (-1: in the outer program, on all cores), replacement, user's line.

    ``group``: regions run as one batch, ``region`` the first of them; () for one alone.
    """

    region: int
    lane: int
    group: tuple[int, ...] = ()
    replace: Callable[..., Any] | None = None
    source: Source | None = None


@dataclass(frozen=True)
class Recording:
    """A strategy's decisions in order, and sentences for ``explain``.

    ``widths``: cores of the lanes for which the strategy said it; the others have what lanes have anyway.
    """

    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = ()
    widths: Mapping[int, int] = field(default_factory=dict)

    def groups(self) -> list[tuple[int, ...]]:
        """Regions that run as one batch."""
        return [d.group for d in self.decisions if d.group]

    def renumbered(self, new: Mapping[int, int]) -> Recording:
        """The same for a graph in which regions have other ids."""
        decisions = tuple(replace(d, region=new[d.region]) for d in self.decisions)
        return replace(self, decisions=decisions)
