"""Which operator has which rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynaflow_xla.batch.states import State

Rule = Callable[[Any], State | list[State]]
RULES: dict[str, Rule] = {}

# Rules that keep track of known values, or whose sizes may hold the batch.
RULE_FIRST: set[str] = set()
# Arguments that say the shape of the result and nothing else: it is held against the state anyway.
SIZES: dict[str, tuple[str, ...]] = {}
OrderRule = Callable[[Any], State | list[State] | None]
IN_ORDER: dict[str, OrderRule] = {}
"""Rules that know rows in an order of data's; asked first, about all states; None: nothing to say."""

# Families of rules that treat the elements of an order as rows.
BY_ROWS = {
    "activations", "contractions", "indexing", "layers", "pointwise", "reductions", "shapes",
}  # fmt: skip


def in_order(*names: str) -> Callable[[Any], Any]:
    """Registers a function as the rule of operators for rows in an order that data gives."""

    def register(function: Any) -> Any:
        for name in names:
            if name in IN_ORDER:
                raise ValueError(f"two rules for {name}")
            IN_ORDER[name] = function
        return function

    return register


def rule(*names: str, first: bool = False, sizes: tuple[str, ...] = ()) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of aten operators (without ``aten.``).

    Numbers that depend on the batch size are refused unless the rule looks at them (``Site.state``,
    ``pair``, ``fixed``) or they are in one of ``sizes``.

    Args:
        *names: Kinds of operators.
        first: Ask the rule also where all operands are the same in every nano-batch.
        sizes: Names of arguments that say nothing but the shape of the result.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"two rules for {name}")
            RULES[name] = function
            if first:
                RULE_FIRST.add(name)
            SIZES[name] = sizes
        return function

    return register


COUNTS: set[str] = set()
"""Operators that take numbers which each nano-batch counts for itself."""
