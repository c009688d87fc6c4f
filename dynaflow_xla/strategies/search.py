"""The best plan of a small graph under the simulator: branch and bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral

from dynaflow_xla import machine
from dynaflow_xla.errors import bad_argument, checks
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.recording import Recording
from dynaflow_xla.strategies.base import Recorder, Strategy
from dynaflow_xla.strategies.branches import Branches
from dynaflow_xla.strategies.moldable import Moldable
from dynaflow_xla.timelines.simulator import on_platform, simulate

WIDE = -1
"""In an order, in the place of a lane: all cores."""

Order = tuple[tuple[int, int], ...]
"""Regions in the order in which they are executed, each with its lane or ``WIDE``."""


@dataclass(frozen=True, repr=False)
class Search(Strategy):
    """Tries every order of regions on every lane, and keeps the plan that the simulator predicts to be best.

    A beginning of a plan is given up where no plan that begins so could be shorter than the best one found
    (branch and bound). What ``Branches`` would do is the first plan; the others have lanes of an even share
    of the cores. A graph with more regions than
    ``regions`` gets that one, which ``explain`` says.

    Args:
        regions: Most regions that are searched.
        nodes: Most beginnings that are looked at; then the best plan so far is taken.
    """

    regions: int = 12
    nodes: int = 4000

    def __post_init__(self) -> None:
        for what in ("regions", "nodes"):
            given = getattr(self, what)
            number = checks.integer(given)
            if number is None or number < 1:
                raise bad_argument(
                    given, Integral, f"Search({what}=...) must be an integer >= 1; got {given!r}"
                )
            object.__setattr__(self, what, number)

    def schedule(self, s: Recorder) -> None:
        """The best order found."""
        if len(s.handles) > self.regions:
            s.notes[
                f"{len(s.handles)} regions are more than Search looks at ({self.regions}): Branches decides"
            ] = None
            Branches().schedule(s)
            return
        found = _Search(s, self.nodes)
        found.run()
        alike = " of lanes alike" if s.context.free_widths and s.context.cores > s.lanes > 1 else ""
        what = (
            f"no plan{alike} is shorter"
            if found.left
            else f"given up after {self.nodes} beginnings"
        )
        s.notes[
            f"Search: {found.best_ns / 1e3:.1f} us predicted, Branches {found.first_ns / 1e3:.1f} us; "
            f"{found.seen} beginnings looked at, {what}"
        ] = None
        execute(s, found.best, found.widths)

    def __repr__(self) -> str:
        given = [f"regions={self.regions}"] * (self.regions != 12)
        given += [f"nodes={self.nodes}"] * (self.nodes != 4000)
        return f"Search({', '.join(given)})"


def execute(s: Recorder, order: Order, widths: Sequence[int] = ()) -> None:
    """Records an order, and how many cores lanes have if it is not what they have anyway."""
    of = {h.id: h for h in s.handles}
    for region, lane in order:
        if lane == WIDE and not of[region].outer:
            s.execute(of[region], width="all")
        else:
            width = widths[lane] if widths and lane >= 0 else None
            s.execute(of[region], lane=max(lane, 0), width=width)


@dataclass
class _PartialSchedule:
    """The beginning of a plan: a clock a lane, and where and when regions ended."""

    free: tuple[float, ...]
    last: float = 0.0
    order: Order = ()
    finish: dict[int, float] = field(default_factory=dict)
    place: dict[int, int] = field(default_factory=dict)
    used: int = 0
    barrier: float = 0.0


class _Search:
    """Branch and bound.

    Orders are looked at by starting time, so that each assignment with its order on every lane comes once.
    A bound counts what every such plan has at least: the time of regions and of signals between lanes,
    without copies; the simulator decides between whole plans.

    Args:
        s: What is recorded.
        nodes: Most beginnings to look at.
    """

    def __init__(self, s: Recorder, nodes: int) -> None:
        self.s, self.nodes, self.seen = s, nodes, 0
        context = s.context
        self.wide_cores = context.cores
        self.hand_over_ns = machine.hand_over_ns(context.platform)
        regions = s.graph.regions
        self.narrow = {r.id: r.cost_at(context.lane_cores) for r in regions}
        self.wide = {r.id: r.cost_at(max(1, context.cores), wide=True) for r in regions}
        self.needs = {h.id: h.needs for h in s.handles}
        self.outer = {h.id for h in s.handles if h.outer}
        self.shortest = {
            i: self.wide[i] if i in self.outer else min(self.narrow[i], self._wide(i))
            for i in self.needs
        }
        behind: dict[int, float] = {}
        for i in reversed(self.needs):
            after = [behind[j] for j, needs in self.needs.items() if i in needs]
            behind[i] = self.shortest[i] + max(after, default=0.0)
        self.behind = behind
        self.best: Order = ()
        self.widths: tuple[int, ...] = ()
        self.best_ns = self.first_ns = float("inf")

    @property
    def left(self) -> bool:
        """Whether the search came to its end."""
        return self.seen <= self.nodes

    def _wide(self, region: int) -> float:
        return self.wide[region] if self.wide_cores else float("inf")

    def run(self) -> None:
        """Finds the best order."""
        lanes = self.s.lanes
        inner = set(self.needs)
        for wide in (True, False) if self.s.context.cores else (True,):
            placed = Moldable.of(self.s, lanes, wide=wide).best()
            self._whole(tuple((i, lane) for i, lane in placed.order if i in inner), placed.widths)
            if wide:  # as Branches places them
                self.first_ns = self.best_ns
        self._whole(tuple((i, WIDE if i in self.outer else 0) for i in self.needs))
        self._extend(_PartialSchedule((0.0,) * lanes))

    def _whole(self, order: Order, widths: tuple[int, ...] = ()) -> None:
        """Predicts a whole plan."""
        s = self.s
        trial = Recorder(s.graph, s.context, Search())
        execute(trial, order, widths)
        trial.finish()
        plan = build_plan(
            s.graph, Recording(tuple(trial.decisions), widths=trial.widths), lanes=s.lanes,
            strategy_text="", cores=s.context.cores, width=s.context.lane_cores, counted=False,
        )  # fmt: skip
        predicted = simulate(
            plan, s.graph, program_ns=s.context.program_ns, caller_ns=s.context.caller_ns,
            **on_platform(s.context.platform),
        ).total_ns  # fmt: skip
        if predicted < self.best_ns:
            self.best_ns, self.best, self.widths = float(predicted), order, widths

    def _extend(self, state: _PartialSchedule) -> None:
        if len(state.order) == len(self.needs):
            self._whole(state.order)
            return
        self.seen += 1
        if not self.left:
            return
        children = [
            (self._bound(made), -self.behind[region], made)
            for region in self.needs
            if region not in state.finish and self.needs[region] <= state.finish.keys()
            for made in self._children(state, region)
        ]
        for bound, _, made in sorted(children, key=lambda c: c[:2]):
            if bound < self.best_ns:
                self._extend(made)

    def _children(self, state: _PartialSchedule, region: int) -> Sequence[_PartialSchedule]:
        made = []
        behind = self.behind[region] - self.shortest[region]
        if region in self.outer or self.wide_cores:
            begin = max(state.free)
            end = begin + self.wide[region]
            if begin >= state.last and end + behind < self.best_ns:
                made.append(self._after(state, region, WIDE, begin, (end,) * len(state.free)))
        if region not in self.outer:
            # Lanes that hold nothing yet are alike.
            for lane in range(min(state.used + 1, len(state.free))):
                begin = state.free[lane]
                for pred in self.needs[region]:
                    there = state.finish[pred]
                    if state.place[pred] not in (lane, WIDE) and there > state.barrier:
                        there += self.hand_over_ns
                    begin = max(begin, there)
                end = begin + self.narrow[region]
                if begin < state.last or end + behind >= self.best_ns:
                    continue
                free = (*state.free[:lane], end, *state.free[lane + 1 :])
                made.append(self._after(state, region, lane, begin, free))
        return made

    @staticmethod
    def _after(
        state: _PartialSchedule, region: int, lane: int, begin: float, free: tuple[float, ...]
    ) -> _PartialSchedule:
        wide = lane == WIDE
        end = max(free) if wide else free[lane]
        return _PartialSchedule(
            free,
            begin,
            (*state.order, (region, lane)),
            {**state.finish, region: end},
            {**state.place, region: lane},
            0 if wide else max(state.used, lane + 1),
            end if wide else state.barrier,
        )

    def _bound(self, state: _PartialSchedule) -> float:
        """No plan that begins so is shorter."""
        left = [i for i in self.needs if i not in state.finish]
        ends = [max(state.free)]
        for i in left:
            ready = max((state.finish.get(p, 0.0) for p in self.needs[i]), default=0.0)
            ends.append(max(state.last, ready) + self.behind[i])
        least = sum(
            min(self.narrow[i], self._wide(i) * len(state.free)) if i not in self.outer else 0.0
            for i in left
        )
        ends.append((sum(state.free) + least) / len(state.free))
        return max(ends)
