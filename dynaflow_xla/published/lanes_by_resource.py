"""Multiprocessors shared out between lanes, and regions sent to the lane that has what they need.

Papers: NanoFlow (arXiv:2408.12757) and Bullet, Lin et al., "Bullet: Boosting GPU Utilization for LLM Serving
via Dynamic Spatial-Temporal Orchestration", 2025, arXiv:2504.19516.

Taken: a fixed share of the multiprocessors for each kind of work, so that work that waits for memory or for
other devices does not take those that compute could use. Not taken: shares that change from step to step
with the load (``select=`` chooses among several plans). The shares belong to the lanes, the strategy says
what goes where: ``dfx.schedule(f, LanesByResource(), lanes=dfx.Lanes(2, sms=(0, 32)))``.
"""

from __future__ import annotations

from dataclasses import dataclass

import dynaflow_xla as dfx


@dataclass(frozen=True)
class LanesByResource(dfx.Strategy):
    """Compute on the first lanes, what waits for memory or devices on the last (NanoFlow, Bullet).

    Args:
        compute: How many lanes are for compute.
    """

    compute: int = 1

    def schedule(self, s: dfx.Recorder) -> None:
        """The longest path first, on the lane of its kind that has least to do."""
        load = [0.0] * s.lanes
        first = min(self.compute, s.lanes)
        while ready := s.ready():
            op = max(ready, key=lambda h: h.priority)
            kind = range(first) if op.resource == "compute" else range(first, s.lanes)
            lane = min(kind or range(s.lanes), key=load.__getitem__)
            s.execute(op, lane=lane)
            load[lane] += op.cost_ns
