"""NanoFlow: nano-batches whose operators use different resources at the same time.

Paper: Zhu et al., "NanoFlow: Towards Optimal Large Language Model Serving Throughput", OSDI 2025,
arXiv:2408.12757.

Taken: the batch in nano-batches, and a queue for each of compute, memory and network, so that one
nano-batch computes while another reads memory or communicates. Not taken: the search for sizes by
profiling (give ``n``, or let ``dfx.Auto`` measure), and shares of the multiprocessors, which belong to the
lanes: ``dfx.schedule(lanes=dfx.Lanes(3, sms=...))``.
"""

from __future__ import annotations

from dataclasses import dataclass

import dynaflow_xla as dfx


@dataclass(frozen=True)
class NanoFlow(dfx.Strategy):
    """Nano-batches, and a lane for each resource (Zhu et al., OSDI 2025).

    Args:
        n: Number of nano-batches; a smaller batch is split into its rows.
    """

    n: int = 2

    def split(self, ctx: dfx.Context) -> dfx.Split:
        """So many nano-batches as there are rows for."""
        rows = self.n if ctx.batch_size is None else ctx.batch_size
        return dfx.Split.even(max(1, min(self.n, rows)))

    def schedule(self, s: dfx.Recorder) -> None:
        """Each resource's regions on their lane; communication and long paths first."""
        lanes = {"network": 0, "compute": 1, "memory": 2, "host": 2}
        while ready := s.ready():
            op = max(ready, key=lambda h: (h.resource == "network", h.priority, -h.nano))
            s.execute(op, lane=lanes[op.resource] % s.lanes)
