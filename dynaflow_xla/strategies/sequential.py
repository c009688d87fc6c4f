"""Everything on one lane, in program order."""

from __future__ import annotations

from dataclasses import dataclass

from dynaflow_xla.strategies.base import Recorder, Strategy


@dataclass(frozen=True, repr=False)
class Sequential(Strategy):
    """All regions on lane 0 in topological order: what the other strategies are compared with."""

    def schedule(self, s: Recorder) -> None:
        """See :class:`Strategy`."""
        while ready := s.ready():
            s.execute(ready[0], lane=0)
