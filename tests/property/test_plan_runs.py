"""Plans run on real memory: any order that a plan allows gives what the graph computes.

A reference machine runs plans step by step, lanes in random turns. A launch takes time: it reads its
inputs when it begins, fills its outputs with garbage, and writes them when it ends; what it read must
not have changed meanwhile. So buffers that share bytes too early are met as wrong numbers.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dynaflow_xla.batch.expansion.expand import Expanded, expand, transfer
from dynaflow_xla.batch.expansion.joint import group
from dynaflow_xla.batch.expansion.specs import Cut, Reads
from dynaflow_xla.batch.proof import Sum
from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.graph import Graph, Operator, OuterKind, OuterReason, Value
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.rules import Op as OpRule
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.instructions import Launch, Merge, Record, Slice, Wait
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.recording import Recording
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.strategies.base import Context, Recorder, Strategy, record

Array = np.ndarray[Any, np.dtype[np.int64]]


# -- programs whose rows are independent ----------------------------------------------------------


@dataclass
class Program:
    """A function of ``x`` (rows), ``w`` (no rows): its graph at any number of rows."""

    seed: int
    ops: int
    reduce: bool = True
    outer_share: float = 0.0
    batched: list[bool] = field(default_factory=list)
    outputs: tuple[int, ...] = ()

    def graph(self, rows: int) -> Graph:
        rng = random.Random(self.seed)
        values = [Value(0, (rows, 8), "int64", 64 * rows, -1), Value(1, (8,), "int64", 64, -1)]
        self.batched = [True, False]
        ops = []
        for index in range(self.ops):
            reads = tuple(dict.fromkeys(rng.randrange(len(values)) for _ in range(2)))
            columns = 8 * rng.randint(1, 3)
            batched = any(self.batched[v] for v in reads)
            number = len(values)
            shape = (rows, columns) if batched else (columns,)
            values.append(Value(number, shape, "int64", 8 * math.prod(shape), index))
            self.batched.append(batched)
            cost = rng.choice([0.0, 500.0, 400_000.0])
            ops.append(
                Operator(
                    index, f"k{rng.randrange(9)}", reads, (number,), cost_ns=cost, bytes_moved=64,
                    outer=rng.random() < self.outer_share,
                    outer_reason=OuterReason("communicates", OuterKind.NETWORK),
                )
            )  # fmt: skip
        made = [v for v in range(2, len(values)) if self.batched[v]]
        chosen = rng.choices(range(2, len(values)), k=rng.randint(1, 3))
        if self.reduce and made:  # the sum over rows of a batched value
            source = rng.choice(made)
            number = len(values)
            columns = values[source].shape[1]
            values.append(Value(number, (columns,), "int64", 8 * columns, len(ops)))
            ops.append(Operator(len(ops), "sum_rows", (source,), (number,), bytes_moved=64))
            chosen.append(number)
        self.outputs = tuple(chosen)
        return Graph("rows", tuple(values), tuple(ops), (0, 1), self.outputs)

    def out_specs(self) -> list[int | Sum | None]:
        specs: list[int | Sum | None] = []
        for value in self.outputs:
            reduced = value >= len(self.batched)
            specs.append(Sum() if reduced else 0 if self.batched[value] else None)
        return specs


def compute(op: Operator, reads: Sequence[Array], like: Value) -> Array:
    """What an operator of such a program computes (integers wrap, so any order adds up alike)."""
    if op.kind == "sum_rows":
        return reads[0].sum(axis=0)
    columns = np.arange(like.shape[-1], dtype=np.int64) + int(op.kind[1:])
    total = np.ones(1, np.int64)
    for k, array in enumerate(reads):
        total = total + array.sum(axis=-1, keepdims=True) * (2 * k + 3)
    return total * columns + 1


def evaluate(graph: Graph, inputs: Sequence[Array]) -> list[Array]:
    known = dict(zip(graph.inputs, inputs, strict=True))
    for op in graph.ops:
        known[op.outputs[0]] = compute(
            op, [known[v] for v in op.inputs], graph.values[op.outputs[0]]
        )
    return [known[v] for v in graph.outputs]


# -- the reference machine ------------------------------------------------------------------------


class Machine:
    """Memory of one call and the state of its lanes."""

    def __init__(
        self, plan: Plan, pg: PartitionedGraph, merge_reads: dict[int, Reads],
        inputs: Sequence[Array], rng: random.Random,
    ) -> None:  # fmt: skip
        self.plan, self.pg, self.merge_reads, self.rng = plan, pg, merge_reads, rng
        self.args = [a.tobytes() for a in inputs]
        values = pg.graph.values
        self.results = [bytearray(b"\x55" * values[v].bytes) for v in pg.graph.outputs]
        self.scratch = bytearray(b"\x55" * plan.scratch_bytes)
        self.own = {b.id: bytearray(b.bytes) for b in plan.buffers if b.kind in ("local", "stage")}

    def place(self, number: int) -> tuple[Any, int]:
        b = self.plan.buffers[number]
        if b.kind in ("arg", "result"):
            return (self.args if b.kind == "arg" else self.results)[b.index], max(b.offset, 0)
        return (self.scratch, b.offset) if b.kind == "scratch" else (self.own[number], 0)

    def read(self, number: int) -> Array:
        b = self.plan.buffers[number]
        memory, at = self.place(number)
        return np.frombuffer(bytes(memory[at : at + b.bytes]), np.int64).reshape(b.shape)

    def write(self, number: int, data: bytes) -> None:
        memory, at = self.place(number)
        assert len(data) == self.plan.buffers[number].bytes
        memory[at : at + len(data)] = data

    def begin(self, launch: Launch) -> tuple[Launch, list[Array]]:
        reads = [self.read(b) for b in launch.ins]
        for b in launch.outs:
            self.write(b, b"\xaa" * self.plan.buffers[b].bytes)
        return launch, reads

    def end(self, launch: Launch, reads: list[Array]) -> None:
        for b, before in zip(launch.ins, reads, strict=True):
            assert np.array_equal(self.read(b), before), f"{launch.name}: what it reads changed"
        graph = self.pg.graph
        region = self.pg.regions[launch.region]
        known = dict(zip(region.inputs, reads, strict=True))
        for index in region.ops:
            op, like = graph.ops[index], graph.values[graph.ops[index].outputs[0]]
            if op.kind == "merge_concat":
                made = np.concatenate(self.parts(region.id, known))
            elif op.kind == "merge_sum":
                made = np.sum(self.parts(region.id, known), axis=0)
            else:
                made = compute(op, [known[v] for v in op.inputs], like)
            known[op.outputs[0]] = made
        for b in launch.outs:
            self.write(b, known[self.plan.buffers[b].value].tobytes())

    def parts(self, region: int, known: dict[int, Array]) -> list[Array]:
        """What a merge region puts together."""

        def rows(array: Array, cut: Cut | None) -> Array:
            return array if cut is None else array[cut.start : cut.stop]

        return [rows(known[v], cut) for v, cut in self.merge_reads[region]]

    def run(self) -> list[Array]:
        todo = list(enumerate(self.plan.instructions))
        running: dict[int, tuple[Launch, list[Array]]] = {}
        recorded: set[int] = set()
        while todo or running:
            # The next instruction of each lane; an outer region waits for all, and all for it.
            heads: dict[int, tuple[int, Any]] = {}
            for position, instruction in [] if -1 in running else todo:
                lane = -2 if isinstance(instruction, Slice | Merge) else instruction.lane
                if lane == -1:
                    if not heads and not running:
                        heads[-1] = position, instruction
                    break
                heads.setdefault(lane, (position, instruction))
            steps = [("end", lane) for lane in running]
            steps += [
                ("go", lane) for lane, (_, i) in heads.items()
                if lane not in running and not (isinstance(i, Wait) and i.event not in recorded)
            ]  # fmt: skip
            assert steps, "the lanes wait for each other"
            what, lane = self.rng.choice(steps)
            if what == "end":
                self.end(*running.pop(lane))
                continue
            item = heads[lane]
            todo.remove(item)
            if isinstance(item[1], Launch):
                running[lane] = self.begin(item[1])
            elif isinstance(item[1], Record):
                recorded.add(item[1].event)
        values = self.pg.graph.values
        arrays = []
        made = self.pg.producer_region()
        joined = {j.value for j in self.pg.graph.joins}
        for data, v in zip(self.results, self.pg.graph.outputs, strict=True):
            if v not in made and v not in joined:  # an input returned as it is
                data = bytearray(self.args[self.pg.graph.inputs.index(v)])
            arrays.append(np.frombuffer(bytes(data), np.int64).reshape(values[v].shape))
        return arrays


class Scattered(Strategy):
    """Any ready region on any lane; with ``together``, now and then with its other nano-batches."""

    def __init__(self, seed: int, together: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.together = together

    def schedule(self, s: Recorder) -> None:
        while ready := s.ready():
            first = self.rng.choice(ready)
            like = [op for op in ready if op.name == first.name and not op.outer]
            several = self.rng.random() < self.together and len(like) > 1
            lane = self.rng.randrange(s.lanes)
            width: int | str | None = None
            if s.context.cores:  # lane n has n + 1 cores, if any
                width = self.rng.choice(["all", None, lane + 1])
            s.execute(tuple(like) if several else first, lane=lane, width=width)


def plan_of(pg: PartitionedGraph, seed: int, lanes: int) -> Plan:
    cores = 8 * (seed % 2)
    recording = record(Scattered(seed), pg, Context(None, (), "cpu", lanes, cores=cores))
    plan = build_plan(pg, recording, lanes=lanes, strategy_text="Scattered()", cores=cores)
    validate(plan, pg)
    assert all(plan.widths[lane] == width for lane, width in recording.widths.items())
    assert Plan.from_text(plan.to_text()) == plan == Plan.from_json(plan.to_json())
    return plan


def grouped_plan(expanded: Expanded, seed: int, lanes: int) -> tuple[Plan, Expanded]:
    """A plan in which some regions run several nano-batches as one batch."""
    cores = 8 * (seed % 2)
    context = Context(None, (), "cpu", lanes, cores=cores)
    recording = record(Scattered(seed, together=0.7), expanded.pg, context)
    groups = [d.group for d in recording.decisions if d.group]
    made, new = group(expanded, groups, [expanded.pg.regions[g[0]] for g in groups])
    decisions = tuple(dataclasses.replace(d, region=new[d.region]) for d in recording.decisions)
    plan = build_plan(
        made.pg, Recording(decisions), lanes=lanes, strategy_text="Scattered()", cores=cores
    )
    validate(plan, made.pg)
    return plan, made


def cut(graph: Graph, fine: bool) -> PartitionedGraph:
    return partition(graph, [OpRule("*")] if fine and graph.ops else None)


def split(program: Program, sizes: Sequence[int], fine: bool) -> tuple[Graph, Expanded]:
    whole = program.graph(sum(sizes))
    first = cut(program.graph(sizes[0]), fine)
    at = {sizes[0]: first}
    for size in sizes:
        # The same cut at every size, as the frontend makes it.
        if size not in at:
            same = transfer(first, program.graph(size))
            assert same is not None
            at[size] = same
    parts = [at[size] for size in sizes]
    return whole, expand(whole, parts, sizes, (0, None), program.out_specs())


def inputs_of(graph: Graph, seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-99, 99, graph.values[v].shape, np.int64) for v in graph.inputs]


seeds = st.integers(0, 10**9)


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(1, 16), st.integers(1, 4), st.booleans(), st.sampled_from([0.0, 0.2]))
def test_plans_compute_the_graph(
    seed: int, ops: int, lanes: int, fine: bool, outer_share: float
) -> None:
    graph = Program(seed, ops, outer_share=outer_share).graph(4)
    pg = cut(graph, fine)
    plan = plan_of(pg, seed, lanes)
    inputs = inputs_of(graph, seed)
    for turn in range(3):
        got = Machine(plan, pg, {}, inputs, random.Random(seed + turn)).run()
        for a, b in zip(got, evaluate(graph, inputs), strict=True):
            assert np.array_equal(a, b)


@settings(max_examples=150, deadline=None)
@given(
    seeds, st.integers(1, 10), st.integers(1, 3), st.booleans(),
    st.lists(st.integers(1, 3), min_size=2, max_size=3),
)  # fmt: skip
def test_split_plans_compute_the_graph(
    seed: int, ops: int, lanes: int, fine: bool, sizes: list[int]
) -> None:
    whole, expanded = split(Program(seed, ops), sizes, fine)
    inputs = inputs_of(whole, seed)
    for plan, made in (
        (plan_of(expanded.pg, seed, lanes), expanded),
        grouped_plan(expanded, seed, lanes),
    ):
        for turn in range(3):
            machine = Machine(plan, made.pg, made.merge_reads, inputs, random.Random(turn))
            for a, b in zip(machine.run(), evaluate(whole, inputs), strict=True):
                assert np.array_equal(a, b)


def test_scratch_is_no_larger_than_needed_and_is_reused() -> None:
    shared = 0
    for seed in range(40):
        pg = cut(Program(seed, 14).graph(2), True)
        plan = plan_of(pg, seed, 2)
        scratch = [b for b in plan.buffers if b.kind == "scratch"]
        ends = [b.offset + max(64, (b.bytes + 63) // 64 * 64) for b in scratch]
        assert plan.scratch_bytes == max(ends, default=0)
        shared += sum(b.bytes for b in scratch) > plan.scratch_bytes
    assert shared > 5


def test_the_machine_finds_clobbered_scratch() -> None:
    """All scratch at offset 0: the reference machine must notice, or the tests above prove nothing."""
    found = 0
    for seed in range(40):
        graph = Program(seed, 12).graph(2)
        pg = cut(graph, True)
        plan = plan_of(pg, seed, 3)
        buffers = tuple(
            msgspec.structs.replace(b, offset=0) if b.kind == "scratch" else b for b in plan.buffers
        )
        bad = msgspec.structs.replace(plan, buffers=buffers)
        if bad == plan:
            continue
        inputs = inputs_of(graph, seed)
        try:
            got = Machine(bad, pg, {}, inputs, random.Random(seed)).run()
            wrong = not all(map(np.array_equal, got, evaluate(graph, inputs)))
        except AssertionError:
            wrong = True
        if wrong:
            found += 1
            with pytest.raises(PlanError, match="share bytes of scratch"):
                validate(bad, pg)
    assert found > 10


# -- broken slices, merges and replacements -------------------------------------------------------


def mutants(plan: Plan) -> list[tuple[str, Plan]]:
    """Plans in which one slice, merge, part or launch is certainly wrong."""
    found: list[tuple[str, Plan]] = []
    instructions = list(plan.instructions)

    def put(what: str, number: int, *changed: Any) -> None:
        now = [*instructions[:number], *changed, *instructions[number + 1 :]]
        found.append((what, msgspec.structs.replace(plan, instructions=tuple(now))))

    def swap(what: str, number: int, **fields: Any) -> None:
        put(what, number, msgspec.structs.replace(instructions[number], **fields))

    count = len(plan.buffers)
    for n, i in enumerate(instructions):
        if isinstance(i, Slice):
            put("slice removed", n)
            put("slice twice", n, i, i)
            put("slice late", n)
            found[-1] = (
                "slice late",
                msgspec.structs.replace(plan, instructions=(*found[-1][1].instructions, i)),
            )
            for key in ("axis", "start", "stop"):
                swap(f"slice {key}", n, **{key: getattr(i, key) + 1})
            for key in ("src", "out"):
                for other in (-1, count, (getattr(i, key) + 1) % count):
                    swap(f"slice {key} {other}", n, **{key: other})
        elif isinstance(i, Merge):
            put("merge removed", n)
            put("merge twice", n, i, i)
            found.append(
                ("merge early", msgspec.structs.replace(
                    plan, instructions=(i, *instructions[:n], *instructions[n + 1 :])
                ))
            )  # fmt: skip
            swap("merge axis", n, axis=i.axis + 1)
            swap("merge reversed", n, srcs=i.srcs[::-1])
            swap("merge without its first", n, srcs=i.srcs[1:])
            swap("merge without its last", n, srcs=i.srcs[:-1])
            swap("merge doubled", n, srcs=(*i.srcs, i.srcs[-1]))
            swap("merge of no buffer", n, srcs=(count, *i.srcs[1:]))
            swap("merge out", n, out=i.srcs[0])
        elif isinstance(i, Launch):
            swap("launch nano", n, nano=i.nano + 1)
            if i.outs:
                swap("launch writes less", n, outs=i.outs[:-1])
                swap("launch writes twice", n, outs=(*i.outs, i.outs[0]))
    for b in plan.buffers:
        if b.kind in ("arg", "result") and b.offset >= 0:
            buffers = list(plan.buffers)
            for offset in (-1, b.offset + 64, b.offset + 1):
                buffers[b.id] = msgspec.structs.replace(b, offset=offset)
                found.append(
                    (f"{b.kind} part", msgspec.structs.replace(plan, buffers=tuple(buffers)))
                )
    return found


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 8), st.lists(st.integers(1, 3), min_size=2, max_size=3))
def test_broken_splits_are_caught(seed: int, ops: int, sizes: list[int]) -> None:
    _, expanded = split(Program(seed, ops), sizes, True)
    plan = plan_of(expanded.pg, seed, 2)
    for what, mutant in mutants(plan):
        with pytest.raises(PlanError):
            validate(mutant, expanded.pg)
            pytest.fail(what)


def test_mutations_of_each_kind_are_met() -> None:
    kinds: set[str] = set()
    for seed in range(20):
        _, expanded = split(Program(seed, 6), [2, 2], True)
        for what, mutant in mutants(plan_of(expanded.pg, seed, 2)):
            kinds.add(what.rpartition(" ")[0] if what[-1].isdigit() else what)
            with pytest.raises(PlanError):
                validate(mutant, expanded.pg)
    assert len(kinds) >= 19, sorted(kinds)
