"""Another strategy's regions one after another on one lane: what each takes with nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynaflow_xla.ir.graph import Graph
from dynaflow_xla.strategies.base import Context, Recorder, Split, Strategy


@dataclass(frozen=True, repr=False)
class OneLane(Strategy):
    """As the given strategy cuts and splits, so that the regions are the same.

    Args:
        of: The strategy.
        split_too: False: the batch stays whole.
    """

    of: Strategy
    split_too: bool = True

    def rules(self, graph: Graph) -> Sequence[Any] | None:
        """The strategy's."""
        return self.of.rules(graph)

    def split(self, ctx: Context) -> Split:
        """The strategy's."""
        return self.of.split(ctx) if self.split_too else Split.none()

    def schedule(self, s: Recorder) -> None:
        """In topological order."""
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=0)

    def __repr__(self) -> str:
        return f"OneLane({self.of!r})"
