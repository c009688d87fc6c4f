"""Random graphs and strategies: plans are valid, mutated plans are caught, the cut is sound."""

from __future__ import annotations

import dataclasses
import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dynaflow_xla.errors import PlanError
from dynaflow_xla.ir.graph import Graph, Operator, Value
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.rules import Where
from dynaflow_xla.ir.work import Spread
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.instructions import Launch, Record, Wait
from dynaflow_xla.planning.order import HappensBefore
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.strategies.base import Context, Recorder, Strategy, record
from dynaflow_xla.strategies.branches import Branches
from dynaflow_xla.strategies.sequential import Sequential
from dynaflow_xla.timelines.simulator import simulate


def random_graph(seed: int, n_ops: int, outer_share: float = 0.0) -> Graph:
    """A random program: every operator reads one to three earlier values."""
    rng = random.Random(seed)
    values = [Value(i, (8, i + 1), "float32", 32 * (i + 1), -1) for i in range(2)]
    ops = []
    for index in range(n_ops):
        reads = tuple({rng.randrange(len(values)) for _ in range(rng.randint(1, 3))})
        number = len(values)
        values.append(Value(number, (8, index + 1), "float32", 32 * (index + 1), index))
        cost = rng.choice([0.0, 500.0, 400_000.0, 2_000_000.0])
        ops.append(
            Operator(
                index, rng.choice(["sort", "add", "dot"]), reads, (number,), flops=cost,
                bytes_moved=64, cost_ns=cost, outer=rng.random() < outer_share,
                spread=Spread(products=rng.choice([0.0, cost])),
            )
        )  # fmt: skip
    outputs = tuple(sorted(rng.sample(range(len(values)), k=min(3, len(values)))))
    return Graph("random", tuple(values), tuple(ops), (0, 1), outputs)


class Scattered(Strategy):
    """Any ready region on any lane, or on all cores where there is such a width."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def schedule(self, s: Recorder) -> None:
        while ready := s.ready():
            wide = s.context.cores and self.rng.random() < 0.3
            lane = self.rng.randrange(s.lanes)
            s.execute(self.rng.choice(ready), lane=lane, width="all" if wide else None)


def plan_of(
    pg: PartitionedGraph, strategy: Strategy, lanes: int, cores: int = 0, width: int = 1
) -> Plan:
    context = Context(None, (), "cpu", lanes, cores=cores, lane_cores=width)
    recording = record(strategy, pg, context)
    return build_plan(
        pg, recording, lanes=lanes, strategy_text=repr(strategy), cores=cores, width=width
    )


def fine_cut(graph: Graph) -> PartitionedGraph:
    """Every live operator its own region, where the rules allow."""
    from dynaflow_xla.ir.rules import Op as OpRule

    return partition(graph, [OpRule("*")])


graphs = st.builds(
    random_graph, st.integers(0, 10**6), st.integers(1, 24), st.sampled_from([0.0, 0.2])
)


@settings(max_examples=150, deadline=None)
@given(graphs)
def test_partition_is_sound(graph: Graph) -> None:
    for pg in (partition(graph), fine_cut(graph)):
        consumers = graph.consumers()
        made: dict[int, int] = {}
        for region in pg.regions:
            inside = {v for i in region.ops for v in graph.ops[i].outputs}
            reads = {v for i in region.ops for v in graph.ops[i].inputs} - inside
            assert set(region.inputs) == reads
            assert all(v in graph.inputs or v in made for v in region.inputs), "not topological"
            for value in region.outputs:
                assert value not in made
                made[value] = region.id
        assert all(v in made or v in graph.inputs for v in graph.outputs)
        needed = set(graph.outputs)
        for op in reversed(graph.ops):
            if op.outer or needed & set(op.outputs):
                needed.update(op.inputs)
                assert any(op.index in r.ops for r in pg.regions), "a needed operator is lost"
        assert consumers is not None
        names = [r.name for r in pg.regions]
        assert len(names) == len(set(names))
        assert partition(graph).to_json() == partition(graph).to_json()


@settings(max_examples=150, deadline=None)
@given(graphs, st.integers(0, 10**6), st.integers(1, 4))
def test_every_recording_makes_a_valid_plan(graph: Graph, seed: int, lanes: int) -> None:
    for pg in (partition(graph), fine_cut(graph)):
        made = (Sequential(), Branches(), Branches(wide=False), Scattered(seed))
        for strategy, cores in itertools.product(made, (0, 4)):
            plan = plan_of(pg, strategy, lanes, cores, 1 + cores // 4)
            validate(plan, pg)
            assert Plan.from_json(plan.to_json()) == plan
            assert Plan.from_text(plan.to_text()) == plan
            assert plan.content_hash() == Plan.from_text(plan.to_text()).content_hash()
            assert simulate(plan, pg).total_ns >= 0


def oracle(plan: Plan, pg: PartitionedGraph) -> bool:
    """Independent check by executing every interleaving's constraints: a plan is good if a machine
    that runs lanes as late and as early as allowed always finds written, unclobbered data.

    Done with a transitive closure over explicit edges, not with the validator's bit sets.
    """
    n = len(plan.instructions)
    edge = [[False] * n for _ in range(n)]
    recorded: dict[int, int] = {}
    for i, a in enumerate(plan.instructions):
        if isinstance(a, Record):
            if a.event in recorded:
                return False
            recorded[a.event] = i
        for j in range(i):
            b = plan.instructions[j]
            barrier = any(isinstance(x, Launch) and x.lane < 0 for x in (a, b))
            if a.lane == b.lane or barrier:
                edge[j][i] = True
        if isinstance(a, Wait):
            if a.event not in recorded:
                return False
            between = plan.instructions[recorded[a.event] : i]
            if any(isinstance(x, Launch) and x.lane < 0 for x in between):
                return False  # the launch waits for the lane, and the lane for what is over: never again
            edge[recorded[a.event]][i] = True
    for k, i in itertools.product(range(n), range(n)):
        if edge[i][k]:
            for j in range(n):
                edge[i][j] = edge[i][j] or edge[k][j]
    launches = {i: a for i, a in enumerate(plan.instructions) if isinstance(a, Launch)}
    if sorted(a.region for a in launches.values()) != list(range(len(pg.regions))):
        return False
    if any(not -1 <= a.lane < plan.lanes for a in plan.instructions):
        return False
    for a in launches.values():
        alike = {x.width for x in launches.values() if x.lane == a.lane}
        if len(alike) > 1 or (a.width < 1) != (a.lane < 0) or (a.lane < 0 and plan.cores < 1):
            return False
    writer = {b: i for i, a in launches.items() for b in a.outs}
    touch: dict[int, list[int]] = {}
    for i, a in launches.items():
        for b in (*a.ins, *a.outs):
            touch.setdefault(b, []).append(i)
        for b in a.ins:
            if plan.buffers[b].kind != "arg" and not (b in writer and edge[writer[b]][i]):
                return False
    scratch = [b for b in plan.buffers if b.kind == "scratch"]
    for a, b in itertools.combinations(scratch, 2):
        if a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset:
            continue
        first = all(edge[i][j] for i in touch[a.id] for j in touch[b.id])
        second = all(edge[j][i] for i in touch[a.id] for j in touch[b.id])
        if not (first or second):
            return False
    return True


def mutants(plan: Plan, rng: random.Random) -> list[Plan]:
    """Plans with one thing wrong, or at least different."""
    instructions = list(plan.instructions)
    found = []

    def with_instructions(changed: list[object]) -> Plan:
        return msgspec.structs.replace(plan, instructions=tuple(changed))

    for i in range(len(instructions)):
        found.append(with_instructions(instructions[:i] + instructions[i + 1 :]))
    for i in range(len(instructions) - 1):
        swapped = list(instructions)
        swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
        found.append(with_instructions(swapped))
    for i, a in enumerate(instructions):
        if a.lane >= 0:
            moved = list(instructions)
            moved[i] = msgspec.structs.replace(a, lane=rng.choice([plan.lanes, (a.lane + 1)]))
            found.append(with_instructions(moved))
        if isinstance(a, Launch):
            found.append(with_instructions([*instructions, a]))
            for lane, width in ((-1, 0), (-1, 1), (0, 0), (0, 1), (a.lane, a.width + 1)):
                changed = msgspec.structs.replace(a, lane=lane, width=width)
                found.append(
                    with_instructions([*instructions[:i], changed, *instructions[i + 1 :]])
                )
            if a.lane < 0:  # to where lanes may wait for each other
                place = rng.randrange(len(instructions))
                rest = [x for x in instructions if x is not a]
                found.append(with_instructions([*rest[:place], a, *rest[place:]]))
    scratch = [b for b in plan.buffers if b.kind == "scratch"]
    for a, b in itertools.permutations(scratch, 2):
        if a.offset != b.offset and a.bytes <= b.bytes:
            buffers = list(plan.buffers)
            buffers[a.id] = msgspec.structs.replace(a, offset=b.offset)
            found.append(msgspec.structs.replace(plan, buffers=tuple(buffers)))
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 9), st.integers(2, 3), st.sampled_from([0, 2]))
def test_broken_plans_are_caught(seed: int, n_ops: int, lanes: int, cores: int) -> None:
    graph = random_graph(seed, n_ops)
    pg = fine_cut(graph)
    plan = plan_of(pg, Scattered(seed), lanes, cores)
    assert oracle(plan, pg)
    for mutant in mutants(plan, random.Random(seed)):
        if not oracle(mutant, pg):
            with pytest.raises(PlanError):
                validate(mutant, pg)


@pytest.mark.parametrize(("field", "least", "most"), [
    ("lanes", 1, 2**31 - 1), ("cores", 0, 2**31 - 1), ("events", 0, 2**31 - 1),
    ("scratch_bytes", 0, 2**63 - 1), ("copied_bytes", 0, 2**63 - 1),
])  # fmt: skip
def test_counts_that_no_engine_has(field: str, least: int, most: int) -> None:
    pg = fine_cut(random_graph(3, 6))
    plan = plan_of(pg, Scattered(3), 2, 2)
    for value in (least - 1, most + 1, 2**200):
        with pytest.raises(PlanError, match=f"a plan's {field} must be {least} to {most}; got"):
            validate(msgspec.structs.replace(plan, **{field: value}), pg)


def test_places_belong_to_arguments_results_and_scratch() -> None:
    seen = set()
    for seed in range(8):
        pg = fine_cut(random_graph(seed, 8))
        plan = plan_of(pg, Scattered(seed), 2, 2)
        for buffer in plan.buffers:
            for change in ({"index": 0}, {"offset": 0}, {"offset": -2}):
                kind = buffer.kind
                if kind in ("arg", "result") or (kind == "scratch" and "offset" in change):
                    continue
                seen.add(kind)
                buffers = list(plan.buffers)
                buffers[buffer.id] = msgspec.structs.replace(buffer, **change)
                with pytest.raises(PlanError, match="neither part of an argument nor of a result"):
                    validate(msgspec.structs.replace(plan, buffers=tuple(buffers)), pg)
    assert {"local", "scratch"} <= seen


def test_mutation_check_bites() -> None:
    """The mutation test above must meet many bad plans of each kind, or it proves nothing."""
    caught = 0
    for seed in range(30):
        pg = fine_cut(random_graph(seed, 8))
        plan = plan_of(pg, Scattered(seed), 3, 2 * (seed % 2))
        for mutant in mutants(plan, random.Random(seed)):
            if not oracle(mutant, pg):
                with pytest.raises(PlanError):
                    validate(mutant, pg)
                caught += 1
    assert caught > 500


def test_unneeded_waits_are_left_out() -> None:
    for seed in range(20):
        pg = fine_cut(random_graph(seed, 12))
        plan = plan_of(pg, Scattered(seed), 3)
        for i, a in enumerate(plan.instructions):
            if isinstance(a, Wait):
                rest = [x for j, x in enumerate(plan.instructions) if j != i]
                before = HappensBefore(rest)
                source = next(
                    j for j, x in enumerate(rest) if isinstance(x, Record) and x.event == a.event
                )
                assert not before(source, i) if i < len(rest) else True


def test_independent_heavy_branches_stay_apart() -> None:
    values = tuple(Value(i, (8,), "float32", 32, i - 1) for i in range(4))
    ops = (
        Operator(0, "sort", (0,), (1,), cost_ns=1e6),
        Operator(1, "sort", (0,), (2,), cost_ns=1e6),
        Operator(2, "add", (1, 2), (3,), cost_ns=1e3),
    )
    pg = partition(Graph("g", values, ops, (0,), (3,)))
    assert [r.name for r in pg.regions] == ["sort", "sort_1", "add"]
    plan = plan_of(pg, Branches(), 2)
    lanes = {i.name: i.lane for i in plan.instructions if isinstance(i, Launch)}
    assert lanes["sort"] != lanes["sort_1"]


def test_a_chain_is_one_region_and_where_is_connected() -> None:
    values = tuple(Value(i, (8,), "float32", 32, i - 1) for i in range(5))
    ops = tuple(Operator(i, "sort", (i,), (i + 1,), cost_ns=1e6) for i in range(4))
    graph = Graph("g", values, ops, (0,), (4,))
    assert len(partition(graph).regions) == 1
    cut = partition(graph, [Where(lambda op: op.index in (0, 1), name="early")])
    assert [r.name for r in cut.regions] == ["early", "sort"]
    assert dataclasses.is_dataclass(cut)
