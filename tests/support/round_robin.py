"""A strategy for tests that look at what lanes hand over to each other."""

from __future__ import annotations

from typing import Any

import dynaflow_xla as dfx


class RoundRobin(dfx.Strategy):
    """Every operator is a region, lanes alternate: the most hand-overs there can be."""

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("*")] if graph.ops else None

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
