"""Text, JSON and DOT forms of a partitioned graph."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from dynaflow_xla.ir.graph import Graph, Operator, Region, Source, Value

_COLORS = {"compute": "#cfe2f3", "memory": "#fff2cc", "network": "#f4cccc", "host": "#d9ead3"}
_LEFT_OUT: dict[type, set[str]] = {
    Value: {"producer"},
    Operator: {"scope_calls", "classes", "outer_reason", "once", "generator", "mark", "payload"},
    Region: {"outside"},
}
"""Fields that the JSON form does not have."""


def _types(graph: Graph, ids: tuple[int, ...]) -> str:
    return ", ".join(f"v{v}:{graph.values[v].type_str()}" for v in ids)


def graph_text(graph: Graph, regions: Sequence[Region], notes: Sequence[str]) -> str:
    """One paragraph a region: what it reads, its operators with their lines, what it makes."""
    lines = [
        f"graph {graph.name}({_types(graph, graph.inputs)}) -> ({_types(graph, graph.outputs)})"
    ]
    for region in regions:
        tags = f" tags={','.join(sorted(region.tags))}" if region.tags else ""
        function = f" of {region.function!r}" if region.function else ""
        lines.append(
            f"region {region.id} {region.name}{function}: {region.resource}, "
            f"{region.cost_ns / 1e3:.1f} us, {region.flops:.3g} flop, {region.bytes_moved} bytes, "
            f"rule {region.rule}{tags}"
        )
        lines.append(f"  reads  {_types(graph, region.inputs)}")
        for index in region.ops:
            op = graph.ops[index]
            outs = ", ".join(f"v{v}" for v in op.outputs)
            ins = ", ".join(f"v{v}" for v in op.inputs)
            where = f"  # {op.source}" if op.source else ""
            params = f" [{op.params}]" if op.params else ""
            lines.append(f"    {outs} = {op.kind}({ins}){params}{where}")
        lines.append(f"  makes  {_types(graph, region.outputs)}")
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines)


def _fields(node: Value | Operator | Region) -> dict[str, object]:
    left_out = _LEFT_OUT[type(node)]
    return {
        field.name: getattr(node, field.name)
        for field in dataclasses.fields(node)
        if field.name not in left_out
    }


def _plain(value: object) -> object:
    """What JSON has no form of: tags, and places in sources."""
    if isinstance(value, frozenset):
        return sorted(value)
    assert isinstance(value, Source), value
    return str(value)


def graph_json(graph: Graph, regions: Sequence[Region], notes: Sequence[str]) -> str:
    """JSON with sorted keys; the same graph gives the same text."""
    data = {
        "name": graph.name,
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "values": [_fields(value) for value in graph.values],
        "views": [dataclasses.asdict(view) for view in graph.views],
        "joins": [dataclasses.asdict(join) for join in graph.joins],
        "ops": [_fields(op) for op in graph.ops],
        "regions": [_fields(region) for region in regions],
        "notes": list(notes),
    }
    return json.dumps(data, default=_plain, sort_keys=True, indent=1)


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def graph_dot(graph: Graph, regions: Sequence[Region], made: Mapping[int, int]) -> str:
    """Graphviz source: regions as boxes coloured by resource, edges with their bytes."""
    lines = [f"digraph {_quote(graph.name)} {{", "  rankdir=TB; node [shape=box, style=filled];"]
    for region in regions:
        label = f"{region.name}\n{region.cost_ns / 1e3:.1f} us, {len(region.ops)} ops"
        label_text = _quote(label).replace("\n", "\\n")
        lines.append(
            f'  r{region.id} [label={label_text}, fillcolor="{_COLORS[region.resource]}"];'
        )
    for region in regions:
        crossing: dict[int, int] = {}
        for value in region.inputs:
            if value in made:
                crossing[made[value]] = crossing.get(made[value], 0) + graph.values[value].bytes
        for source, size in sorted(crossing.items()):
            lines.append(f'  r{source} -> r{region.id} [label="{size} B"];')
    return "\n".join([*lines, "}"])
