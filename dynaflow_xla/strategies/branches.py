"""Inter-operator parallelism by list scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from dynaflow_xla import checks, machine
from dynaflow_xla.errors import PlanError, bad_argument
from dynaflow_xla.strategies.base import Handle, Recorder, Strategy


@dataclass(frozen=True, repr=False)
class Branches(Strategy):
    """Critical-path list scheduling (HEFT without insertion; Topcuoglu et al. 2002).

    The ready region with the longest path behind it goes first, among equal ones that whose inputs
    are there first; it goes to the lane where it would finish earliest.

    Args:
        lanes: Lanes to use; default all.
    """

    lanes: int | None = None

    def __post_init__(self) -> None:
        if self.lanes is None:
            return
        lanes = checks.integer(self.lanes)
        if lanes is None or lanes < 1:
            raise bad_argument(
                self.lanes,
                Integral,
                f"Branches(lanes=...) must be an integer >= 1; got {self.lanes!r}",
            )
        object.__setattr__(self, "lanes", lanes)

    def schedule(self, s: Recorder) -> None:
        """Each region, in order of its priority, to the lane on which it ends first."""
        lanes = s.lanes if self.lanes is None else self.lanes
        if lanes > s.lanes:
            raise PlanError(f"Branches asks for {lanes} lanes; this schedule has {s.lanes}")
        free = [0.0] * lanes
        finish: dict[int, float] = {}
        place: dict[int, int] = {}
        made = s.graph.producer_region()
        values = s.graph.graph.values

        def start(op: Handle, lane: int) -> float:
            begin = free[lane]
            for pred in op.preds:
                arrival = finish[pred]
                if place[pred] not in (lane, -1):
                    crossing = sum(values[v].bytes for v in op.region.inputs if made.get(v) == pred)
                    arrival += machine.hand_over_ns(crossing)
                begin = max(begin, arrival)
            return begin

        def arrival(op: Handle) -> float:
            return max((finish[p] for p in op.preds), default=0.0)

        while ready := s.ready():
            inner = [op for op in ready if not op.outer]
            if not inner:
                op = ready[0]
                barrier = max([*free, *(finish[p] for p in op.preds)])
                free = [barrier] * lanes
                finish[op.region.id], place[op.region.id] = barrier, -1
                s.execute(op)
                continue
            # An optimizer's updates are all last on their paths: they run as gradients come.
            op = max(inner, key=lambda h: (h.priority, -arrival(h), -h.region.id))
            lane = min(range(lanes), key=lambda n: (start(op, n), n))
            finish[op.region.id] = start(op, lane) + op.cost_ns
            free[lane] = finish[op.region.id]
            place[op.region.id] = lane
            s.execute(op, lane=lane)

    def __repr__(self) -> str:
        return "Branches()" if self.lanes is None else f"Branches(lanes={self.lanes})"
