"""Opara: a stream for each branch, and launches ordered by what they ask of the device.

Paper: Chen et al., "Opara: Exploiting Operator Parallelism for Expediting DNN Inference on GPUs", 2024,
arXiv:2312.10351.

Taken: an operator goes on in the stream of the first of its inputs that nobody else goes on from, else it
opens a stream; among operators that are ready the smallest goes first, and compute and memory take turns.
Not taken: the profile of an operator's blocks and registers (estimated cost stands for it) and the capture
into one CUDA graph, which the backend does.
"""

from __future__ import annotations

from dataclasses import dataclass

import dynaflow_xla as dfx


@dataclass(frozen=True)
class Opara(dfx.Strategy):
    """Streams along branches, small operators first, resources in turns (Chen et al., 2024)."""

    def schedule(self, s: dfx.Recorder) -> None:
        """The smallest of the other resource next, in the stream of an input that is still free."""
        stream: dict[int, int] = {}
        heirs: set[int] = set()
        opened, last = 0, ""
        while ready := s.ready():
            op = min(ready, key=lambda h: (h.resource == last, h.cost_ns, h.id))
            free = [n for n in sorted(op.needs) if n in stream and n not in heirs]
            stream[op.id] = stream[free[0]] if free else opened
            heirs |= set(free[:1])
            opened += not free
            last = op.resource
            s.execute(op, lane=stream[op.id] % s.lanes)
