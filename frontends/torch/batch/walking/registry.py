"""Which operator has which rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynaflow_xla.batch.rule_table import RuleTable
from dynaflow_xla.batch.states import State

Rule = Callable[[Any], State | list[State]]
RULES: RuleTable[Rule] = RuleTable()

# Rules that keep track of known values, or whose sizes may hold the batch.
RULE_FIRST: set[str] = set()
# Arguments that say the shape of the result and nothing else: it is held against the state anyway.
SIZES: dict[str, tuple[str, ...]] = {}
OrderRule = Callable[[Any], State | list[State] | None]
IN_ORDER: RuleTable[OrderRule] = RuleTable()
"""Rules that know rows in an order of data's; asked first, about all states; None: nothing to say."""
in_order = IN_ORDER.of

# Families of rules that treat the elements of an order as rows.
BY_ROWS = {
    "activations", "contractions", "indexing", "layers", "pointwise", "reductions", "shapes",
}  # fmt: skip


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
        RULES.of(*names)(function)
        if first:
            RULE_FIRST.update(names)
        SIZES.update(dict.fromkeys(names, sizes))
        return function

    return register


LOOPS = ("while_loop",)
"""Operators that run a function again and again: what mixes rows there is not joined."""

COUNTS: set[str] = set()
"""Operators that take numbers which each nano-batch counts for itself."""
