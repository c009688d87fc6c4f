"""How far ``Branches`` is from the best plan, over random graphs: the best is found by ``Search``.

Prints a table, and with ``--out`` writes a result file. Nothing is run or timed: plans are compared under the
simulator, so the numbers are the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

import dynaflow_xla as dfx
from dynaflow_xla.ir.graph import Graph, Operator, Region, Value
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.strategies.base import record
from dynaflow_xla.strategies.search import Search
from dynaflow_xla.timelines.simulator import simulate

GRAPHS, NODES = 200, 300


def random_regions(seed: int) -> dfx.PartitionedGraph:
    """4 to 12 regions of 5 us to 1 ms, each reading up to three earlier ones."""
    rng = random.Random(seed)
    count = rng.randint(4, 12)
    values = [Value(0, (1024,), "float32", 4096, -1)]
    ops, regions = [], []
    for n in range(count):
        ids = sorted(rng.sample(range(len(values)), min(len(values), rng.randint(1, 3))))
        size = int(10 ** rng.uniform(3, 5.5))
        values.append(Value(n + 1, (size // 4,), "float32", size // 4 * 4, n))
        cost = 10 ** rng.uniform(3.7, 6)
        ops.append(Operator(n, "op", tuple(ids), (n + 1,), cost_ns=cost, bytes_moved=size))
        regions.append(
            Region(n, f"r{n}", (n,), tuple(ids), (n + 1,), cost_ns=cost, bytes_moved=size)
        )
    read = {v for op in ops for v in op.inputs}
    outputs = tuple(v.id for v in values[1:] if v.id not in read)
    graph = Graph(f"random_{seed}", tuple(values), tuple(ops), (0,), outputs, ("x",))
    return dfx.PartitionedGraph(graph, tuple(regions))


def predicted(strategy: dfx.Strategy, pg: dfx.PartitionedGraph, lanes: int) -> tuple[int, str]:
    """Nanoseconds of a strategy's plan, and what it says of it."""
    made = record(strategy, pg, dfx.Context(None, (), "cpu", lanes))
    plan = build_plan(pg, made, lanes=lanes, strategy_text=repr(strategy))
    validate(plan, pg)
    return simulate(plan, pg).total_ns, " ".join(made.notes)


def compare(lanes: int, graphs: int) -> dict[str, Any]:
    """Lengths against the best one, for each graph."""
    ratios: dict[str, list[float]] = {"Branches": [], "Opara": [], "Nimble": [], "IOS": []}
    proved = 0
    for seed in range(graphs):
        pg = random_regions(seed)
        best, told = predicted(Search(nodes=NODES), pg, lanes)
        proved += "no plan is shorter" in told
        strategies = (
            dfx.Branches(),
            dfx.published.Opara(),
            dfx.published.Nimble(),
            dfx.published.IOS(),
        )
        for strategy, found in zip(strategies, ratios.values(), strict=True):
            found.append(predicted(strategy, pg, lanes)[0] / best)
    return {"lanes": lanes, "graphs": graphs, "proved": proved, "ratios": ratios}


def markdown(cases: list[dict[str, Any]]) -> str:
    """The table of a result."""
    lines = [
        "| lanes | strategy | equal to the best | median | 9 of 10 within | worst |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        for name, ratios in case["ratios"].items():
            ordered = sorted(ratios)
            equal = sum(r < 1.0005 for r in ratios)
            middle = statistics.median(ratios)
            nine = ordered[int(0.9 * (len(ordered) - 1))]
            lines.append(
                f"| {case['lanes']} | `{name}` | {equal} of {len(ratios)} | {middle:.3f} | "
                f"{nine:.3f} | {ordered[-1]:.3f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Compares, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=GRAPHS)
    parser.add_argument("--lanes", type=int, nargs="+", default=[2])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cases = [compare(lanes, given.graphs) for lanes in given.lanes]
    print(markdown(cases))
    for case in cases:
        print(
            f"{case['lanes']} lanes: the best is proved for {case['proved']} of {case['graphs']} graphs"
        )
    if given.out is not None:
        rounded = [
            {**c, "ratios": {k: [round(r, 4) for r in v] for k, v in c["ratios"].items()}}
            for c in cases
        ]
        given.out.write_text(json.dumps({"nodes": NODES, "cases": rounded}, indent=1) + "\n")


if __name__ == "__main__":
    main()
