"""Loops under a schedule (backend ``xla``): what a ``lax.scan`` does each turn gets a plan of its own.

A model of 32 equal layers is a scan, and its layers are where the work is. The body is captured,
partitioned and planned once, like a function; its plan is traced in its place, gates included, and
the loop around it stays what it was. JAX differentiates and maps the loop as it would the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from dynaflow_xla.errors import RuleError
from dynaflow_xla.frontends.jax.capture import capture
from dynaflow_xla.frontends.jax.capture.physical import spec
from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry
from dynaflow_xla.ir.graph import Graph
from dynaflow_xla.ir.rules import check_matches


def rules_here(rules: Sequence[Any], captured: capture.Captured) -> tuple[Any, ...]:
    """The rules without those that match nothing here but something in the body of a loop."""
    return tuple(
        rule for rule in rules if _matches(rule, captured.graph) or not _fits_inside(rule, captured)
    )


def fits(rule: Any, captured: capture.Captured) -> bool:
    """Whether a rule matches something here, or in the body of a loop here."""
    return _matches(rule, captured.graph) or _fits_inside(rule, captured)


def _fits_inside(rule: Any, captured: capture.Captured) -> bool:
    return any(fits(rule, body) for body in _bodies(captured))


def _matches(rule: Any, graph: Graph) -> bool:
    try:
        return bool(check_matches(rule, graph))
    except RuleError:
        return False


def _bodies(captured: capture.Captured) -> Iterator[capture.Captured]:
    for op in captured.graph.ops:
        if op.kind == "scan" and not op.outer:
            yield captured_body(captured, op.index, captured.keeps_rules)


def captured_body(captured: capture.Captured, index: int, keep_rules: bool) -> capture.Captured:
    """What a loop does each turn, captured like a function."""
    closed = captured.graph.ops[index].payload.params["jaxpr"]
    return capture.capture(closed, 0, f"{captured.graph.name}.scan", keep_rules=keep_rules)


def with_body(equation: Any, entry: XlaEntry, index: int) -> capture.Loop:
    """The loop that is operator ``index``, with a body that runs as planned."""
    closed = equation.params["jaxpr"]

    def body(*inputs: Any) -> list[Any]:
        return entry.evaluate([*closed.consts, *inputs], number=index)

    made = jax.make_jaxpr(body)(*[spec(v.aval) for v in closed.jaxpr.invars])
    return capture.Loop(equation.replace(params={**equation.params, "jaxpr": made}), entry)
