"""Inter-operator parallelism by list scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from dynaflow_xla.errors import PlanError, PlanTypeError, bad_argument, checks
from dynaflow_xla.strategies.base import Recorder, Strategy
from dynaflow_xla.strategies.moldable import Moldable


@dataclass(frozen=True, repr=False)
class Branches(Strategy):
    """List scheduling of moldable regions: wide what more cores make faster, side by side what they do not.

    Which regions have all cores is chosen as two-phase algorithms for moldable tasks do (Turek, Wolf and Yu
    1992; CPA, Radulescu and van Gemund 2001; Lepere, Trystram and Woeginger 2002). The others go to lanes by
    critical-path list scheduling (HEFT without insertion; Topcuoglu et al. 2002): the ready region with the
    longest path behind it goes first, among equal ones that whose inputs are there first; it goes to the
    lane where it would finish earliest. Where lanes are predicted to gain nothing, all regions have all
    cores: the plan is the original program; or lane 0, where cores gain nothing either (see ``Sequential``).
    Lanes share the cores out, also unevenly, as the schedule is shortest; ``dfx.Lanes(count, width=...)``
    says how many each has.

    Args:
        lanes: Lanes to use; default all.
        wide: False: every region goes to a lane.
    """

    lanes: int | None = None
    wide: bool = True

    def __post_init__(self) -> None:
        wide = checks.truth(self.wide)
        if wide is None:
            raise PlanTypeError(f"Branches(wide=...) must be True or False; got {self.wide!r}")
        object.__setattr__(self, "wide", wide)
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
        """As the shortest schedule says that the model finds, see ``moldable``."""
        lanes = s.lanes if self.lanes is None else self.lanes
        if lanes > s.lanes:
            raise PlanError(f"Branches asks for {lanes} lanes; this schedule has {s.lanes}")
        tasks = Moldable.of(s, lanes, wide=self.wide)
        placed = tasks.best()
        if not placed.on_lanes and tasks.is_for_one_lane(s.context.one_lane_ns):
            placed = tasks.one_lane()
        of = {h.region.id: h for h in s.handles}
        for region, lane in placed.order:
            if region not in of:
                continue  # it puts nano-batches together, where the last of them ran
            if lane >= 0 or of[region].outer:
                s.execute(of[region], lane=max(lane, 0), width=placed.widths[max(lane, 0)])
            else:
                s.execute(of[region], width="all")

    def __repr__(self) -> str:
        given = [] if self.lanes is None else [f"lanes={self.lanes}"]
        return f"Branches({', '.join([*given, *([] if self.wide else ['wide=False'])])})"
