"""Single-batch overlap: what does not need the communication runs beside it.

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437 (shared experts beside the
dispatch of tokens); "single batch overlap" in SGLang, 2025.

Taken: the batch stays whole; dispatch and combine start as early as they can on a lane of their own, and
what waits for none of them (shared experts, say) fills the time. Not taken: the down projection that
signals the combine block by block, which needs one kernel for both (see ``Fused``).
"""

from __future__ import annotations

from dataclasses import dataclass

import dynaflow_xla as dfx


@dataclass(frozen=True)
class SingleBatchOverlap(dfx.Strategy):
    """Independent work beside communication, without a split (SGLang's SBO, shared experts).

    Args:
        aside: Tag of regions that go to the other lane as communication does, where there is none.
    """

    aside: str = "aside"

    def schedule(self, s: dfx.Recorder) -> None:
        """Communication first; what leads to it before what does not; the rest fills in."""
        talks = {h.id for h in s.handles if h.resource == "network" or self.aside in h.tags}
        leads = set(talks)
        for h in reversed(s.handles):
            leads |= h.needs if h.id in leads else set()
        while ready := s.ready():
            op = max(ready, key=lambda h: (h.id in talks, h.id in leads, h.priority))
            s.execute(op, lane=s.lanes - 1 if op.id in talks else 0)
