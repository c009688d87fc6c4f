"""Plans of split functions: their text and JSON, and that no broken slice, merge or part passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dynaflow_xla.batch.expansion import expand
from dynaflow_xla.batch.proof import Sum
from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.graph import Graph, Operator, Value
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.rules import Op as OpRule
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.instructions import Launch, Merge, Slice
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.strategies.base import Context, record
from dynaflow_xla.strategies.nano_batch import NanoBatch

GOLDEN = Path(__file__).parent / "golden"
SIZES = (5, 3)


def function(rows: int) -> Graph:
    """x[rows, 16], w[16] -> sort(x * w) by rows, and its total."""
    shapes = [(rows, 16), (16,), (rows, 16), (rows, 16), ()]
    producers = [-1, -1, 0, 1, 2]
    values = tuple(
        Value(n, s, "float32", 4 * rows * 16 if len(s) > 1 else 64 if s else 4, p)
        for n, (s, p) in enumerate(zip(shapes, producers, strict=True))
    )
    cost = 1e5 * rows
    ops = (
        Operator(0, "mul", (0, 1), (2,), cost_ns=cost),
        Operator(1, "sort", (2,), (3,), cost_ns=2 * cost),
        Operator(2, "reduce_sum", (3,), (4,), cost_ns=cost),
    )
    return Graph("f", values, ops, (0, 1), (3, 4), ("x", "w"))


def split_graph() -> PartitionedGraph:
    first = partition(function(SIZES[0]), [OpRule("*")])
    parts = [expand.transfer(first, function(size)) for size in SIZES]
    assert all(parts)
    return expand.expand(function(sum(SIZES)), parts, SIZES, (0, None), (0, Sum())).pg  # type: ignore[arg-type]


def split_plan() -> tuple[Plan, PartitionedGraph]:
    pg = split_graph()
    strategy = NanoBatch(SIZES)
    recording = record(strategy, pg, Context(8, ((8, 16), (16,)), "cpu", 2))
    return build_plan(pg, recording, lanes=2, strategy_text=repr(strategy)), pg


def test_golden_text_and_json() -> None:
    plan, _ = split_plan()
    assert plan.to_text() == (GOLDEN / "split_plan.txt").read_text()
    assert plan.to_json() + "\n" == (GOLDEN / "split_plan.json").read_text()
    assert Plan.from_text(plan.to_text()) == plan
    assert Plan.from_json(plan.to_json()) == plan


def test_the_plan_is_valid() -> None:
    plan, pg = split_plan()
    validate(plan, pg)
    assert sum(isinstance(i, Slice) for i in plan.instructions) == 2
    assert sum(isinstance(i, Merge) for i in plan.instructions) == 1


def test_other_operators_cannot_take_over_a_cut() -> None:
    other = function(3)
    other = Graph(other.name, other.values, other.ops[:2], other.inputs, (3, 2), other.input_names)
    assert expand.transfer(partition(function(5)), other) is None


# -- mutations -------------------------------------------------------------------------------------


def places(plan: Plan, kind: type) -> list[int]:
    return [n for n, i in enumerate(plan.instructions) if isinstance(i, kind)]


def with_instruction(plan: Plan, number: int, **changes: Any) -> Plan:
    made = list(plan.instructions)
    made[number] = replace(made[number], **changes)
    return replace(plan, instructions=tuple(made))


def with_buffer(plan: Plan, number: int, **changes: Any) -> Plan:
    made = list(plan.buffers)
    made[number] = replace(made[number], **changes)
    return replace(plan, buffers=tuple(made))


def moved(plan: Plan, number: int, to: int) -> Plan:
    made = list(plan.instructions)
    made.insert(to, made.pop(number))
    return replace(plan, instructions=tuple(made))


def without(plan: Plan, number: int) -> Plan:
    made = plan.instructions
    return replace(plan, instructions=made[:number] + made[number + 1 :])


def again(plan: Plan, number: int) -> Plan:
    made = plan.instructions
    return replace(plan, instructions=(*made[: number + 1], made[number], *made[number + 1 :]))


def merge_of(plan: Plan) -> tuple[int, Merge]:
    number = places(plan, Merge)[0]
    merge = plan.instructions[number]
    assert isinstance(merge, Merge)
    return number, merge


def launch_named(plan: Plan, name: str) -> tuple[int, Launch]:
    return next(
        (n, i) for n, i in enumerate(plan.instructions) if isinstance(i, Launch) and i.name == name
    )


def views(plan: Plan) -> list[int]:
    return [b.id for b in plan.buffers if b.kind == "arg" and b.offset >= 0]


def whole_argument(plan: Plan) -> int:
    return next(b.id for b in plan.buffers if b.kind == "arg" and b.offset < 0)


def parts(plan: Plan) -> tuple[int, ...]:
    return merge_of(plan)[1].srcs


def swapped_offsets(plan: Plan) -> Plan:
    a, b = parts(plan)
    first, second = plan.buffers[a].offset, plan.buffers[b].offset
    return with_buffer(with_buffer(plan, a, offset=second), b, offset=first)


def writes_both_parts(plan: Plan) -> Plan:
    number, launch = launch_named(plan, "sort@0")
    return with_instruction(plan, number, outs=(*launch.outs, parts(plan)[1]))


def writes_no_part(plan: Plan) -> Plan:
    number, launch = launch_named(plan, "sort@1")
    outs = tuple(b for b in launch.outs if b not in parts(plan))
    return with_instruction(plan, number, outs=outs)


def writes_the_whole(plan: Plan) -> Plan:
    number, launch = launch_named(plan, "sort@0")
    return with_instruction(plan, number, outs=(*launch.outs, merge_of(plan)[1].out))


def reads(plan: Plan, name: str, old: int, new: int) -> Plan:
    number, launch = launch_named(plan, name)
    assert old in launch.ins
    return with_instruction(plan, number, ins=tuple(new if b == old else b for b in launch.ins))


def change_slice(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda p: with_instruction(p, places(p, Slice)[1], **changes)


MUTATIONS: dict[str, Callable[[Plan], Plan]] = {
    "merge dropped": lambda p: without(p, merge_of(p)[0]),
    "merge twice": lambda p: again(p, merge_of(p)[0]),
    "merge before the launches": lambda p: moved(p, merge_of(p)[0], 2),
    "merge along another axis": lambda p: with_instruction(p, merge_of(p)[0], axis=1),
    "merge of a part less": lambda p: with_instruction(p, merge_of(p)[0], srcs=parts(p)[:1]),
    "merge without parts": lambda p: with_instruction(p, merge_of(p)[0], srcs=()),
    "merge of one part twice": lambda p: with_instruction(
        p, merge_of(p)[0], srcs=(parts(p)[0], parts(p)[0])
    ),
    "merge of swapped parts": lambda p: with_instruction(p, merge_of(p)[0], srcs=parts(p)[::-1]),
    "merge of what is no part": lambda p: with_instruction(
        p, merge_of(p)[0], srcs=(parts(p)[0], whole_argument(p))
    ),
    "merge to a part": lambda p: with_instruction(p, merge_of(p)[0], out=parts(p)[0]),
    "merge to no buffer": lambda p: with_instruction(p, merge_of(p)[0], out=99),
    "merge from no buffer": lambda p: with_instruction(p, merge_of(p)[0], srcs=(parts(p)[0], 99)),
    "part shifted": lambda p: with_buffer(p, parts(p)[1], offset=p.buffers[parts(p)[1]].offset + 64),
    "part over the other": lambda p: with_buffer(p, parts(p)[1], offset=0),
    "part without an offset": lambda p: with_buffer(p, parts(p)[1], offset=-1),
    "parts' offsets swapped": swapped_offsets,
    "part of another result": lambda p: with_buffer(p, parts(p)[1], index=1),
    "part of another value": lambda p: with_buffer(
        p, parts(p)[1], value=p.buffers[parts(p)[0]].value
    ),
    "part written twice": writes_both_parts,
    "part never written": writes_no_part,
    "whole result written by a nano-batch": writes_the_whole,
    "slice dropped": lambda p: without(p, places(p, Slice)[0]),
    "slice twice": lambda p: again(p, places(p, Slice)[0]),
    "slice after a launch": lambda p: moved(p, 0, len(p.instructions) - 2),
    "slice of another argument": lambda p: with_instruction(
        p, 0, src=next(b.id for b in p.buffers if b.kind == "arg" and b.index == 1)
    ),
    "slice of a slice": lambda p: with_instruction(p, 1, src=views(p)[0]),
    "slice of a result": lambda p: with_instruction(p, 0, src=merge_of(p)[1].out),
    "slice from elsewhere": change_slice(start=4),
    "slice to elsewhere": change_slice(stop=7),
    "slice along another axis": change_slice(axis=1),
    "slice to no buffer": change_slice(out=99),
    "view shifted": lambda p: with_buffer(p, views(p)[1], offset=p.buffers[views(p)[1]].offset - 64),
    "view of the whole": lambda p: with_buffer(p, views(p)[1], offset=-1),
    "view of another argument": lambda p: with_buffer(p, views(p)[1], index=1),
    "views swapped": lambda p: reads(p, "mul@0", views(p)[0], views(p)[1]),
    "whole read in place of a view": lambda p: reads(p, "mul@0", views(p)[0], whole_argument(p)),
    "nano-batch dropped": lambda p: without(p, launch_named(p, "sort@1")[0]),
    "nano-batch twice": lambda p: again(p, launch_named(p, "sort@1")[0]),
    "launch of another nano-batch": lambda p: with_instruction(
        p, launch_named(p, "sort@1")[0], nano=0
    ),
    "launch of the other's region": lambda p: with_instruction(
        p, launch_named(p, "sort@1")[0], region=launch_named(p, "sort@0")[1].region
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_caught(name: str) -> None:
    plan, pg = split_plan()
    mutant = MUTATIONS[name](plan)
    assert mutant != plan
    with pytest.raises(PlanError):
        validate(mutant, pg)


def test_every_changed_number_of_a_slice_merge_or_part_is_caught() -> None:
    """Each field that says where something lies, one up and one down."""
    plan, pg = split_plan()
    mutants = []
    for number in (*places(plan, Slice), *places(plan, Merge)):
        instruction = plan.instructions[number]
        for name in instruction.__struct_fields__:
            old = getattr(instruction, name)
            if isinstance(old, int):
                mutants += [with_instruction(plan, number, **{name: old + d}) for d in (-1, 1)]
    for buffer in (*views(plan), *parts(plan)):
        for name in ("value", "bytes", "index", "offset"):
            old = getattr(plan.buffers[buffer], name)
            mutants += [with_buffer(plan, buffer, **{name: old + d}) for d in (-1, 1)]
    assert len(mutants) > 50
    for mutant in mutants:
        with pytest.raises(PlanError):
            validate(mutant, pg)
