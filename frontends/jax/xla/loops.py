"""Loops under a schedule (backend ``xla``): what a ``lax.scan`` does each turn gets a plan of its own.

A model of 32 equal layers is a scan, and its layers are where the work is. The body is captured,
partitioned and planned once, like a function; its plan is traced in its place, gates included, and
the loop around it stays what it was. JAX differentiates and maps the loop as it would the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from dynaflow_xla.errors import RuleError
from dynaflow_xla.frontends.jax.capture import capture
from dynaflow_xla.frontends.jax.capture.physical import spec
from dynaflow_xla.ir.graph import Graph
from dynaflow_xla.ir.rules import check_matches
from dynaflow_xla.strategies.branches import Branches

if TYPE_CHECKING:
    from dynaflow_xla.frontends.jax.signature.entry import Options
    from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry


@dataclass(frozen=True)
class Loop:
    """A loop with a scheduled body.

    Attributes:
        entry: The plan of the body; its inputs are the body's.
        equation: The loop's equation with that body.
    """

    entry: XlaEntry
    equation: Any


def schedule_bodies(
    captured: capture.Captured,
    options: Options,
    build_entry: Callable[..., Any],
    *,
    keep_rules: bool,
) -> None:
    """Plans the bodies of a captured function's loops and puts them in ``captured.loops``.

    A body that makes one region alone, without a loop in it, has nothing to schedule and stays.

    Args:
        captured: The function.
        options: Of its schedule.
        build_entry: Plans a captured function under options.
        keep_rules: JAX differentiates the result: functions with derivative rules of their own stay
            whole.
    """
    for op in captured.graph.ops:
        if op.kind != "scan" or op.outer or op.index in captured.loops:
            continue
        body = _captured_body(captured, op.index, keep_rules or captured.keeps_rules)
        own = f"{options.name}.scan"
        # The batch axes are others in there.
        strategy = Branches() if options.in_axes is not None else options.strategy
        settings = replace(options, name=own, in_axes=None, batch_size=None, strategy=strategy)
        if settings.rules is not None:
            fitting = tuple(rule for rule in settings.rules if _fits(rule, body))
            settings = replace(settings, rules=fitting or None, default_cut=not fitting)
        try:
            entry = build_entry(body, settings)
        except RuleError:  # the strategy's rules speak of the function around the loop
            entry = build_entry(body, replace(settings, rules=None, default_cut=True))
        if len(entry.pg.regions) > 1 or entry.bodies():
            captured.loops[op.index] = Loop(entry, _with_body(op.payload, entry, op.index))


def rules_here(rules: Sequence[Any], captured: capture.Captured) -> tuple[Any, ...]:
    """The rules without those that match nothing here but something in the body of a loop."""
    return tuple(
        rule for rule in rules if _matches(rule, captured.graph) or not _fits_inside(rule, captured)
    )


def _fits(rule: Any, captured: capture.Captured) -> bool:
    return _matches(rule, captured.graph) or _fits_inside(rule, captured)


def _fits_inside(rule: Any, captured: capture.Captured) -> bool:
    return any(_fits(rule, body) for body in _bodies(captured))


def _matches(rule: Any, graph: Graph) -> bool:
    try:
        return bool(check_matches(rule, graph))
    except RuleError:
        return False


def _bodies(captured: capture.Captured) -> Iterator[capture.Captured]:
    for op in captured.graph.ops:
        if op.kind == "scan" and not op.outer:
            yield _captured_body(captured, op.index, captured.keeps_rules)


def _captured_body(captured: capture.Captured, index: int, keep_rules: bool) -> capture.Captured:
    closed = captured.graph.ops[index].payload.params["jaxpr"]
    return capture.capture(closed, 0, f"{captured.graph.name}.scan", keep_rules=keep_rules)


def _with_body(equation: Any, entry: XlaEntry, index: int) -> Any:
    closed = equation.params["jaxpr"]

    def body(*inputs: Any) -> list[Any]:
        return entry.evaluate([*closed.consts, *inputs], number=index)

    made = jax.make_jaxpr(body)(*[spec(v.aval) for v in closed.jaxpr.invars])
    return equation.replace(params={**equation.params, "jaxpr": made})
