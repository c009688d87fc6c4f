"""TokenWeave: tokens in two parts, and communication fused with the norm that follows.

Paper: Gond et al., "TokenWeave: Efficient Compute-Communication Overlap for Distributed LLM Inference",
2025, arXiv:2505.11329.

Taken: the tokens in two parts that take turns, uneven by ``first`` where even ones would leave a wave of
blocks half empty; what is marked "fused" (a sum over devices and the norm behind it) runs as the user's
kernel on a lane of its own. Not taken: that kernel, and the choice of the parts by measuring waves.
Mark the sequence, ``with dfx.mark("norm", tags={"fused"})``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dynaflow_xla as dfx


@dataclass(frozen=True)
class TokenWeave(dfx.Strategy):
    """Two parts of the tokens around a fused norm (Gond et al., 2025).

    Args:
        kernel: From the inputs of a region marked "fused" to its outputs; None: it runs as it is written.
        first: Rows of the first part; None: half.
    """

    kernel: Callable[..., Any] | None = None
    first: int | None = None

    def split(self, ctx: dfx.Context) -> dfx.Split:
        """Two parts; one row stays whole."""
        if (rows := ctx.batch_size) is None:
            return dfx.Split.even(2)
        first = self.first or rows // 2
        return dfx.Split.of_sizes([first, rows - first]) if 0 < first < rows else dfx.Split.none()

    def schedule(self, s: dfx.Recorder) -> None:
        """The fused norm of one part beside the other part's products."""
        while ready := s.ready():
            op = max(ready, key=lambda h: ("fused" in h.tags, h.priority, -h.nano))
            own = "fused" in op.tags or op.resource == "network"
            kernel = self.kernel if "fused" in op.tags else None
            s.execute(op, lane=s.lanes - 1 if own else 0, replace=kernel)
