"""Updates of large arrays in place: they stay in the outer program, where XLA needs no copy of the array.

``cache.at[i].set(x)`` writes a few elements if nothing reads the old array any more: XLA updates a donated
argument, or a loop's carried value, where it lies. A lane is given arguments to read and hands its results
over by a copy, so there the same operator moves the whole array, twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax.extend import core as jcore

from dynaflow_xla import machine
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture import costs
from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.ir.graph import Operator, OuterReason
from dynaflow_xla.ir.work import NO_SPREAD

MIN_BYTES = 1 << 18
"""Smaller arrays are copied in less time than lanes take to meet before and after an outer operator."""

_WORTH = 0.25
"""A loop stays in the outer program if copies of what it carries would take this part of its own time."""

_UPDATES = frozenset(
    "dynamic_update_slice scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min "
    "scatter-max scatter_max scatter-apply".split()
)


def kept_outside(captured: Captured) -> Captured:
    """The same function with its updates of large arguments in the outer program.

    An argument's array can be taken if what is updated leads from an argument to a result.
    """
    graph = captured.graph
    chains = _updates(captured)
    from_inputs = set(graph.inputs)
    for _, pairs in chains:
        from_inputs.update(made for given, made in pairs if given in from_inputs)
    to_outputs = set(graph.outputs)
    for _, pairs in reversed(chains):
        to_outputs.update(given for given, made in pairs if made in to_outputs)
    outside: dict[int, str] = {}
    for op, pairs in chains:
        mine = [given for given, made in pairs if given in from_inputs and made in to_outputs]
        size = sum(graph.values[value].bytes for value in mine)
        if size >= MIN_BYTES and _worth(op, size):
            outside[op.index] = f"updates {size / 1e6:.1f} MB of an argument in place"
    if not outside:
        return captured
    ops = [_outer(op, outside[op.index]) if op.index in outside else op for op in graph.ops]
    return replace(captured, graph=replace(graph, ops=tuple(ops)))


def _updates(captured: Captured) -> list[tuple[Operator, list[tuple[int, int]]]]:
    """Operators that can write a result where an operand lies, with pairs of these values."""
    found = []
    for op in captured.graph.ops:
        if op.outer or not (positions := _positions(op)):
            continue
        numbers = {captured.variables[value]: value for value in op.inputs}
        invars = op.payload.invars
        given = [None if isinstance(v, jcore.Literal) else numbers[v] for v in invars]
        pairs = [(value, op.outputs[o]) for i, o in positions if (value := given[i]) is not None]
        found.append((op, pairs))
    return found


def _positions(op: Operator) -> list[tuple[int, int]]:
    """Numbers of operands with those of the results that can take their place."""
    eqn: Any = op.payload
    if op.kind in _UPDATES:
        return [(0, 0)]
    if op.kind == "scan":
        consts, carried = _compat.scan_counts(eqn.params)
        return [(consts + i, i) for i in range(carried)]
    if op.kind == "while":
        consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        return [(consts + i, i) for i in range(len(eqn.outvars))]
    return []


def _outer(op: Operator, reason: str) -> Operator:
    made = replace(op, outer=True, outer_reason=OuterReason(reason))
    if op.kind not in _UPDATES:
        return made
    written = sum(costs.aval_bytes(v.aval) for v in op.payload.invars[1:])
    cost = written / costs.BYTES_PER_NS + costs.OP_OVERHEAD_NS
    return replace(made, bytes_moved=2 * written, cost_ns=cost, spread=NO_SPREAD)


def _worth(op: Operator, size: int) -> bool:
    return (
        op.kind in _UPDATES
        or 2 * size / machine.numbers().fresh_copy_bytes_per_ns >= _WORTH * op.cost_ns
    )
