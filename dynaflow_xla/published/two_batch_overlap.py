"""Two-batch overlap: one half of the batch communicates while the other half computes.

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437, section 3.4; as "dual batch
overlap" in vLLM, as "two-batch overlap" in SGLang.

Taken: two nano-batches that take turns at each communication, which has a lane of its own; small batches
stay whole (vLLM's threshold of tokens, here of rows). Not taken: kernels that communicate without
multiprocessors (DeepEP), and where a step ends for prefill and for decode, which the cut decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import dynaflow_xla as dfx


@dataclass(frozen=True)
class TwoBatchOverlap(dfx.Strategy):
    """Two nano-batches take turns at communication (DeepSeek-V3; vLLM's DBO, SGLang's TBO).

    Args:
        rows: Batches with fewer rows stay whole.
    """

    rows: int = 2

    def split(self, ctx: dfx.Context) -> dfx.Split:
        """Two halves, from so many rows on."""
        small = ctx.batch_size is not None and ctx.batch_size < max(2, self.rows)
        return dfx.Split.even(1 if small else 2)

    def schedule(self, s: dfx.Recorder) -> None:
        """A half computes until it communicates; then it is the other's turn."""
        turn = 0
        while ready := s.ready():
            ready.sort(key=lambda h: (h.resource == "network", h.priority))
            mine = [h for h in ready if h.nano == turn or h.resource == "network"]
            op = (mine or ready)[-1]
            talks = op.resource == "network"
            s.execute(op, lane=s.lanes - 1 if talks else 0)
            turn = 1 - op.nano if talks else turn
