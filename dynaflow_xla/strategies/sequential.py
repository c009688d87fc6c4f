"""Everything on one lane, in program order."""

from __future__ import annotations

from dataclasses import dataclass

from dynaflow_xla.strategies.base import Recorder, Strategy


@dataclass(frozen=True, repr=False)
class Sequential(Strategy):
    """All regions on lane 0 in topological order: what the other strategies are compared with."""

    def schedule(self, s: Recorder) -> None:
        """Each region as soon as it is ready, all on lane 0."""
        while ready := s.ready():
            s.execute(ready[0], lane=0)
