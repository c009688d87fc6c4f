"""Paired measurement of candidates, measured costs of regions, and the decision cache on disk."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from dynaflow_xla import machine
from dynaflow_xla.caches import private_files
from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.machine import memory
from dynaflow_xla.timelines.spans import one_core_ns
from dynaflow_xla.timelines.timeline import Timeline
from dynaflow_xla.tuning import quiet
from dynaflow_xla.tuning.rounds import (
    CHANCE as CHANCE,
    MIN_ROUNDS as MIN_ROUNDS,
    Medians as Medians,
    Rounds,
)
from dynaflow_xla.watching import telling

CACHE_VERSION = 13

CLOSE = 1.2
"""Candidates within this factor of the fastest are measured on, the others no more."""

DOUBT_S = 0.5
"""Seconds beyond a budget for a gain that is likely, but not sure."""

SAMPLE_S = 2e-3
"""Seconds of calls in a sample: a switch from another candidate then weighs little."""

ROW_S = 0.02
"""Ways that are close are compared in rows of calls of so many seconds. What threads gain or lose in a row
of calls, short samples in turns do not show (seen: nothing in 2 to 8 ms, a twentieth in rows)."""

_LONG_S = 0.05
"""Calls of at least so long need no untimed one before them: what that would warm is little of them."""

_IN_A_ROW = 20
"""So many calls at most are enqueued before they are waited for: each has results of its own."""

WARM_S = 0.12
"""Seconds of calls before the first sample. Compiling kept one core busy; until the system has spread a
pool's threads over the cores again, wide programs take half as long again (seen: for 0.04 to 0.1 s)."""


class BudgetTooSmall(PlanError):
    """The budget does not suffice to sample every candidate ``MIN_ROUNDS`` times."""


@dataclass(frozen=True)
class RegionCosts:
    """What a profile of one plan tells about the regions of other plans of the same function.

    Attributes:
        region_ns: Name of a region -> nanoseconds on one core.
        scale: Measured over estimated time of all of them together: for regions not measured.
    """

    region_ns: dict[str, float]
    scale: float

    @classmethod
    def of(cls, timeline: Timeline, pg: PartitionedGraph) -> RegionCosts:
        """Costs from a measured timeline of a plan of ``pg`` that does not split the batch."""
        spans = {s.region: s for s in timeline.spans if s.kind == "launch"}
        times = {
            region: one_core_ns(
                pg.regions[region], ns, spans[region].cores, wide=spans[region].lane < 0
            )
            for region, ns in timeline.region_ns().items()
        }
        estimated = sum(pg.regions[region].cost_ns for region in times)
        scale = sum(times.values()) / estimated if estimated > 0 else 1.0
        return cls({pg.regions[region].name: ns for region, ns in times.items()}, scale)

    def apply(self, pg: PartitionedGraph, sizes: Sequence[int] = ()) -> dict[int, float]:
        """Nanoseconds by region id of another partition of the same function.

        Args:
            pg: Its regions.
            sizes: Rows of each nano-batch, if it splits the batch: a region ``name@0`` costs its
                share of what ``name`` costs, ``name@0+1`` the sum of two shares.
        """
        costs = {}
        for region in pg.regions:
            base, _, nanos = region.name.partition("@")
            share = 1.0
            if sizes and nanos:
                share = sum(sizes[int(n)] for n in nanos.split("+")) / sum(sizes)
            known = self.region_ns.get(base if sizes else region.name)
            costs[region.id] = region.cost_ns * self.scale if known is None else known * share
        return costs


_VARIABLES = (*machine.THREAD_VARIABLES, "XLA_FLAGS")
"""Variables of the environment that change how long the same program takes."""


def cache_key(*parts: Any) -> str:
    """Hash over what a decision depends on; the machine and the environment are always parts of it.

    Args:
        parts: Anything else. Dictionaries are taken in the order of their keys.
    """
    told = [
        str(sorted(f"{k!r}: {v!r}" for k, v in part.items()))
        if isinstance(part, Mapping)
        else str(part)
        for part in parts
    ]
    environment = [os.environ.get(name, "") for name in _VARIABLES]
    known = machine.numbers().digest
    further = [*([known] if known else []), *(["memory is kept"] if memory.is_kept() else [])]
    text = json.dumps([CACHE_VERSION, machine.identity(), environment, told, *further])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class _Decision(msgspec.Struct, frozen=True):
    """What a file holds."""

    choice: str
    reason: str
    medians_ms: dict[str, float]
    predicted_ms: dict[str, float] = {}
    left_out: dict[str, str] = {}
    seconds: float = 0.0
    costs: RegionCosts | None = None
    memory: str = ""
    far: bool = False
    unsure: bool = False

    def __post_init__(self) -> None:
        costs = () if self.costs is None else (self.costs.scale, *self.costs.region_ns.values())
        if not all(0 <= cost < math.inf for cost in costs):
            raise ValueError("a cost is no time")


def load(key: str) -> dict[str, Any] | None:
    """A stored decision; None if there is none. A broken file is reported once, removed, rebuilt."""
    try:
        folder = private_files.cache_folder()
    except private_files.NoFolder:
        return None  # whoever stores one says so
    path = folder / f"{key}.json"
    try:
        data = private_files.opened(private_files.read(path), CACHE_VERSION)
        return msgspec.structs.asdict(msgspec.convert(data, _Decision))
    except (FileNotFoundError, NotADirectoryError):
        return None  # of the second, too, whoever stores one says so
    except private_files.Untrusted as error:
        private_files.refused(folder, error)
        return None
    except (OSError, ValueError, msgspec.ValidationError) as error:
        with contextlib.suppress(OSError):  # what cannot be removed is reported again
            path.unlink()
        telling.fallback(
            f"the cached decision {path} cannot be read ({error}); it is made again",
            may_wait=True,
        )
        return None


def store(key: str, decision: dict[str, Any]) -> None:
    """Writes a decision atomically; a folder that cannot be written to is reported, not fatal."""
    try:
        folder = private_files.cache_folder()
    except private_files.NoFolder as error:
        private_files.not_kept(error)
        return
    costs = decision.get("costs")
    content = decision | {"costs": None if costs is None else asdict(costs)}
    data = private_files.sealed(content, CACHE_VERSION)
    try:
        private_files.write(folder / f"{key}.json", data)
    except private_files.Untrusted as error:
        private_files.refused(folder, error)
    except OSError as error:
        telling.fallback(
            f"decisions cannot be kept in {folder} ({error}); they are made again in each process",
            may_wait=True,
        )


@dataclass(frozen=True)
class Fresh:
    """A candidate that uses up what it is called with.

    Attributes:
        given: Makes what one call takes; not timed.
        run: Runs it to completion, or enqueues it.
        wait: Waits until all is done that was enqueued; None: ``run`` does.
        in_a_row: Whether several calls may be enqueued before that: what one takes no other one writes. So
            users call it, and the host is then ahead of the device.
    """

    given: Callable[[], Any]
    run: Callable[[Any], None]
    wait: Callable[[], None] | None = None
    in_a_row: Callable[[], bool] = lambda: False

    def __call__(self) -> None:
        """One call."""
        self.with_given(self.given())

    def with_given(self, *given: Any) -> None:
        """Calls with what ``given`` made, one after another, to completion."""
        for one in given:
            self.run(one)
        if self.wait is not None:
            self.wait()


def untimed_calls(seconds: Iterable[float]) -> int:
    """How many calls of each candidate come before those that a sample times.

    Args:
        seconds: Of a call of each.
    """
    return int(min(seconds) < _LONG_S)


def measure(
    runs: Mapping[str, Callable[[], None]],
    budget_s: float,
    rounds: int = 11,
    rest: bool = False,
    sample_s: float = SAMPLE_S,
    tick: Callable[[str], None] | None = None,
    watch: quiet.ActivityWatch | None = None,
    regardless: bool = False,
    plain: Sequence[str] = (),
    margin: float = 0.0,
) -> Medians:
    """Interleaved timing: each round samples every candidate once, in an order drawn anew.

    After ``rounds`` rounds those that are not ``CLOSE`` to the fastest drop out, and what remains is
    sampled as often again: where two are close the most samples are spent. At last, if a candidate is
    close to the fastest of ``plain``, these are compared in rows of calls, which alone decide between
    them. If calls are longer than that, and one looks faster, but not surely, it is sampled on.

    Args:
        runs: Name -> a function that runs the candidate to completion; :class:`Fresh` for one that
            needs other arguments in each call.
        budget_s: Stop after this long; compiling and first calls do not count.
        rounds: Rounds before the slow ones drop out.
        rest: Before each sample wait until the process is idle, for programs whose library threads
            spin on after a call.
        sample_s: A sample is one untimed call, then calls for about this long; of long calls one.
        tick: Told how far it is.
        watch: Tells whether something else of this process runs.
        regardless: Measure for ``MIN_ROUNDS`` rounds, whatever the budget, and ``DOUBT_S`` beyond it if in
            doubt.
        plain: Names of what one would run instead of a candidate.
        margin: See ``Medians.beats``.

    Returns:
        Milliseconds, with their samples.

    Raises:
        BudgetTooSmall: it does not suffice for ``MIN_ROUNDS`` rounds.
        quiet.Disturbed: something else ran.
    """
    tell = tick or (lambda _: None)
    watch = watch or quiet.ActivityWatch()
    for name, run in runs.items():
        tell(f"first call of {name}")
        run()  # compiles
    watch.settle()
    watch.begin()
    _warm([runs[name] for name in plain or runs], WARM_S)
    once = {name: _seconds(run, sample_s) for name, run in runs.items()}
    calls = max(1, min(100, math.ceil(sample_s / max(min(once.values()), 1e-9))))
    untimed = untimed_calls(once.values())
    need = MIN_ROUNDS * sum((untimed + calls) * seconds for seconds in once.values())
    if need > budget_s and not regardless:
        raise BudgetTooSmall(
            f"{budget_s:g} s do not suffice to measure {len(runs)} candidates {MIN_ROUNDS} times, which "
            f"takes about {need:.2g} s: give dfx.tune or Auto a larger budget_s"
        )
    row = max(calls, min(1000, math.ceil(ROW_S / max(min(once.values()), 1e-9))))
    taken = Rounds(runs)
    drawn = random.Random(0)

    def sample(count: int, untimed: int) -> None:
        names, samples = taken.begin()
        for name in drawn.sample(names, len(names)):
            if rest:
                watch.settle()
            for _ in range(untimed):
                runs[name]()
            samples[name].append(_timed(runs[name], count) * 1e3 / count)
        watch.check()

    start = time.perf_counter()
    for turn in range(2 * rounds):
        if turn >= MIN_ROUNDS and time.perf_counter() - start > budget_s:
            break
        if turn == rounds and taken.drop(CLOSE) < 2:
            break
        tell(f"round {turn + 1} of at most {2 * rounds}")
        sample(calls, untimed)
    # Looked at after each of them, one of two that are alike would seem the faster one sooner or later.
    if plain and (close := taken.compared_further(plain, margin, in_rows=row > calls)):
        until = max(start + budget_s, time.perf_counter() + DOUBT_S * regardless)
        for turn in range(rounds if row > calls else 2 * rounds):
            if time.perf_counter() > until:
                break
            tell(f"round {turn + 1} of at most {2 * rounds} between {' and '.join(close)}")
            sample(row, calls * untimed)
    watch.settle()
    return taken.medians()


def _warm(runs: Sequence[Callable[[], None]], seconds: float) -> None:
    """Calls functions in turn for so long."""
    until = time.perf_counter() + seconds
    for run in itertools.cycle(runs):
        if time.perf_counter() > until:
            return
        run()


def _timed(run: Callable[[], None], calls: int) -> float:
    """Seconds of so many calls, without what makes their arguments."""
    if not isinstance(run, Fresh):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - start
    seconds, left = 0.0, calls
    most = _IN_A_ROW if run.in_a_row() else 1
    while left:
        given = [run.given() for _ in range(min(left, most))]
        if run.wait is not None:
            run.wait()  # for the copies that these are
        start = time.perf_counter()
        run.with_given(*given)
        seconds += time.perf_counter() - start
        left -= len(given)
    return seconds


def _seconds(run: Callable[[], None], sample_s: float) -> float:
    """Seconds of a call; of several if they are short, because the first ones wake threads."""
    start = time.perf_counter()
    fastest = math.inf
    for _ in range(10):
        fastest = min(fastest, _timed(run, 1))
        if time.perf_counter() - start > sample_s:
            break
    return fastest


_NEAR, _TOLD_APART = 0.05, 0.05
"""Of two ways that differ by less than the first by measurement, and not surely, that is taken which is
predicted to take less by the second."""


_FAR = " while the two cores were far from each other"
_ROWS = " in rows of calls"


def the(name: str) -> str:
    """A candidate's name in a sentence: "the original", "Branches(lanes=2)"."""
    return f"the {name}" if name.startswith("original") else name


def pick(
    medians: Medians,
    baseline: str,
    margin: float,
    margins: Mapping[str, float] | None = None,
    predicted: Mapping[str, float] | None = None,
) -> tuple[str, str]:
    """The fastest name and a sentence; the baseline wins unless beaten by ``margin``, and surely.

    Where it is not sure that the fastest one is faster than another that beats the baseline, too, the one
    that is predicted to be faster is taken: a few rounds tell less of two than the model does.

    Args:
        medians: What was measured.
        baseline: Has to be beaten.
        margin: By this share of its time.
        margins: By name, of those that have to gain something else.
        predicted: Milliseconds by name, of those of which there is a model.
    """
    needs = dict.fromkeys(medians, margin) | dict(margins or {})
    base = medians[baseline]
    said = the(baseline)
    others = sorted(medians.beside(baseline), key=lambda name: medians[name])
    if not others:
        return baseline, f"{said} ({base:.3g} ms) is the only candidate"
    faster = [name for name in others if medians.beats(name, baseline, needs[name])]
    if faster:
        name = _predicted_best(medians, faster, predicted or {})
        reason = f"{the(name)} took {medians[name]:.3g} ms, {said} {base:.3g} ms"
        reason += _ROWS * bool(medians.in_rows) + _FAR * medians.far
        if name != faster[0]:
            least = medians[faster[0]]
            reason += f"; {the(faster[0])} {least:.3g} ms, which is not surely less"
        return name, reason
    reason = (
        f"{said} ({base:.3g} ms) is not beaten by {the(others[0])} ({medians[others[0]]:.3g} ms)"
        + _ROWS * bool(medians.in_rows)
    )
    needed = max(needs[others[0]], medians.least)
    if needed > margin:
        reason += f", which has to gain {needed:.0%}{_FAR * medians.far}"
    if medians[others[0]] <= base * (1 - needed):
        reason += f", which was {medians.doubt(others[0], baseline)}"
    return baseline, reason


def _predicted_best(medians: Medians, faster: Sequence[str], known: Mapping[str, float]) -> str:
    """The first of ``faster``, or what rounds do not tell from it and is predicted to take clearly less."""
    first = faster[0]
    near = [
        name
        for name in faster[1:]
        if known.get(name, math.inf) < (1 - _TOLD_APART) * known.get(first, 0.0)
        and medians[name] <= (1 + _NEAR) * medians[first]
        and medians.doubt(first, name)
    ]
    return min(near, key=lambda name: known[name], default=first)
