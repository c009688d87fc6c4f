"""Loops: what the body does to rows in one round it does in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dynaflow_xla.batch.states import (
    Mixed,
    NoRule,
    Refuse,
    Rows,
    Same,
    State,
    Unknown,
    is_plain_same,
)
from dynaflow_xla.frontends.torch.batch.walking.registry import LOOPS, rule
from dynaflow_xla.frontends.torch.batch.walking.walk import Site, Walker
from dynaflow_xla.frontends.torch.capture.capture import capture
from dynaflow_xla.ir.graph import placed

_ROUNDS = 4
"""What is known of a carried value gets less at most so often."""


def _walked(site: Site, body: Any, ins: Sequence[State]) -> list[State]:
    """States of the results of a loop's function.

    Raises:
        Refuse: it mixes rows, with the operator that does.
        NoRule: it holds an operator without a rule.
    """
    evaluators = site.walker.evaluators
    if not evaluators:
        raise NoRule
    captured = capture(body, site.op.kind)
    shapes: dict[int, Any] = {}
    numbers: dict[int, Any] = {}
    for value in captured.graph.values:
        example = captured.examples[value.id]
        if isinstance(example, torch.Tensor):
            shapes[value.id] = tuple(e.shape(example.shape, "a tensor") for e in evaluators)
        elif isinstance(example, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            first, second = (e(example) for e in evaluators)
            if first is not None and second is not None:
                numbers[value.id] = (first, second)
    walker = Walker(captured, shapes, numbers, evaluators=evaluators)
    states = walker.run(dict(zip(captured.graph.inputs, ins, strict=True)))
    made = [states[out] if isinstance(out, int) else Same() for out in captured.outputs]
    for state in made:
        if isinstance(state, Mixed | Unknown):
            found = state.finding
            told = f"has {found.op}{placed(found.source)} in its body: {found.reason}"
            raise Refuse(told) if isinstance(state, Mixed) else NoRule(told)
    return made


def _both(before: State, after: State) -> State:
    """What is known of a value that is one of two."""
    if before == after:
        return before
    if isinstance(before, Rows) and isinstance(after, Rows) and not before.power | after.power:
        places = [(s.axis, s.outer, s.inner) for s in (before, after)]
        if places[0] == places[1]:
            return Rows(*places[0])
    if isinstance(before, Same) and isinstance(after, Same) and not before.power | after.power:
        return Same()
    raise Refuse(f"carries a value that is {before} before a round and {after} after it")


@rule(*LOOPS)
def _loop(site: Site) -> list[State]:
    goes_on, body, carried, others = (site.args[str(n)] for n in range(4))
    states = [site.state(arg) for arg in carried]
    fixed = [site.state(arg) for arg in others]
    for _ in range(_ROUNDS):
        after = [
            _both(*pair)
            for pair in zip(states, _walked(site, body, [*states, *fixed]), strict=True)
        ]
        if after == states:
            break
        states = after
    else:
        raise NoRule
    (again,) = _walked(site, goes_on, [*states, *fixed])
    if not is_plain_same(again):
        raise Refuse("goes on for as long as its rows say")
    return states
