"""POD-Attention: a prefill's attention beside a decode's.

Paper: Kamath et al., "POD-Attention: Unlocking Full Prefill-Decode Overlap for Faster LLM Inference",
ASPLOS 2025, arXiv:2410.18038.

Taken: the pairing. Two functions make one plan (``dfx.together(prefill, decode, ...)``); the one that asks
for compute and the one that asks for memory go side by side, each step of one started with a step of the
other. Not taken: one kernel whose blocks become prefill or decode on each multiprocessor; on a GPU, lanes
share multiprocessors as its scheduler likes, or have their own (``dfx.Lanes(2, sms=...)``).
"""

from __future__ import annotations

from dataclasses import dataclass

import dynaflow_xla as dfx


@dataclass(frozen=True)
class PODAttention(dfx.Strategy):
    """Two functions side by side, in pairs of equal work (Kamath et al., ASPLOS 2025).

    Args:
        prefill: Name of the function that is to be on lane 0, one of those of ``dfx.together``; what is
            nobody's goes with it.
    """

    prefill: str = "prefill"

    def schedule(self, s: dfx.Recorder) -> None:
        """The side that has had less time next, on its own lane."""
        names = sorted({h.function for h in s.handles} - {""})
        if self.prefill not in names and not s.context.derived:
            told = f"PODAttention: no function {self.prefill!r} among {names}, see PODAttention(prefill=)"
            if len(names) > 1:
                raise dfx.PlanError(told)
            s.notes[told] = None  # a part of a program, or no pair: all of it goes to one lane
        spent = [0.0, 0.0]
        while ready := s.ready():
            sides = {h.id: int(h.function not in (self.prefill, "")) for h in ready}
            op = min(ready, key=lambda h: (spent[sides[h.id]], -h.priority))
            s.execute(op, lane=sides[op.id] % s.lanes)
            spent[sides[op.id]] += op.cost_ns
