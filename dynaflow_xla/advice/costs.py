"""What is known of a plan's times, measured or estimated: the ground on which reasons stand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dynaflow_xla import machine
from dynaflow_xla.ir.partitioned import PartitionedGraph, contents
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.timelines.simulator import Costs, lower_bound, ns_at, region_costs, total_ns
from dynaflow_xla.timelines.timeline import Timeline


@dataclass(frozen=True)
class Given:
    """A plan, and what was found out about it.

    Attributes:
        plan: The plan.
        pg: Its regions.
        alone: The same regions one after another on one core, measured; None: estimates.
        wide: The same, each on all cores; None: estimates.
        ran: The plan, measured; None: it is simulated.
        original_ns: A call of the original; None: estimated.
        scheduled_ns: A call of the plan; None: simulated.
        wins: Of the calls in turns the share in which the plan was faster.
        streams: Lanes are streams of an accelerator: numbers of cores say nothing about them.
        caller_ns: See ``strategies.base.Context``.
        notes: Sentences.
    """

    plan: Plan
    pg: PartitionedGraph
    alone: Costs | None = None
    wide: Costs | None = None
    ran: Timeline | None = None
    original_ns: float | None = None
    scheduled_ns: float | None = None
    wins: float = 1.0
    streams: bool = False
    caller_ns: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Times:
    """Nanoseconds from which the reasons follow.

    Attributes:
        alone: Each region's, on one core.
        wide: The same on all cores.
        there: The same on the cores that it has in the plan.
        best: The same on as many cores as any schedule on such lanes may give it.
        serial: All on one core, one after another.
        chain: The longest chain of regions that need each other, each at its best.
        shared: All work, spread evenly over the lanes.
        original: A call of the original.
        scheduled: A call of the plan.
        simulated: The same, by the model.
        start, hand_overs, copies: What the plan would save without each, by the model.
        slowed: How many times as long the regions take beside others as alone; 1 where that is not known.
        measured: Whether calls were timed.
        beaten: The plan was measured to be faster than the bounds that follow from its regions alone.
    """

    alone: tuple[int, ...]
    wide: tuple[int, ...]
    there: tuple[int, ...]
    best: tuple[int, ...]
    serial: float
    chain: float
    shared: float
    original: float
    scheduled: float
    simulated: float
    start: float
    hand_overs: float
    copies: float
    slowed: float
    measured: bool
    beaten: bool = False

    @property
    def ideal(self) -> float:
        """What no plan of these regions on these lanes can beat."""
        return max(self.chain, self.shared)


def times(given: Given) -> Times:
    """The times of a plan, as far as they were measured; the rest is estimated."""
    plan, pg = given.plan, given.pg
    alone = tuple(region_costs(pg, given.alone))
    # Found once: to look for regions in a timeline takes longer than to simulate them.
    costs = dict(enumerate(alone))
    simulate = partial(total_ns, plan, pg, costs, caller_ns=given.caller_ns)
    total = simulate()
    cores = max(plan.cores, machine.cores())
    if given.wide is not None:
        wide = tuple(region_costs(pg, given.wide))
    elif given.streams:
        wide = alone
    else:
        wide = tuple(ns_at(pg, alone, region.id, cores, wide=True) for region in pg.regions)
    bound = lower_bound(plan, pg, costs)
    chain, shared = float(bound.critical_path_ns), float(bound.shared_ns)
    # What regions take on their own may be more than in one program with others, which fuses them.
    beaten = given.scheduled_ns is not None and given.scheduled_ns < max(chain, shared)
    if beaten and given.scheduled_ns is not None:
        chain, shared = min(chain, given.scheduled_ns), min(shared, given.scheduled_ns)
    there, best = _widths(given, alone)
    simulated = {
        "start": simulate(launch_ns=0),
        "hand_overs": simulate(handoff_ns=0),
        "copies": simulate(bytes_per_ns=math.inf),
    }
    return Times(
        alone=alone,
        wide=wide,
        serial=float(sum(alone)),
        there=there,
        best=best,
        chain=chain,
        shared=shared,
        original=float(sum(wide) if given.original_ns is None else given.original_ns),
        scheduled=float(total if given.scheduled_ns is None else given.scheduled_ns),
        simulated=float(total),
        slowed=_slowed(given, alone),
        measured=given.original_ns is not None and given.scheduled_ns is not None,
        beaten=beaten,
        **{name: float(max(0, total - without)) for name, without in simulated.items()},
    )


def matched(pg: PartitionedGraph, timeline: Timeline | None) -> tuple[Costs | None, str]:
    """What a run of the same cut says of the regions, and a note where it says nothing.

    A second capture may write an operator's parameters in another way; then the regions' names tell.
    """
    if timeline is None:
        return None, ""
    ran = {s.name: float(s.duration_ns) for s in timeline.spans if s.kind == "launch"}
    known = {s.content for s in timeline.spans if s.kind == "launch"}
    if known & set(contents(pg)):
        return timeline, ""
    if all(region.name in ran for region in pg.regions):
        return {region.name: ran[region.name] for region in pg.regions}, ""
    return None, (
        "the regions could not be measured one by one, since a second capture has other ones: what they "
        "take is estimated"
    )


def spread(samples: Sequence[float]) -> float:
    """How far the middle half of some times is apart, as a share of their median."""
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    middle = statistics.median(ordered)
    return (ordered[-1 - quarter] - ordered[quarter]) / middle if middle else 0.0


def _widths(given: Given, alone: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Each region's time on the cores that the plan gives it, and on the best number that one may."""
    plan, pg = given.plan, given.pg
    there, best = [*alone], [*alone]
    lanes = {(cores, False) for cores in plan.widths.values()} or {(1, False)}
    for launch in plan.launches:
        region = launch.region
        has = plan.cores_of(launch)
        widths = {(has, launch.lane < 0)}
        if not pg.regions[region].outer:
            widths |= lanes | ({(plan.cores, True)} if plan.cores else set())
        there[region] = ns_at(pg, alone, region, has, wide=launch.lane < 0)
        best[region] = min(ns_at(pg, alone, region, cores, wide=wide) for cores, wide in widths)
    return tuple(there), tuple(best)


def _slowed(given: Given, alone: tuple[int, ...]) -> float:
    """How much longer lanes' regions took in the plan's run than alone on as many cores."""
    if given.ran is None or given.alone is None:
        return 1.0
    beside = before = 0
    for span in given.ran.spans:
        if span.kind == "launch" and span.lane >= 0 and 0 <= span.region < len(alone):
            beside += span.duration_ns
            before += ns_at(given.pg, alone, span.region, span.cores, wide=span.lane < 0)
    return beside / before if before else 1.0
