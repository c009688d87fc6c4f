"""The cut: what regions are made of, whatever the graph; what the default rules find."""

from __future__ import annotations

import graphlib
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

import dynaflow_xla as dfx
from dynaflow_xla.ir.graph import Graph, Operator, OpMark, OuterKind, OuterReason, Source, Value
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph

Make = Callable[..., Graph]


def random_graph(seed: int) -> Graph:
    """Operators with marks, scopes, calls, effects, several outputs, and generators."""
    rng = random.Random(seed)
    values = [Value(i, (8,), "float32", 32, -1) for i in range(rng.randint(1, 3))]
    inputs = tuple(range(len(values)))
    ops: list[Operator] = []
    generated: list[int] = []
    for index in range(rng.randint(1, 40)):
        generator = rng.random() < 0.15
        pool = generated if generator else list(range(len(values)))
        count = min(len(pool), rng.randint(0 if generator else 1, 3))
        # Mostly recent values: long chains, not one layer.
        reads = tuple(dict.fromkeys(rng.choice(pool[-rng.choice([3, 40]) :]) for _ in range(count)))
        outs = tuple(len(values) + k for k in range(1 if generator else rng.choice([1, 1, 1, 2])))
        values += [Value(v, (8,), "float32", 32, index) for v in outs]
        generated += outs if generator else ()
        mark = OpMark(rng.choice("mn"), rng.randint(0, 1), tags=frozenset({"marked"}))
        ops.append(
            Operator(
                index, rng.choice(["sort", "add", "dot"]), reads, outs,
                scope=tuple(rng.choice(["s", "t"]) for _ in range(rng.randint(0, 2))),
                call_path=tuple(f"f#{rng.randint(0, 1)}" for _ in range(rng.randint(0, 1))),
                cost_ns=0.0 if generator else rng.choice([0.0, 500.0, 3e4, 4e5, 2e6]),
                flops=rng.choice([0.0, 1e6]), bytes_moved=64,
                outer=not generator and rng.random() < 0.1, outer_reason=OuterReason("has effects"),
                once=not generator and rng.random() < 0.05,
                generator=generator, mark=mark if rng.random() < 0.2 else None,
                source=Source("model.py", index),
            )
        )  # fmt: skip
    outputs = tuple(rng.choices(range(len(values)), k=rng.randint(1, 4)))
    return Graph("random", tuple(values), tuple(ops), inputs, outputs)


RULES = {
    "default": None,
    "none": [],
    "fine": [dfx.Op("*")],
    "some": [dfx.Where(lambda op: op.index % 3 != 1, tags={"where"})],
}


def check_sound(pg: PartitionedGraph) -> None:
    graph = pg.graph
    needed = set(graph.outputs)
    live = set()
    for op in reversed(graph.ops):
        if op.outer or op.once or needed & set(op.outputs):
            needed |= set(op.inputs)
            live.add(op.index)
    homes: dict[int, list[int]] = {}
    for region in pg.regions:
        for index in region.ops:
            homes.setdefault(index, []).append(region.id)
    assert set(homes) == live, "every needed operator, and no other"
    made: dict[int, int] = {}
    for position, region in enumerate(pg.regions):
        assert region.id == position
        assert list(region.ops) == sorted(set(region.ops))
        inside: set[int] = set()
        for index in region.ops:
            inside |= set(graph.ops[index].outputs)
        reads = {v for i in region.ops for v in graph.ops[i].inputs} - inside
        assert set(region.inputs) == reads and len(region.inputs) == len(reads)
        # Made by an earlier region: the order of regions is topological, so none waits for itself
        # through another one (regions are convex).
        assert all(v in graph.inputs or v in made for v in region.inputs)
        for value in region.outputs:
            assert value in inside and value not in made, "one region hands a value out"
            made[value] = region.id
    assert all(v in made or v in graph.inputs for v in graph.outputs)
    for index, where in homes.items():
        op = graph.ops[index]
        if len(where) > 1:  # repeated: cheap preparation, which nobody else reads
            assert not (op.outer or op.once) and not set(op.outputs) & set(graph.outputs)
            assert not set(op.outputs) & made.keys()
        if op.outer:
            assert pg.regions[where[0]].outer and pg.regions[where[0]].ops == (index,)
    order = {r.id: p for r, p in zip(pg.regions, pg.predecessors(), strict=True)}
    tuple(graphlib.TopologicalSorter(order).static_order())  # raises on a cycle
    outers = [r.ops[0] for r in pg.regions if r.outer]
    assert outers == sorted(outers), "effects keep their order"
    names = [r.name for r in pg.regions]
    assert len(names) == len(set(names))


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, 10**9),
    st.sampled_from(sorted(RULES)),
    st.sampled_from([1, 4, 64]),
    st.sampled_from([frozenset[str](), frozenset({"add", "dot"})]),
)
def test_every_cut_is_sound(seed: int, rules: str, most: int, fused: frozenset[str]) -> None:
    graph = random_graph(seed)
    given_rules = RULES[rules] if graph.ops else None
    try:
        pg = partition(graph, given_rules, max_regions=most, fused=fused)
    except dfx.RuleError:
        assert rules == "some"  # nothing of it in this graph
        return
    check_sound(pg)
    again = partition(graph, given_rules, max_regions=most, fused=fused)
    assert pg == again, "the same each time"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_marks_and_rules_are_exclusive(seed: int) -> None:
    """Nothing but repeated preparation joins what was marked or matched."""
    graph = random_graph(seed)
    pg = partition(graph, None)
    for region in pg.regions:
        if not region.rule.startswith("mark("):
            continue
        homes = {i: [r.id for r in pg.regions if i in r.ops] for i in region.ops}
        own = [
            i
            for i in region.ops
            if region.rule == f"mark({getattr(graph.ops[i].mark, 'name', 0)!r})"
        ]
        assert own and region.tags == {"marked"}
        for index in set(region.ops) - set(own):
            assert graph.ops[index].generator or graph.ops[index].cost_ns <= 5_008.0, homes


class Made:
    """A graph of one input, made operator by operator."""

    def __init__(self) -> None:
        self.values = [Value(0, (8,), "float32", 32, -1)]
        self.ops: list[Operator] = []

    def add(self, kind: str, reads: tuple[int, ...], cost: float) -> int:
        number = len(self.values)
        self.values.append(Value(number, (8,), "float32", 32, len(self.ops)))
        self.ops.append(Operator(len(self.ops), kind, reads, (number,), cost_ns=cost))
        return number

    def graph(self, output: int) -> Graph:
        return Graph("made", tuple(self.values), tuple(self.ops), (0,), (output,))


def layers(depth: int, width: int, crossing: bool) -> Graph:
    """Layers of branches of 1 ms: of one value, and joined, or each of two of the layer before."""
    made = Made()
    add = made.add
    last = [0] * width
    for layer in range(depth):
        if crossing:
            step = 1 << layer % max(1, width.bit_length() - 1)
            last = [add("dot", (last[i], last[i ^ step]), 1e6) for i in range(width)]
        else:
            branches = tuple(add("sort", (last[0],), 1e6) for _ in range(width))
            last = [add("add", branches, 1e5)] * width
    total = add("add", tuple(dict.fromkeys(last)), 1e5)
    return made.graph(total)


@pytest.mark.parametrize("crossing", [False, True])
@pytest.mark.parametrize(("depth", "width"), [(24, 2), (40, 2), (100, 4), (12, 16), (30, 32)])
def test_layers_of_branches_are_at_most_so_many_regions(
    depth: int, width: int, crossing: bool
) -> None:
    pg = partition(layers(depth, width, crossing))
    assert len(pg.regions) <= 64
    before = pg.predecessors()
    read_by = [sum(r.id in p for p in before) for r in pg.regions]
    for region, reads in zip(pg.regions, before, strict=True):
        series = len(reads) == 1 and read_by[next(iter(reads))] == 1
        assert not series, f"{region.name} only continues a region that nobody else reads"
    if not crossing and depth * (width + 1) < 300:
        assert len(pg.regions) > 32, "what branches is left"


@pytest.mark.parametrize("count", [64, 65, 100, 300])
@pytest.mark.parametrize("chained", [False, True], ids=["one reader", "a chain of readers"])
def test_many_branches_stay_side_by_side(count: int, chained: bool) -> None:
    """Above the most regions branches are put together, not into their reader one after another."""
    made = Made()
    add = made.add
    ends = [add("sort", (0,), 2e5 + i) for i in range(count)]
    if chained:
        total = ends[0]
        for end in ends[1:]:
            total = add("add", (total, end), 500.0)
    else:
        total = add("mean", tuple(ends), 5e3)
    pg = partition(made.graph(total))
    assert 32 <= len(pg.regions) <= 64
    alone = [r for r, before in zip(pg.regions, pg.predecessors(), strict=True) if not before]
    assert len(alone) >= 0.9 * len(pg.regions)
    sorts = [sum(made.ops[i].kind == "sort" for i in r.ops) for r in pg.regions]
    assert max(sorts) <= 2 * -(-count // 64)


def test_names_are_unique_whatever_the_marks_are_called(make: Make) -> None:
    def mark(name: str, instance: int) -> dict[str, OpMark]:
        return {"mark": OpMark(name, instance)}

    graph = make(
        "a = f x; b = f a; c = f b; d = f c", "d",
        a=mark("left", 0), b=mark("left", 1), c=mark("left_1", 2), d=mark("left", 3),
    )  # fmt: skip
    assert [r.name for r in partition(graph).regions] == ["left", "left_1", "left_1_1", "left_2"]


def test_a_mark_is_cut_where_something_between_must_run_elsewhere(make: Make) -> None:
    mark = {"mark": OpMark("m", 0, "network", frozenset({"t"}))}
    graph = make("a = f x; b = g a; c = f b; d = f a", "c d", a=mark, c=mark, d=mark)
    cut = partition(graph)
    assert [(r.name, r.ops) for r in cut.regions] == [("m", (0,)), ("g", (1,)), ("m_1", (2, 3))]
    assert all((r.resource, r.tags) == ("network", {"t"}) for r in cut.regions if r.name != "g")


def test_generators_are_repeated_in_their_readers(make: Make) -> None:
    free = {"generator": True, "cost_ns": 0.0}
    graph = make(
        "i = iota; m = mask i; a = sort x m; b = sort y m; c = add a b",
        "c", inputs="x y", i=free, m=free,
    )  # fmt: skip
    cut = partition(graph)
    assert {r.name: r.ops for r in cut.regions} == {
        "sort": (0, 1, 2), "sort_1": (0, 1, 3), "add": (4,)
    }  # fmt: skip
    # Not if the caller, an outer operator or a rule has it.
    text = "i = iota; a = sort x i; b = sort x i; c = add a b"
    assert [r.ops for r in partition(make(text, "c i", i=free)).regions].count((0,)) == 1
    outer = make(text + "; o = print i", "c", i=free, o={"outer": True})
    assert sum(0 in r.ops for r in partition(outer).regions) == 1
    ruled = partition(make(text, "c", i=free), [dfx.Op("iota")])
    assert [r.ops for r in ruled.regions if 0 in r.ops] == [(0,)]


def test_cheap_preparation_of_inputs_is_repeated(make: Make) -> None:
    graph = make("p = reshape x; a = sort p; b = top p; c = add a b", "c", p={"cost_ns": 100.0})
    assert [r.ops for r in partition(graph).regions] == [(0, 1), (0, 2), (3,)]
    dear = make("p = reshape x; a = sort p; b = top p; c = add a b", "c", p={"cost_ns": 9e5})
    assert [r.ops for r in partition(dear).regions].count((0,)) == 1
    once = make(
        "p = draw x; a = sort p; b = top p; c = add a b", "c", p={"cost_ns": 1.0, "once": True}
    )
    assert sum(0 in r.ops for r in partition(once).regions) == 1


def test_expensive_work_is_never_repeated(make: Make) -> None:
    """However much there is to hand over: a reader on the same lane is handed nothing."""
    graph = make("p = scan x; a = sort p; b = top p; c = add a b", "c", p={"cost_ns": 4e5})
    large = tuple(replace(v, shape=(1 << 22,), bytes=1 << 24) for v in graph.values)
    cut = partition(replace(graph, values=large))
    assert [r.ops for r in cut.regions] == [(0,), (1,), (2,), (3,)]


def test_dominant_resource(make: Make) -> None:
    graph = make(
        "a = dot x; b = copy x; c = psum a; d = add b c", "d",
        a={"flops": 1e6}, b={"flops": 10.0},
        c={"outer": True, "outer_reason": OuterReason("talks", OuterKind.NETWORK)},
    )  # fmt: skip
    cut = partition(graph, [dfx.Op("dot"), dfx.Op("copy"), dfx.Op("add", resource="host")])
    assert {r.name: r.resource for r in cut.regions} == {
        "dot": "compute", "copy": "memory", "psum": "network", "add": "host"
    }  # fmt: skip
    effect = make(
        "a = print x; b = sort x",
        "b",
        a={"outer": True, "outer_reason": OuterReason("communicates with the user")},
    )
    assert {r.name: (r.resource, "outer" in r.tags) for r in partition(effect).regions} == {
        "print": ("host", True), "sort": ("memory", False)
    }  # fmt: skip


def test_default_rules_give_few_useful_regions(make: Make) -> None:
    """Eight layers of two heads with thirty cheap operators each: two branches, not 496 regions."""
    text = []
    for branch in "pq":
        last = "x"
        for layer in range(8):
            text.append(f"{branch}{layer} = sort {last}")
            last = f"{branch}{layer}"
            for k in range(30):
                text.append(f"{branch}{layer}_{k} = add {last}")
                last = f"{branch}{layer}_{k}"
    text.append("out = concat p7_29 q7_29")
    cheap = {t.split()[0]: {"cost_ns": 10.0} for t in text if "add" in t}
    graph = make(";".join(text), "out", **cheap)
    cut = partition(graph)
    assert [len(r.ops) for r in cut.regions] == [248, 248, 1]
    # A chain gains nothing from cuts.
    assert len(partition(make("a = sort x; b = sort a; c = sort b", "c")).regions) == 1
    # Cheap things do not become regions of their own.
    little = make("a = sort x; b = neg x; c = add a b", "c", b={"cost_ns": 10.0})
    assert len(partition(little).regions) == 1


def test_what_a_later_reader_needs_too_is_no_reason_for_a_cut(make: Make) -> None:
    """As in a normalization. But not if cores are worth more to one of them than to the other."""
    text = "mean = mean x; d = sub x mean; v = var d; e = exp v; out = mul d e"
    assert len(partition(make(text, "out")).regions) == 1
    for heavy in "dve":
        cut = partition(make(text, "out", **{heavy: {"flops": 1e6}}))
        assert len(cut.regions) > 1, heavy
    # Nor if something else could run meanwhile.
    apart = "d = sort x; v = var d; w = exp d; a = mul v v; b = mul w w; out = add a b"
    assert len(partition(make(apart, "out")).regions) >= 3


def test_nested_calls_are_regions(make: Make) -> None:
    fields = {
        f"{c}{k}": {"call_path": (f"block#{c}",), "cost_ns": 4e4} for c in "01" for k in range(3)
    }
    text = (
        "00 = mul x; 01 = mul 00; 02 = mul 01; 10 = mul x; 11 = mul 10; 12 = mul 11; o = add 02 12"
    )
    cut = partition(make(text, "o", **fields))
    assert [(r.name, r.ops) for r in cut.regions][:2] == [
        ("block", (0, 1, 2)), ("block_1", (3, 4, 5))
    ]  # fmt: skip


@pytest.mark.parametrize("rules", [None, []])
def test_nothing_to_do(make: Make, rules: list[object] | None) -> None:
    assert partition(make("", "x"), rules).regions == ()  # type: ignore[arg-type]
    dead = partition(make("a = sort x", "x"), rules)  # type: ignore[arg-type]
    assert dead.regions == () and "1 operators whose results nobody reads" in dead.notes[0]
    kept = partition(make("a = draw x", "x", a={"once": True}), rules)  # type: ignore[arg-type]
    assert [r.ops for r in kept.regions] == [(0,)]


def test_an_update_is_cut_off_at_its_gradient(make: Make) -> None:
    """What a compiler fuses starts no region, and goes where less has to be handed over."""
    dear = {"cost_ns": 1e6}
    text = (
        "g = dot x y; h = dot y x; p = pow t; a = mul g; b = square g; m = add a s; n = add b p; "
        "u = div m n; c = dot h x"
    )
    graph = make(
        text, "m n u c p", inputs="x y s t", g=dear, h=dear, c=dear, p=dear, m=dear, n=dear, u=dear
    )
    cut = partition(graph, fused=frozenset({"mul", "square", "add", "div"}))
    update = next(r for r in cut.regions if 7 in r.ops)
    assert update.ops == (3, 4, 5, 6, 7)
    assert [r.ops for r in cut.regions if 0 in r.ops] == [(0,)]
