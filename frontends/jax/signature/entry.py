"""From a captured function to a planned one: the cut, the split, the recording, the plan, its proof."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from dynaflow_xla import machine
from dynaflow_xla.errors import RuleError
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.batch import split as splitting
from dynaflow_xla.frontends.jax.capture import capture, costs
from dynaflow_xla.frontends.jax.capture.tracing import exact_types
from dynaflow_xla.frontends.jax.planned import Planned
from dynaflow_xla.frontends.jax.regions import handed_out, on_caller
from dynaflow_xla.frontends.jax.regions.functions import region_function, replaced_function
from dynaflow_xla.frontends.jax.signature import backends
from dynaflow_xla.frontends.jax.xla import loops
from dynaflow_xla.ir import lapack
from dynaflow_xla.ir.graph import Graph
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.rules import as_rules
from dynaflow_xla.kernels import CudaKernel
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.base import Context, Split, record, sizes_of
from dynaflow_xla.strategies.branches import Branches
from dynaflow_xla.strategies.predicted import fastest
from dynaflow_xla.strategies.sequential import Sequential

_LANE_SHARE, _LANE_SHARE_INSIDE = 0.02, 0.006
"""Of the work: more than that must a lane's entry not cost where all else would be as without it."""
_FOR_BLAS = 10.0
"""So many times that share of what is mostly LAPACK's work."""


def build_entry(
    captured: capture.Captured,
    options: Settings,
    batched: splitting.Splittable | None = None,
    *,
    derived: bool = False,
    alone: bool = False,
    donates: bool = False,
) -> Planned:
    """Partitions, plans and validates a captured function; it is compiled when it first runs.

    Args:
        captured: The function at its full size.
        options: What the user asked for.
        batched: The same function with what is needed to split it, if it has a batch.
        derived: It is made of the user's function, see ``Context``.
        alone: Calls run it as a program of its own, not as a part of a larger one.
        donates: Calls give arrays away.
    """
    with exact_types(captured):
        return _build(captured, options, batched, derived, alone, donates)


def _build(
    captured: capture.Captured,
    options: Settings,
    batched: splitting.Splittable | None,
    derived: bool,
    alone: bool,
    donates: bool,
    given: tuple[int, ...] = (),
) -> Planned:
    """``given``: of the sizes that the cost model tries, those of this attempt."""
    t0 = time.perf_counter()
    strategy = options.strategy
    graph = captured.graph
    backend = backends.of(options)
    backend.refuse(captured)
    rules = options.rules
    if rules is None and not options.default_cut:
        made = strategy.rules(graph)
        rules = None if made is None else as_rules(made, f"rules of strategy {strategy!r}")
    rules = backend.rules(rules, captured)
    program_ns = _program_ns(graph) if alone and backend.cores() else 0.0
    cores = backend.cores()
    context = Context(
        batch_size=None if batched is None else batched.batch,
        shapes=tuple(graph.values[v].shape for v in graph.inputs),
        platform=backend.platform(),
        lanes=options.lanes,
        user=options.user,
        cores=cores,
        lane_cores=options.lane_cores_of(cores) if cores else 1,
        free_widths=options.free_widths and cores > 0,
        derived=derived,
        program_ns=program_ns,
        caller_ns=_caller_ns(options) if program_ns else 0.0,
        one_lane_ns=_one_lane_ns(options, graph, alone) if backend.cores() and not donates else 0.0,
    )
    split = None
    sizes, asked = () if batched is None else batched.sizes, Split(assume_separable=True)
    if not sizes:
        sizes, asked = sizes_of(strategy, context)
        if batched is not None and not given and len(tried := asked.tried(batched.batch)) > 1:
            made = [
                _build(captured, options, batched, derived, alone, donates, each) for each in tried
            ]
            number, told = fastest(made, tried)
            made[number].notes.append(told)
            return made[number]
        sizes = given or sizes
    if sizes and batched is not None:
        split = splitting.split(
            batched, sizes, rules, assume_separable=asked.assume_separable, fused=backend.fused,
            joins=asked.joins,
        )  # fmt: skip
        captured, pg = split.captured, split.pg
    else:
        captured = backend.whole(captured)
        pg = partition(captured.graph, rules, fused=backend.fused)
    pg = backend.regions(pg)
    if split is not None:
        if told := asked.conditions.text():
            pg = replace(pg, notes=(*pg.notes, f"nano-batches are {told}"))
        split = replace(split, expanded=replace(split.expanded, pg=pg))
    t1 = time.perf_counter()
    # Nothing is proved of residuals that several nano-batches would share.
    in_parts = batched is not None and bool(batched.sizes)
    recording = record(strategy, pg, context, joint=not in_parts)
    if split is not None:
        split, recording = split.grouped(recording)
        captured, pg = split.captured, split.pg
    plan = build_plan(
        pg, recording, lanes=options.lanes, strategy_text=repr(strategy), cores=context.cores,
        width=context.lane_cores,
    )  # fmt: skip
    validate(plan, pg)
    t2 = time.perf_counter()
    if backend.plans_loops:
        parts = [captured] if split is None else list(split.resolved.at.values())
        for part in parts:
            _plan_bodies(part, options, keep_rules=split is not None)
    functions: dict[int, Callable[..., list[Any]]] = {}
    for decision in recording.decisions:
        region = pg.regions[decision.region]
        if split is not None:
            functions[region.id] = split.function(region.id, decision)
        elif decision.replace is None:
            functions[region.id] = region_function(captured, region)
        elif isinstance(decision.replace, CudaKernel):
            functions[region.id] = backend.kernel(decision.replace, captured, region)
        else:
            functions[region.id] = replaced_function(
                decision.replace, captured, region, str(decision.source)
            )
    return backend.build(
        options=options, captured=captured, pg=pg, plan=plan, functions=functions,
        seconds={"partition": t1 - t0, "plan": t2 - t1}, split=split,
        program_ns=context.program_ns, apart=alone and plans_apart(options),
    )  # fmt: skip


def plans_apart(settings: Settings) -> bool:
    """Whether calls that are programs of their own have another plan than a part of a larger one.

    Inside of a larger program lanes do not spare a hand-over to XLA's threads. (Rows that were compared with
    the original's in a call alone count everywhere.)
    """
    strategy = settings.strategy
    return (
        isinstance(strategy, Branches | Sequential)
        and strategy.wide
        and backends.of(settings).cores() > 0
        and settings.in_axes is None
    )


def _is_free(settings: Settings) -> bool:
    """Whether the user leaves it to us on which threads a program runs."""
    return plans_apart(settings) and handed_out.options_are_free(settings.compiler_options or {})


def _caller_ns(settings: Settings) -> float:
    """The longest plan of one lane that runs on the thread that calls it, where it is alone."""
    return on_caller.MAX_NS if _is_free(settings) else 0.0


def _one_lane_ns(settings: Settings, graph: Graph, alone: bool) -> float:
    """The shortest program that may be on one lane where more cores gain nothing.

    As a part of a larger program it is not fused with what is around it: the lane must cost still less.
    It may cost more of what is mostly LAPACK: for matrices of some hundred rows OpenBLAS's threads take up to
    2.5 times as long as one.
    """
    # Arrays may span several devices, as which no custom call is shared out: the original is.
    if not _is_free(settings) or jax.device_count() > 1:
        return 0.0
    by_blas = sum(op.cost_ns for op in graph.ops if op.kind in lapack.FACTORIZATIONS)
    share = _LANE_SHARE if alone else _LANE_SHARE_INSIDE
    if 2 * by_blas >= sum(op.cost_ns for op in graph.ops):
        share *= _FOR_BLAS
    return machine.numbers().lanes_ns / share


def _program_ns(graph: Graph) -> float:
    """What XLA takes to hand a program of these operators to a thread of its own."""
    if not _compat.dispatches_asynchronously():
        return 0.0
    handed_over = sum(op.flops for op in graph.ops) >= costs.HANDED_OVER_FLOPS
    return machine.numbers().program_ns if handed_over else 0.0


def _plan_bodies(captured: capture.Captured, options: Settings, *, keep_rules: bool) -> None:
    """Plans the bodies of a captured function's loops and puts them in ``captured.loops``.

    A body that makes one region alone, without a loop in it, has nothing to schedule and stays.

    Args:
        captured: The function.
        options: Of its schedule.
        keep_rules: JAX differentiates the result: functions with derivative rules of their own stay
            whole.
    """
    for op in captured.graph.ops:
        if op.kind != "scan" or op.outer or op.index in captured.loops:
            continue
        body = loops.captured_body(captured, op.index, keep_rules or captured.keeps_rules)
        own = f"{options.name}.scan"
        # The batch axes are others in there.
        strategy = Branches() if options.in_axes is not None else options.strategy
        settings = replace(options, name=own, in_axes=None, batch_size=None, strategy=strategy)
        if settings.rules is not None:
            fitting = tuple(rule for rule in settings.rules if loops.fits(rule, body))
            settings = replace(settings, rules=fitting or None, default_cut=not fitting)
        try:
            entry: Any = build_entry(body, settings)
        except RuleError:  # the strategy's rules speak of the function around the loop
            entry = build_entry(body, replace(settings, rules=None, default_cut=True))
        if len(entry.pg.regions) > 1 or entry.bodies():
            captured.loops[op.index] = loops.with_body(op.payload, entry, op.index)
