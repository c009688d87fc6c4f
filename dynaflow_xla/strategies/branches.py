"""Inter-operator parallelism by list scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from dynaflow_xla.errors import PlanError, bad_argument, checks
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
        margin: By what share of the original's time lanes have to be predicted to be faster; default: 5 % in
            JAX, 3 % in PyTorch. The model knows programs of many operators to some 10 %. Below 0: lanes are
            used even if predicted to be slower by so much, for whom measures what comes of it (``Auto``
            does).
    """

    lanes: int | None = None
    wide: bool = True
    margin: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "wide", checks.flag("Branches(wide=...)", self.wide))
        if self.margin is not None:
            margin = checks.real(self.margin)
            if margin is None or not -1 <= margin < 1:
                raise bad_argument(
                    self.margin,
                    Real,
                    f"Branches(margin=...) must be a number from -1 to below 1; got {self.margin!r}",
                )
            object.__setattr__(self, "margin", margin)
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
        placed = tasks.best(self.margin)
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
        given += [] if self.wide else ["wide=False"]
        given += [] if self.margin is None else [f"margin={self.margin!r}"]
        return f"Branches({', '.join(given)})"
