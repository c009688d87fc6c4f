"""Strategies for tests that look at what lanes hand over to each other, and to regions on all cores."""

from __future__ import annotations

from typing import Any

import dynaflow_xla as dfx


class OneByOne(dfx.Strategy):
    """Every operator is a region."""

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("*")] if graph.ops else None


class RoundRobin(OneByOne):
    """Every operator is a region, lanes alternate: the most hand-overs there can be."""

    def schedule(self, s: Any) -> None:
        count = 0
        while ready := s.ready():
            for op in ready:
                if "outer" in op.tags:
                    s.execute(op)
                else:
                    s.execute(op, lane=count % s.lanes)
                    count += 1

    def __repr__(self) -> str:
        return "RoundRobin()"


class Mixed(OneByOne):
    """Every operator is a region; every third one has all cores, the others have alternating lanes."""

    def __init__(self, every: int = 3) -> None:
        self.every = every

    def schedule(self, s: Any) -> None:
        count = 0
        while ready := s.ready():
            for op in ready:
                count += 1
                if count % self.every == 0 or op.outer:
                    s.execute(op, width="all")
                else:
                    s.execute(op, lane=count % s.lanes)

    def __repr__(self) -> str:
        return f"Mixed({self.every})"


class EachItsWidth(OneByOne):
    """Every operator is a region, by turns on lanes of so many cores; 0: on all cores."""

    def __init__(self, *widths: int) -> None:
        self.widths = widths

    def schedule(self, s: Any) -> None:
        count = 0
        while ready := s.ready():
            for op in ready:
                lane = count % len(self.widths)
                s.execute(op, lane=min(lane, s.lanes - 1), width=self.widths[lane] or "all")
                count += 1
