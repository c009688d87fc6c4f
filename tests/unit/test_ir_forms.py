"""Text, JSON and DOT of a cut graph hold what the graph holds, whatever its names are."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable

from hypothesis import given, settings, strategies as st

import dynaflow_xla as dfx
from dynaflow_xla.ir.graph import Graph, Join, Operator, Region, Source, Value, View
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph

Make = Callable[..., Graph]


def from_json(text: str) -> PartitionedGraph:
    """The graph a JSON form describes; producers follow from the operators."""
    data = json.loads(text)
    producer = {v: op["index"] for op in data["ops"] for v in op["outputs"]}
    graph = Graph(
        data["name"],
        tuple(
            Value(v["id"], tuple(v["shape"]), v["dtype"], v["bytes"], producer.get(v["id"], -1),
                  v["weak_type"])
            for v in data["values"]
        ),
        tuple(
            Operator(**{k: tuple(v) if isinstance(v, list) else v for k, v in op.items() if k != "source"},
               source=_source(op["source"]))
            for op in data["ops"]
        ),
        tuple(data["inputs"]),
        tuple(data["outputs"]),
        views=tuple(View(**view) for view in data["views"]),
        joins=tuple(
            Join(j["value"], tuple(j["parts"]), tuple(j["offsets"]), j["axis"])
            for j in data["joins"]
        ),
    )  # fmt: skip
    regions = []
    for region in data["regions"]:
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in region.items()}
        fields |= {"tags": frozenset(region["tags"]), "source": _source(region["source"])}
        regions.append(Region(**fields))
    return PartitionedGraph(graph, tuple(regions), tuple(data["notes"]))


def _source(text: str | None) -> Source | None:
    if text is None:
        return None
    file, _, line = text.rpartition(":")
    return Source(file, int(line))


def random_cut(seed: int) -> PartitionedGraph:
    rng = random.Random(seed)
    names = ["f", 'a "quoted"', "back\\slash", "zwei\nZeilen", "<b>&", "ü", "}", "->"]
    values = [Value(0, (), "float32", 4, -1), Value(1, (8, 2), "key<fry>", 128, -1, True)]
    ops = []
    for index in range(rng.randint(0, 8)):
        reads = tuple({rng.randrange(len(values)) for _ in range(2)})
        number = len(values)
        values.append(Value(number, (rng.randint(0, 3),), "bfloat16", rng.randint(0, 9), index))
        ops.append(
            Operator(
                index, rng.choice(names), reads, (number,), scope=tuple(rng.sample(names, 2)),
                call_path=(rng.choice(names),), cost_ns=rng.choice([0.0, 1e6]), flops=1e30,
                params=rng.choice(names), source=rng.choice([None, Source("C:/m.py", 3)]),
            )
        )  # fmt: skip
    graph = Graph(rng.choice(names), tuple(values), tuple(ops), (0, 1), (len(values) - 1, 0))
    pg = partition(graph, [dfx.Op("*", tags=set(names[:3]))] if ops else None)
    views = (View(1, 0, 0, 0, 4, 64),) if rng.random() < 0.5 else ()
    joins = (Join(0, (1,), (0,), 0),) if views else ()
    return PartitionedGraph(
        dataclasses.replace(graph, views=views, joins=joins),
        tuple(dataclasses.replace(r, nano=1, merge=bool(views)) for r in pg.regions),
        tuple(rng.sample(names, 2)),
    )


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_json_round_trip(seed: int) -> None:
    pg = random_cut(seed)
    text = pg.to_json()
    assert from_json(text) == pg
    assert from_json(text).to_json() == text
    assert list(json.loads(text)) == sorted(json.loads(text)), "keys in a stable order"


def parse_dot(text: str) -> tuple[str, dict[int, str], list[tuple[int, int, int]]]:
    """(graph name, region -> label, edges with their bytes); fails on what it cannot read."""
    string = r'"((?:[^"\\]|\\.)*)"'
    head, body = re.fullmatch(rf"digraph {string} \{{\n(.*)\n\}}", text, re.DOTALL).groups()  # type: ignore[union-attr]
    nodes, edges = {}, []
    statements = re.split(r"(?<=;)\n", body)
    assert statements[0] == "  rankdir=TB; node [shape=box, style=filled];"
    for line in statements[1:]:
        node = re.fullmatch(rf'  r(\d+) \[label={string}, fillcolor="#\w{{6}}"\];', line)
        edge = re.fullmatch(r'  r(\d+) -> r(\d+) \[label="(\d+) B"\];', line)
        assert node or edge, line
        if node:
            nodes[int(node[1])] = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), node[2])
        if edge:
            edges.append((int(edge[1]), int(edge[2]), int(edge[3])))
    return re.sub(r"\\(.)", r"\1", head), nodes, edges


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_dot_holds_regions_and_edges(seed: int) -> None:
    pg = random_cut(seed)
    name, nodes, edges = parse_dot(pg.to_dot())
    assert name == pg.graph.name
    assert {number: label.rpartition("\n")[0] for number, label in nodes.items()} == {
        region.id: region.name for region in pg.regions
    }
    made = pg.producer_region()
    want: dict[tuple[int, int], int] = {}
    for region in pg.regions:
        for value in region.inputs:
            if value in made:
                edge = made[value], region.id
                want[edge] = want.get(edge, 0) + pg.graph.values[value].bytes
    assert {(a, b): size for a, b, size in edges} == want and len(edges) == len(want)


def test_text_lists_every_region_and_operator(make: Make) -> None:
    source = {"source": Source("model.py", 7), "params": "axis=0"}
    graph = make("a = sort x; b = add a y", "b", inputs="x y", a=source)
    pg = partition(graph, [dfx.Op("sort", tags={"slow", "big"}), dfx.Op("add", resource="host")])
    assert pg.to_text() == str(pg) == "\n".join(
        [
            "graph f(v0:float32[8], v1:float32[8]) -> (v3:float32[8])",
            "region 0 sort: memory, 1000.0 us, 0 flop, 64 bytes, rule Op('sort') tags=big,slow",
            "  reads  v0:float32[8]",
            "    v2 = sort(v0) [axis=0]  # model.py:7",
            "  makes  v2:float32[8]",
            "region 1 add: host, 1000.0 us, 0 flop, 64 bytes, rule Op('add')",
            "  reads  v2:float32[8], v1:float32[8]",
            "    v3 = add(v2, v1)",
            "  makes  v3:float32[8]",
        ]
    )  # fmt: skip
