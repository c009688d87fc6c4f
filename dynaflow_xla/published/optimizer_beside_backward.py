"""The optimizer beside the backward pass: a weight is updated as soon as its gradient is there.

Paper: Jiang et al., "Optimizer Fusion: Efficient Training with Better Locality and Parallelism", 2021,
arXiv:2104.00237 ("backward-fusion").

Taken: updates start while gradients of earlier layers are still being computed. Not taken: the fusion of an
update with the gradient's last operator for the cache's sake. The function is a whole training step; what
nothing else needs is an update, or what is marked: ``with dfx.mark("update", tags={"optimizer"})``.
"""

from __future__ import annotations

from dataclasses import dataclass

import dynaflow_xla as dfx


@dataclass(frozen=True)
class OptimizerBesideBackward(dfx.Strategy):
    """Updates on a lane of their own, as gradients come (Jiang et al., 2021)."""

    def schedule(self, s: dfx.Recorder) -> None:
        """The longest path first; what ends a path goes to the last lane."""
        updates = {h.id for h in s.handles if "optimizer" in h.tags or not h.succs}
        while ready := s.ready():
            op = max(ready, key=lambda h: (h.id in updates, h.priority))
            s.execute(op, lane=s.lanes - 1 if op.id in updates else 0)
