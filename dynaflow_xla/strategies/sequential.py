"""Everything in program order, as without a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from dynaflow_xla.errors import checks
from dynaflow_xla.strategies.base import Recorder, Strategy
from dynaflow_xla.strategies.moldable import Moldable


@dataclass(frozen=True, repr=False)
class Sequential(Strategy):
    """All regions one after another: what the other strategies are compared with.

    Each has all cores, where the backend knows that width: then it is the original program, as fast as
    that. Elsewhere all are on lane 0. So is a program of at most 0.3 ms that is faster on the thread that
    calls it than handed to the framework's own threads. A JAX function of 1.5 ms or more (5 as part of a
    larger program) is on lane 0, with one core, where more cores gain nothing (sorts, LAPACK, recurrences)
    and the user gives lanes no more by ``dfx.Lanes``, unless it donates an argument, whose memory the
    original's results take; so is a shorter one that gains more by it than the lane costs, as BLAS's
    threads make short factorizations longer. Elsewhere loops over elements in the steps of a ``scan`` are
    not shared out to several threads where they are too short.

    Args:
        wide: False: all on lane 0 in any case. A pool of one thread runs small programs faster.
    """

    wide: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "wide", checks.flag("Sequential(wide=...)", self.wide))

    def schedule(self, s: Recorder) -> None:
        """Each region as soon as it is ready."""
        width: int | str | None = "all" if self.wide and s.context.cores else None
        one = 1 if s.context.free_widths else None
        if width and (s.context.caller_ns or s.context.one_lane_ns):
            tasks = Moldable.of(s, 1)
            if tasks.is_for_one_lane(s.context.one_lane_ns) or tasks.is_for_the_caller():
                width = one
        while ready := s.ready():
            s.execute(ready[0], lane=0, width=width or one)

    def __repr__(self) -> str:
        return "Sequential()" if self.wide else "Sequential(wide=False)"
