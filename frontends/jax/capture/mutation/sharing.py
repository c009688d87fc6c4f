"""What several functions that make one plan may not share: what one of them changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.graph import Graph, Operator

_READS = frozenset({"get"})
"""Operators that leave a reference to memory as it is."""


def is_reference(aval: Any) -> bool:
    """Whether a value is memory by reference."""
    return type(aval).__name__.endswith("Ref")


def refers(eqn: Any) -> bool:
    """Whether an equation makes, reads or writes memory by reference (``jax.new_ref``), also further in."""
    if any(is_reference(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return True
    return any(type(effect).__name__ == "InternalMutableArrayEffect" for effect in eqn.effects)


def check_apart(graph: Graph, avals: Sequence[Any]) -> None:
    """That no function of a plan of several uses what another one changes.

    Nothing that a function makes can come to another one but through an object that it changes: a
    variable of a module, or memory that a reference names.

    Args:
        graph: Of all functions.
        avals: Its values as JAX knows them.

    Raises:
        PlanError: one does; with both operators.
    """
    if not any(op.function for op in graph.ops):
        return
    maker = {v: op for op in graph.ops for v in op.outputs}
    used: dict[int, list[Operator]] = {}
    for op in graph.ops:
        for value in op.inputs:
            made = maker.get(value)
            if made is not None and made.function and op.function and made.function != op.function:
                raise _shared(made, op)
            if made is None and is_reference(avals[value]):
                used.setdefault(value, []).append(op)
    for ops in used.values():
        writes = [op for op in ops if op.kind not in _READS]
        for first in writes:
            for second in ops:
                if first.function and second.function and first.function != second.function:
                    raise _shared(*sorted((first, second), key=lambda op: op.index))


def _shared(first: Operator, second: Operator) -> PlanError:
    return PlanError(
        f"{first.function!r} and {second.function!r} share what one of them changes: {first.kind}"
        f"{first.at} makes what {second.kind}{second.at} uses. Functions of one plan run beside "
        "each other, so each needs its own: copy it, or write one function that calls them in order and "
        "schedule that"
    )
