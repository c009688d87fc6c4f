"""Measuring a JAX function's candidates for ``Auto``: on copies, at top level, never with effects."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jaxlib

from dynaflow_xla import machine
from dynaflow_xla._version import __version__
from dynaflow_xla.errors import SeparabilityError
from dynaflow_xla.ffi import _compat as ffi_compat
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.backend import Refused
from dynaflow_xla.frontends.jax.capture import capture, costs as costs_of
from dynaflow_xla.frontends.jax.capture.tracing import Capturing
from dynaflow_xla.frontends.jax.regions import on_caller
from dynaflow_xla.frontends.jax.tuning import originals, ways as ways_to_run
from dynaflow_xla.planning.instructions import Launch
from dynaflow_xla.strategies import identity
from dynaflow_xla.strategies.auto import too_large
from dynaflow_xla.timelines.simulator import total_ns
from dynaflow_xla.tuning import autotune, budget, choice as choice_of, quiet

_FAR_BEHIND = 1.3
_FAR_BEHIND_MS = 0.1
"""A candidate predicted to take so many times as long as the best one, and so much longer, is not
compiled. What small programs cost beside their operators is known to some tens of microseconds only."""

_GAIN = 1.05
"""What is predicted to take so many times as long as the best candidate is compiled after it."""

_ALONE = (
    "auto: measured alone, as a call at top level; inside a loop, vmap or a larger program the same runs, "
    "and another may be faster there: schedule that program, or call fast.original in it"
)

_ONE_LANE = "one lane"
_ORIGINAL = "no lane"

_SHORT_MARGIN = 0.1
"""By so much a plan has to beat a short original on the caller's thread: what lanes take to meet differs by
some microseconds from one process to the next. And by so much a longer original has to gain there, as Python
does nothing else meanwhile."""

ON_CALLER, WAITED_FOR = originals.NAMES["caller"], originals.NAMES["waited"]

_MEASURED = 4
"""At most so many candidates are measured beside the original."""


@dataclass(frozen=True)
class Choice(choice_of.Choice):
    """What Auto decided for one signature."""

    @property
    def on_caller(self) -> bool:
        """Whether the original runs on the thread that calls it, or is begun there."""
        return self.kind in on_caller.NAMES

    @property
    def otherwise(self) -> bool:
        """Whether the original runs as a program that is compiled otherwise."""
        return self.kind in originals.NAMES

    @property
    def kind(self) -> str:
        """By which of the function's programs it runs: "lanes", "original", or one of ``originals.NAMES``."""
        if self.child is not None:
            return "lanes"
        return originals.KINDS.get(self.candidate, "original")

    @property
    def name(self) -> str:
        """What runs: the original, compiled otherwise or not, or the candidate."""
        return self.candidate if self.otherwise else super().name

    def lines(self) -> list[str]:
        """The decision, and where it holds, for ``explain``."""
        lines = super().lines()
        return [*lines, _ALONE] if self.medians_ms else lines


def choose(
    fast: Any, args: Any, kwargs: Any, watch: quiet.ActivityWatch, *, budget_s: float | None = None
) -> Choice:
    """Decides for one signature, from the disk cache or by measuring.

    Args:
        fast: The scheduled function, whose strategy is ``Auto``.
        args: Of the call.
        kwargs: Of the call.
        watch: Of this thread's turn to measure.
        budget_s: Seconds that it may take, see ``Budget``. The disk cache is not asked then, and
            regions are profiled first; None: the strategy's budget, and estimated costs.

    Raises:
        autotune.BudgetTooSmall: nothing is decided then.
        quiet.Disturbed: something else ran; nothing is decided.
    """
    asked = fast._options.strategy.budget_s if budget_s is None else budget_s
    spending = budget.Budget(fast.decisions.purse, asked)
    try:
        return _choose(fast, args, kwargs, watch, spending, tuned=budget_s is not None)
    finally:
        spending.end()


def _choose(
    fast: Any,
    args: Any,
    kwargs: Any,
    watch: quiet.ActivityWatch,
    spending: budget.Budget,
    *,
    tuned: bool,
) -> Choice:
    start = time.perf_counter()
    strategy = fast._options.strategy
    if jax.process_count() > 1:
        return Choice(None, "more than one process: no measurement, the original runs")
    with Capturing():
        began = budget.clock()
        traced = fast.original.trace(*args, **kwargs)  # a plain call would, too
    spending.original(budget.clock() - began)
    if fast.spans_too_much(_compat.traced_consts(traced), {}):
        return Choice(
            None, "what the function closes over spans several devices: it is not measured"
        )
    candidates = fast.candidates()
    firstly = fast.with_strategy(next(iter(candidates.values())))
    began = budget.clock()
    try:
        first = firstly.planned(args, kwargs)
    except Refused as error:
        return Choice(None, str(error))
    planning_s = budget.clock() - began
    if reason := _not_measured(first):
        return Choice(None, reason)
    here = originals.may_help(fast, first.pg.regions, args, kwargs)
    modelled = not ways_to_run.on_a_device()  # the model is one of cores
    small = choice_of.too_small(first.pg.regions, strategy) if modelled else ""
    if small and not here:
        return Choice(None, small)
    key = _key(fast, first, candidates.values(), here, bool(small))
    if not (tuned or spending.checks) and (
        known := choice_of.from_disk(key, partial(_child, fast), Choice)
    ):
        return known
    with spending:
        ways = ways_to_run.CompiledWays(fast, args, kwargs, spending, first)
        costs = None
        if (
            tuned
            and not fast.options_by_plan()  # one program has no stamps between regions
            and not spending.refuses("a profile", ways.compile_s(first))
        ):
            watch.settle()
            watch.begin()
            timeline = first.measured(firstly.flat_inputs(args, kwargs), fast._options.name)
            watch.check()
            costs = autotune.RegionCosts.of(timeline, first.pg)
        predicted: dict[str, float] = {}
        left_out = dict.fromkeys(candidates, small)
        refused: dict[str, str] = {}
        if here and not modelled:  # there it is the likeliest, and the first to have time for
            refused[originals.NAMES[here]] = ways.add_original(here)
        if not small:
            kept, predicted, left_out = _predicted(
                fast, args, kwargs, costs, spending, planning_s, len(first.pg.regions), here,
                modelled,
            )  # fmt: skip
            left_out |= {name: why for name in kept if (why := ways.add(name))}
        if here and modelled:
            refused[originals.NAMES[here]] = ways.add_original(here)
        left_out |= {name: why for name, why in refused.items() if why}
        if not modelled:
            predicted = {}  # it ranks them, but is no time of theirs
        if ways.refused and len(ways.runs) == 1:
            if spending.asked:
                raise ways.too_small()
            seconds = time.perf_counter() - start
            return Choice(
                None, ways.refused, {}, predicted, left_out, seconds, memory=ways.fresh_memory(),
                later=spending.later(ways.call_s),
            )  # fmt: skip
        predicted = _of_the_original(fast, traced) | predicted
        medians = ways.measure(watch)
    choice, reason = _picked(medians, strategy.margin, predicted)
    seconds = time.perf_counter() - start
    child = _child(fast, choice)
    stays = choice == "original"
    made = Choice(
        child, reason, dict(medians), predicted, left_out, seconds, costs, choice, ways.fresh_memory(),
        medians.far, later=spending.later(ways.call_s) if stays else None,
    )  # fmt: skip
    if not (stays or fast.options_by_plan()):
        made = choice_of.checked_later(made, "original", spending)
    if not ((ways.refused or spending.lacked) and stays):  # a later process may have more time
        choice_of.to_disk(key, made)
    return made


def _picked(
    medians: autotune.Medians, margin: float, predicted: dict[str, float]
) -> tuple[str, str]:
    """What runs, and why: see ``_SHORT_MARGIN``."""
    cautious = max(margin, _SHORT_MARGIN)
    if ON_CALLER in medians and medians.beats(ON_CALLER, "original", margin):
        return autotune.pick(medians, ON_CALLER, cautious, None, predicted)
    return autotune.pick(medians, "original", margin, {WAITED_FOR: cautious}, predicted)


def _key(fast: Any, first: Any, candidates: Iterable[Any], here: str, small: bool) -> str | None:
    """The name of a decision on disk: everything that it depends on; None if that cannot be told."""
    options = fast._options
    lasting = identity.on_disk(candidates, options.user)
    if lasting is None:
        return None
    return autotune.cache_key(
        first.pg.to_json(), options.name, lasting, options.strategy.margin,
        __version__, jax.__version__, jaxlib.__version__, ffi_compat.compile_settings(),
        options.lanes, options.gpu, options.in_axes, options.out_axes, options.batch_size,
        options.compiler_options or {}, fast.jit_compiler_options, fast._jit_options,
        here, small, *fast.backend.place(),
    )  # fmt: skip


def _of_the_original(fast: Any, traced: Any) -> dict[str, float]:
    """What the model expects of the original, in milliseconds; nothing where it has no model of it."""
    if fast.backend.platform() != "cpu" or jax.default_backend() != "cpu":
        return {}
    return {"original": costs_of.original_ns(traced.jaxpr, machine.cores()) / 1e6}


def _not_measured(made: Any) -> str:
    """Why a function is not even measured, or ""."""
    outer = sorted(
        {op.kind for op in made.captured.graph.ops if op.outer and capture.acts(op.payload)}
    )
    if outer:
        return f"the function has effects or callbacks ({', '.join(outer)}): it is not measured"
    return ""


def known_costs(costs: autotune.RegionCosts | None, made: Any) -> dict[int, float] | None:
    """Measured costs for the regions of a planned entry; None without any."""
    if costs is None:
        return None
    return costs.apply(made.pg, made.split.sizes if made.split is not None else ())


def _predicted(
    fast: Any,
    args: Any,
    kwargs: Any,
    costs: autotune.RegionCosts | None,
    spending: budget.Budget,
    planning_s: float,
    regions: int,
    here: str,
    modelled: bool,
) -> tuple[list[str], dict[str, float], dict[str, str]]:
    """Candidates worth measuring, what is predicted of each, and why others are left out."""
    predicted: dict[str, float] = {}
    left_out: dict[str, str] = {}
    useful: list[str] = []
    # How much faster a pool of one thread runs the whole is not in the model: always measured.
    kept: list[str] = []
    plans: dict[Any, str] = {}
    for number, (name, candidate) in enumerate(fast.candidates().items()):
        if number and (why := spending.refuses("planning it", planning_s)):
            left_out[name] = why
            continue
        if why := too_large(candidate, regions):
            left_out[name] = why
            continue
        try:
            made = fast.with_strategy(candidate).planned(args, kwargs)
        except SeparabilityError as error:
            left_out[name] = str(error).splitlines()[0]
            continue
        known = known_costs(costs, made)
        predicted[name] = (
            total_ns(
                made.plan, made.pg, known, program_ns=made.program_ns, caller_ns=made.caller_ns
            )
            / 1e6
        )
        program = _program(made)
        same = plans.setdefault(program, name)
        if program == _ORIGINAL:
            left_out[name] = "every region has all cores: the original's program"
        elif made.on_caller:
            left_out[name] = (
                f"it is the {ON_CALLER}"
                if here
                else "it runs on the caller's thread, where arguments on several devices cannot"
            )
        elif made.unproven:
            left_out[name] = "it is not proved that a split keeps the values"
        elif same != name:
            left_out[name] = f"the same programs as {same}"
        elif program == _ONE_LANE and fast.options_by_plan():
            left_out[name] = "one lane: a chain, as the original's program is one"
        else:
            useful.append(name)
            if program == _ONE_LANE:
                kept.append(name)
    useful.sort(key=lambda name: predicted[name])
    best = predicted[useful[0]] if useful else 0.0
    for name in useful:
        if name in kept:
            continue
        if len(kept) >= _MEASURED:
            left_out[name] = f"{_MEASURED} others are predicted to be faster"
        elif modelled and predicted[name] > max(_FAR_BEHIND * best, best + _FAR_BEHIND_MS):
            left_out[name] = (
                f"predicted to take {predicted[name] / best:.2f} times the best one's time"
            )
        else:
            kept.append(name)
    # Perhaps there is time for one only: lanes first, if they are predicted to gain. And for two of different
    # kinds rather than for a second split.
    kept.sort(key=lambda name: (predicted[name] > _GAIN * best, predicted[name]))
    kinds = [type(fast.candidates()[name]) for name in kept]
    again = {name for place, name in enumerate(kept) if kinds[place] in kinds[:place]}
    return sorted(kept, key=lambda name: name in again), predicted, left_out


def _program(made: Any) -> Any:
    """What is equal for plans that compile to the same programs: XLA orders one lane as it likes."""
    if made.plan.replaces:
        return object()
    if len(made.plan.lanes_used) > 1 or made.split is not None:
        return made.plan.instructions
    if not made.plan.lanes_used:
        return _ORIGINAL
    wide = any(i.lane < 0 for i in made.plan.instructions if isinstance(i, Launch))
    return made.plan.instructions if wide and made.plan.cores else _ONE_LANE


def _child(fast: Any, choice: str) -> Any:
    candidate = fast.candidates().get(choice)
    return None if candidate is None else fast.with_strategy(candidate)
