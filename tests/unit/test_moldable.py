"""What is alone on a lane between wide regions joins them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dynaflow_xla import machine
from dynaflow_xla.ir.graph import Graph, Outside
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.rules import Op
from dynaflow_xla.ir.work import Spread
from dynaflow_xla.strategies.moldable import Moldable

MS = 1e6
PRODUCT = {"cost_ns": MS, "spread": Spread(products=MS, forks=1.0)}
LOOPS = {"cost_ns": 0.2 * MS, "spread": Spread(forks=8.0)}
"""By the model 0.28 ms longer on two cores than on one, since each of eight loops is handed out."""


Make = Callable[..., Graph]


def chain(make: Make, layers: int, beside: int = 1) -> PartitionedGraph:
    """Products, and between them so many groups of loops that do not depend on each other."""
    text, given, last = [], {}, "x"
    for n in range(layers):
        loops = [f"loops{n}_{k}" for k in range(beside)]
        text += [f"first{n} = dot {last}", *(f"{name} = loops first{n}" for name in loops)]
        text.append(f"last{n} = dot {' '.join(loops)}")
        given |= {f"first{n}": PRODUCT, f"last{n}": PRODUCT} | dict.fromkeys(loops, LOOPS)
        last = f"last{n}"
    return partition(make("; ".join(text), last, **given), [Op("*")])


def on_lanes(pg: PartitionedGraph) -> set[str]:
    best = Moldable(pg, 2, 1, 2, machine.numbers().program_ns).best()
    return {pg.graph.ops[pg.regions[r].ops[0]].kind for r in best.on_lanes}


@pytest.mark.parametrize("layers", [1, 4])
def test_loops_between_products_stay_with_them(make: Make, layers: int) -> None:
    assert on_lanes(chain(make, layers)) == set()


def test_loops_beside_each_other_have_lanes(make: Make) -> None:
    assert on_lanes(chain(make, 2, beside=2)) == {"loops"}


def test_what_a_lane_has_better_kernels_for_stays_there(make: Make) -> None:
    pg = chain(make, 2)
    regions = tuple(
        replace(r, outside=Outside(MS)) if pg.graph.ops[r.ops[0]].kind == "loops" else r
        for r in pg.regions
    )
    assert on_lanes(replace(pg, regions=regions)) == {"loops"}
