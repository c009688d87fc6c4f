"""Plans changed behind the proof, and a strategy whose plans are known in advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.planning.instructions import Launch, Record, Wait
from dynaflow_xla.planning.plan import Plan


class ByName(dfx.Strategy):
    """Regions named here on lane 1, all others on lane 0."""

    def __init__(self, *second: str):
        self.second = second

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                s.execute(op, lane=int(op.name in self.second))


def edited(plan: Plan, change: Callable[[Any], Any]) -> Plan:
    """The plan with each instruction as ``change`` gives it: itself, another, several, or none."""
    made: list[Any] = []
    for instruction in plan.instructions:
        new = change(instruction)
        made += new if isinstance(new, list) else [new]
    return msgspec.structs.replace(plan, instructions=tuple(made))


def with_other(plan: Plan, old: Any, **fields: Any) -> Plan:
    """The plan with other fields in one instruction."""
    new = msgspec.structs.replace(old, **fields)
    return edited(plan, lambda i: new if i == old else i)


def launch(plan: Plan, name: str) -> Launch:
    """The launch of this name."""
    (found,) = (i for i in plan.instructions if isinstance(i, Launch) and i.name == name)
    return found


def moved(plan: Plan, name: str, lane: int) -> Plan:
    """The plan with a launch on another lane."""
    return with_other(plan, launch(plan, name), lane=lane)


def with_edge(plan: Plan, first: str, then: str) -> Plan:
    """The plan with one more edge: a launch waits for another, of which it reads nothing."""
    names = [i.name for i in plan.instructions if isinstance(i, Launch)]
    assert names.index(first) < names.index(then)
    event = plan.events

    def change(i: Any) -> Any:
        if isinstance(i, Launch) and i.name == first:
            return [i, Record(event, i.lane)]
        return [Wait(event, i.lane), i] if isinstance(i, Launch) and i.name == then else i

    return msgspec.structs.replace(edited(plan, change), events=event + 1)


def swapped(plan: Plan, kind: str) -> Plan:
    """The plan whose two buffers of this kind, arguments or results, have each other's index."""
    first, second = (b for b in plan.buffers if b.kind == kind)
    buffers = list(plan.buffers)
    buffers[first.id] = msgspec.structs.replace(first, index=second.index)
    buffers[second.id] = msgspec.structs.replace(second, index=first.index)
    return msgspec.structs.replace(plan, buffers=tuple(buffers))


def without_waits(monkeypatch: pytest.MonkeyPatch, where: Any, ending: str = "") -> None:
    """Plans that this module builds lose their waits behind the proof, if their graph's name ends so."""
    build = where.build_plan

    def made(pg: Any, *args: Any, **kwargs: Any) -> Plan:
        plan: Plan = build(pg, *args, **kwargs)
        if not pg.graph.name.endswith(ending):
            return plan
        return edited(plan, lambda i: [] if isinstance(i, Wait) else i)

    monkeypatch.setattr(where, "build_plan", made)
    monkeypatch.setattr(where, "validate", lambda plan, pg: None)
