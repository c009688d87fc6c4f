"""The report of ``dynaflow_xla.why``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from dynaflow_xla import machine
from dynaflow_xla.advice.ablation import Ablation, ablations
from dynaflow_xla.advice.costs import Given, Times, times as times_of
from dynaflow_xla.advice.pairs import Pair, pairs as pairs_of
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.timelines.simulator import simulate
from dynaflow_xla.timelines.spans import us
from dynaflow_xla.timelines.timeline import Timeline

Reason = Literal[
    "gains",
    "dependency",
    "contention",
    "too short",
    "hand-over",
    "copies",
    "placement",
    "outside",
]

_MARGIN = 0.02
_MARGIN_OF_ESTIMATES = 0.1
_WINS = 0.75
_ONE_CHAIN = 0.85
_BUSY = 1.15
_SLOWED = 1.05
_PART = 0.1
_MOST_ROWS = 12


@dataclass(frozen=True)
class Why:
    """Why a plan gains, or does not.

    Attributes:
        name: Of the function.
        reason: ``gains``, or what stands in the way first. ``dependency``: most of the work is one chain.
            ``contention``: the original uses the cores already, or regions slow each other down.
            ``too short``: less could be saved than it costs to go to lanes. ``hand-over``, ``copies``: what
            lanes give each other takes what they save. ``placement``: another schedule could gain.
            ``outside``: calls take longer than the plan's regions, waits and copies explain, or vary.
        text: The same in a sentence.
        measured: Whether regions and calls were measured; else all is estimated.
        original_ns, scheduled_ns: A call of each.
        steps: Name and nanoseconds: from all regions on one core, over what bounds any plan, to this one.
        pairs: Of the longest regions, those first that could save most.
        ablations: What each decision is worth, the largest first.
        timeline: Where regions ran, with the reasons as marks.
        notes: Sentences.
    """

    name: str
    reason: Reason
    text: str
    measured: bool
    original_ns: float
    scheduled_ns: float
    steps: tuple[tuple[str, float], ...]
    pairs: tuple[Pair, ...]
    ablations: tuple[Ablation, ...]
    timeline: Timeline
    notes: tuple[str, ...] = ()

    @property
    def gains(self) -> bool:
        """Whether the plan is faster than the original by more than a few percent."""
        return self.reason == "gains"

    def to_dict(self) -> dict[str, Any]:
        """All but the timeline, in types that JSON has."""
        names = ("name", "reason", "text", "measured", "original_ns", "scheduled_ns", "notes")
        return {
            **{name: getattr(self, name) for name in names},
            "steps": [{"step": name, "ns": ns} for name, ns in self.steps],
            "pairs": [asdict(pair) for pair in self.pairs],
            "ablations": [asdict(one) for one in self.ablations],
        }

    def to_text(self) -> str:
        """The verdict, the steps, the pairs and the decisions."""
        how = "measured" if self.measured else "estimated"
        lines = [
            f"{self.name}: {self.text}",
            f"original {us(self.original_ns)}, this plan {us(self.scheduled_ns)} ({how})",
            "",
            *(f"  {us(ns):>8}  {name}" for name, ns in self.steps),
        ]
        if self.pairs:
            lines += ["", "pairs of regions, and why they do not overlap:"]
            width = max(len(p.reason) for p in self.pairs[:_MOST_ROWS])
            for p in self.pairs[:_MOST_ROWS]:
                both = f"{p.first} ({us(p.first_ns)}) and {p.second} ({us(p.second_ns)})"
                lines.append(f"  {p.reason:{width}}  {both}: {p.text}")
            if len(self.pairs) > _MOST_ROWS:
                lines.append(f"  and {len(self.pairs) - _MOST_ROWS} more pairs")
        if self.ablations:
            lines += ["", "what each decision is worth (taken away, and simulated again):"]
            lines += [f"  {_worth(one):>16}  {one.text}" for one in self.ablations[:_MOST_ROWS]]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.to_text()


def _worth(one: Ablation) -> str:
    return f"gains {us(one.gains_ns)}" if one.gains_ns >= 0 else f"costs {us(-one.gains_ns)}"


def why(given: Given) -> Why:
    """The report on a plan.

    Args:
        given: The plan, and what was measured of it.
    """
    times = times_of(given)
    timeline = given.ran or simulate(given.plan, given.pg, given.alone, caller_ns=given.caller_ns)
    found = tuple(pairs_of(given, times, timeline))
    notes = given.notes
    if times.beaten:
        notes += (
            "the plan is faster than the bounds that follow from its regions on their own: compiled together "
            "they take less",
        )
    reason, text = _reason(given, times)
    return Why(
        name=given.plan.graph,
        reason=reason,
        text=text,
        measured=times.measured,
        original_ns=times.original,
        scheduled_ns=times.scheduled,
        steps=_steps(times, given.plan.lanes),
        pairs=found,
        ablations=tuple(ablations(given, times)),
        timeline=_marked(timeline, found, f"why: {text}"),
        notes=notes,
    )


def _reason(given: Given, t: Times) -> tuple[Reason, str]:
    """What stands in the way first: each bound holds for every plan that is left by those before it."""
    margin = _MARGIN if t.measured else _MARGIN_OF_ESTIMATES
    seems = t.scheduled < (1 - margin) * t.original
    if seems and given.wins >= _WINS:
        return "gains", f"it gains: {t.original / t.scheduled:.2f} times as fast as the original"
    # Calls that vary do not take away what bounds every plan.
    no = f"not known to gain ({given.wins:.0%} of the calls were faster)" if seems else "no gain"
    if given.plan.lanes < 2:
        return "placement", f"{no}: the schedule has one lane, on which nothing can overlap"
    if t.serial <= machine.numbers().lanes_ns:
        return "too short", (
            f"{no}: all regions together take {us(t.serial)}, and to go to lanes and back takes "
            f"{us(machine.numbers().lanes_ns)}"
        )
    if len(given.pg.regions) < 2:
        return "dependency", f"{no}: it is cut into one region; rules or marks cut it elsewhere"
    if t.chain >= _ONE_CHAIN * sum(t.best):
        part = min(1.0, t.chain / max(sum(t.best), 1))
        return "dependency", (
            f"{no}: {part:.0%} of the work is one chain of regions that need each other"
        )
    if t.serial - t.ideal <= machine.numbers().lanes_ns:
        return "too short", (
            f"{no}: at best {us(t.serial - t.ideal)} of {us(t.serial)} can be saved, and to go to lanes "
            f"and back takes {us(machine.numbers().lanes_ns)}"
        )
    alone = min(t.original, float(sum(t.wide)))
    if alone <= _BUSY * t.ideal:
        return "contention", (
            f"{no}: one after another on all cores the regions take {us(alone)}, since they use these by "
            f"themselves; no schedule of them on {_lanes(given.plan)} takes less than {us(t.ideal)}"
        )
    if seems:
        return "outside", (
            f"{no}: the median call is {t.original / t.scheduled:.2f} times as fast as the original's, but "
            "calls vary too much to tell"
        )
    rest = max(0.0, t.simulated - t.ideal - t.start - t.hand_overs - t.copies)
    outside = max(0.0, t.scheduled - t.simulated) if t.measured else 0.0
    slowed = min(outside, (t.slowed - 1.0) * t.simulated) if t.slowed >= _SLOWED else 0.0
    shares: dict[Reason, tuple[float, str]] = {
        "placement": (rest, "the schedule leaves lanes idle that could work, for"),
        "copies": (t.copies, "copies between lanes and of results take"),
        "hand-over": (t.hand_overs, "hand-overs between lanes take"),
        "too short": (t.start, "to start the lanes takes"),
        "contention": (
            slowed,
            f"side by side regions take {t.slowed:.2f} times as long as alone (they share memory, caches, or "
            "cores that others use), which adds",
        ),
        "outside": (
            outside - slowed,
            "what the model does not know (other work on these cores, what is around the lanes) adds",
        ),
    }
    order = sorted(shares, key=lambda key: -shares[key][0])
    if len(given.plan.lanes_used) < 2:
        used = (
            "all regions have all cores"
            if not given.plan.lanes_used
            else "one lane has all regions"
        )
        return "placement", f"no gain: {used}; at best {us(t.ideal)} could be reached side by side"
    # Each that is a part worth speaking of, so that no small one stands for the whole.
    over = sum(ns for ns, _ in shares.values())
    parts = [f"{told} {us(ns)}" for ns, told in map(shares.__getitem__, order) if ns > _PART * over]
    return order[0], (
        f"no gain: at best {us(t.ideal)} could be reached, and this plan takes {us(t.scheduled)}: "
        + "; ".join(parts)
    )


def _lanes(plan: Plan) -> str:
    """``2 lanes of one core each``."""
    widths = plan.widths
    if len(set(widths.values())) > 1:
        return f"lanes of {', '.join(str(widths[lane]) for lane in sorted(widths))} cores"
    width = plan.lane_width
    count = plan.lanes if width == 1 else len(widths)  # others could have none of these cores
    cores = "one core" if width == 1 else f"{width} cores"
    return f"1 lane of {cores}" if count == 1 else f"{count} lanes of {cores} each"


def _steps(t: Times, lanes: int) -> tuple[tuple[str, float], ...]:
    return (
        ("all regions one after another on one core", t.serial),
        ("the original", t.original),
        ("bound: the longest chain of regions that need each other", t.chain),
        (f"bound: all work spread evenly over {lanes} lanes", t.shared),
        ("to start lanes", t.start),
        ("hand-overs", t.hand_overs),
        ("copies", t.copies),
        ("this plan, simulated", t.simulated),
        ("this plan, measured" if t.measured else "this plan", t.scheduled),
    )


def _marked(timeline: Timeline, found: tuple[Pair, ...], note: str) -> Timeline:
    """The timeline whose launches say with what they could not run at the same time, and why."""
    told: dict[int, list[str]] = {}
    for pair in found:
        if pair.reason != "overlap":
            for mine, other in (pair.regions, pair.regions[::-1]):
                name = pair.second if other == pair.regions[1] else pair.first
                told.setdefault(mine, []).append(f"not beside {name!r}: {pair.reason}")
    spans = tuple(
        msgspec.structs.replace(s, reason="; ".join(told[s.region][:3]))
        if s.kind == "launch" and s.region in told
        else s
        for s in timeline.spans
    )
    notes = [*timeline.meta.get("notes", ()), note]
    return msgspec.structs.replace(timeline, spans=spans, meta={**timeline.meta, "notes": notes})
