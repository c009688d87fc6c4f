"""Flux and Comet: a sequence of operators replaced by one fused implementation.

Papers: Chang et al., "FLUX: Fast Software-based Communication Overlap On GPUs Through Kernel Fusion", 2024,
arXiv:2406.06858; Zhang et al., "Comet: Fine-grained Computation-communication Overlapping for
Mixture-of-Experts", MLSys 2025, arXiv:2502.19811.

Taken: a matched sequence (a product and what follows, dispatch and the experts' products) runs as the
user's kernel, on a lane of its own beside whatever does not need it. Not taken: the kernels themselves.
Mark the sequence, ``with dfx.mark("experts", tags={"fused"})``, or give rules with that tag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dynaflow_xla as dfx


@dataclass(frozen=True)
class Fused(dfx.Strategy):
    """Regions with a tag run as a kernel of yours (Flux, Chang et al. 2024; Comet, Zhang et al. 2025).

    Args:
        kernel: From the inputs of such a region to its outputs.
        match: Rules of the sequence, each with ``tags={"fused"}``; default: what is marked.
    """

    kernel: Callable[..., Any]
    match: tuple[Any, ...] = ()

    def rules(self, graph: Any) -> tuple[Any, ...] | None:
        """Where the sequence is."""
        return self.match or None

    def schedule(self, s: dfx.Recorder) -> None:
        """The kernel on the last lane as soon as it can start, the rest on the others."""
        while ready := s.ready():
            op = max(ready, key=lambda h: ("fused" in h.tags, h.priority))
            own = "fused" in op.tags
            s.execute(op, lane=s.lanes - 1 if own else 0, replace=self.kernel if own else None)
