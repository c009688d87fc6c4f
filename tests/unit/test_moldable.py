"""What is alone on a lane between wide regions joins them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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


def test_lanes_that_python_calls_cost_that_once_a_call(make: Make) -> None:
    pg = chain(make, 2, beside=2)

    def length(python_ns: float) -> tuple[float, bool]:
        best = Moldable(pg, 2, 1, 2, python_ns=python_ns).best()
        return best.length_ns, bool(best.on_lanes)

    free, cheap, dear = map(length, (0.0, 1e3, 1e9))
    assert free[1] and cheap == (free[0] + 1e3, True)
    assert dear == (Moldable(pg, 2, 1, 2).all_wide().length_ns, False)


def test_what_a_lane_has_better_kernels_for_stays_there(make: Make) -> None:
    pg = chain(make, 2)
    regions = tuple(
        replace(r, outside=Outside(MS)) if pg.graph.ops[r.ops[0]].kind == "loops" else r
        for r in pg.regions
    )
    assert on_lanes(replace(pg, regions=regions)) == {"loops"}


SMALL_PRODUCT = {"cost_ns": 0.02 * MS, "spread": Spread(products=0.02 * MS, forks=1.0)}
BIG = {"cost_ns": 4 * MS, "spread": Spread(products=4 * MS, forks=1.0)}
SERIAL = {"cost_ns": 0.1 * MS}


def better_on_lanes(pg: PartitionedGraph, kind: str, outside_ns: float) -> PartitionedGraph:
    regions = [
        replace(r, outside=Outside(outside_ns)) if pg.graph.ops[r.ops[0]].kind == kind else r
        for r in pg.regions
    ]
    return replace(pg, regions=tuple(regions))


def row(make: Make, kinds: list[str], **given: object) -> PartitionedGraph:
    """Operators in a row."""
    text = [f"v{n} = {kind} {f'v{n - 1}' if n else 'x'}" for n, kind in enumerate(kinds)]
    made = {f"v{n}": given[kind] for n, kind in enumerate(kinds)}
    return partition(make("; ".join(text), f"v{len(kinds) - 1}", **made), [Op("*")])


def test_small_products_in_a_row_stay_on_a_lane(make: Make) -> None:
    """No fusion spares what it costs to hand them out one by one."""
    pg = row(make, ["small"] * 100 + ["big"], small=SMALL_PRODUCT, big=BIG)
    assert on_lanes(pg) == {"small"}


def test_what_a_lane_does_in_one_go_is_not_taken_apart(make: Make) -> None:
    loops = {"cost_ns": 0.02 * MS, "spread": Spread(forks=1.0)}
    kinds = ["big", *["cumsum", "loops"] * 10, "big"]
    pg = better_on_lanes(row(make, kinds, cumsum=SERIAL, loops=loops, big=BIG), "cumsum", 0.03 * MS)
    best = Moldable(pg, 2, 1, 2, machine.numbers().program_ns).best()
    assert on_lanes(pg) == {"cumsum", "loops"} and len(best.on_lanes) == 20


def test_lanes_of_several_cores_hand_out_work_too(make: Make) -> None:
    cumsum = {"cost_ns": 2 * MS, "spread": Spread(elements=0.1 * MS, forks=20.0)}
    pg = better_on_lanes(
        row(make, ["big", "cumsum", "big"], cumsum=cumsum, big=BIG), "cumsum", 0.6 * MS
    )
    best = Moldable(pg, 2, 8, 16, machine.numbers().program_ns).best()
    assert {pg.graph.ops[pg.regions[r].ops[0]].kind for r in best.on_lanes} == {"cumsum"}


LONGEST_NS = 0.3 * MS


@pytest.mark.parametrize(("cores", "on_caller"), [(2, True), (16, False), (64, False)])
def test_the_thread_that_calls_has_one_core(make: Make, cores: int, on_caller: bool) -> None:
    """A lane may have many: what they gain is not gained there."""
    pg = row(make, ["small"] * 2, small=SMALL_PRODUCT)
    tasks = Moldable(pg, 2, cores // 2, cores, 40_000.0, LONGEST_NS)
    assert tasks.is_for_the_caller() == on_caller
    if on_caller:
        assert tasks.placed(frozenset(), (1,)).length_ns == 0.04 * MS


def test_where_threads_are_quick_products_are_shared_out(make: Make) -> None:
    """What it costs to hand work out is known by a factor of ten; what two cores gain of it, better."""
    product = {"cost_ns": 0.12 * MS, "spread": Spread(products=0.12 * MS, forks=1.0)}
    tasks = Moldable(row(make, ["product"] * 2, product=product), 2, 1, 2, 65_000.0, LONGEST_NS)
    assert not tasks.is_for_the_caller()
    pg = row(make, ["small"] * 3, small=SMALL_PRODUCT)
    assert Moldable(pg, 2, 1, 2, 65_000.0, LONGEST_NS).is_for_the_caller()


def test_what_a_lane_has_better_kernels_for_is_not_for_the_caller(make: Make) -> None:
    pg = row(make, ["cumsum"] * 2, cumsum=SERIAL)
    assert Moldable(pg, 2, 1, 2, 65_000.0, LONGEST_NS).is_for_the_caller()
    tasks = Moldable(better_on_lanes(pg, "cumsum", 0.05 * MS), 2, 1, 2, 65_000.0, LONGEST_NS)
    assert not tasks.is_for_the_caller()
    assert tasks.placed(frozenset(), (1,)).length_ns > 0.2 * MS


def test_longer_programs_are_not_for_the_caller(make: Make) -> None:
    pg = row(make, ["serial"] * 4, serial=SERIAL)
    assert not Moldable(pg, 2, 1, 2, 1e9, LONGEST_NS).is_for_the_caller()


TILE = {"cost_ns": MS, "spread": Spread(tiles=MS)}


def test_what_may_be_shared_out_after_all_is_not_for_one_lane(make: Make) -> None:
    """A convolution runs on one core by itself, and on all fused with others: only sorts gain nothing."""
    for kind, given in (("tile", TILE), ("serial", {"cost_ns": MS})):
        tasks = Moldable(row(make, [kind] * 3, **{kind: given}), 1, 1, 2, 55_000.0)
        assert tasks.is_for_one_lane(MS) == (kind == "serial")
        assert tasks.all_wide().length_ns == pytest.approx(3 * MS + 55_000.0)


IN_VAIN = {"cost_ns": 0.2 * MS, "spread": Spread(products=-0.2 * MS)}
"""LAPACK's work, which BLAS's threads make longer."""


def test_a_short_program_has_one_lane_if_that_gains_more_than_a_lane_costs(
    make: Make,
) -> None:
    for gains, given in ((True, IN_VAIN), (False, {"cost_ns": 0.2 * MS})):
        tasks = Moldable(row(make, ["solve"], solve=given), 1, 1, 2)
        assert tasks.is_for_one_lane(10 * MS) == gains
        assert not tasks.is_for_one_lane(0.0)


def test_the_caller_does_not_hold_back_threads_of_blas(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg = row(make, ["solve"], solve=IN_VAIN)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert math.isinf(pg.on_caller_ns())
    assert not Moldable(pg, 2, 1, 2, 65_000.0, LONGEST_NS).is_for_the_caller()
    monkeypatch.setattr(machine, "cores", lambda: 1)  # where there are none
    assert pg.on_caller_ns() == 0.2 * MS


def test_small_results_are_copied_into_memory_that_was_used_before() -> None:
    numbers = machine.numbers()
    assert numbers.results_speed(1 << 20) == numbers.copy_bytes_per_ns
    assert numbers.results_speed(1 << 24) == numbers.fresh_copy_bytes_per_ns


def test_what_may_be_shared_out_after_all_has_to_gain_more_by_lanes(make: Make) -> None:
    def gains(long: int, short: int) -> bool:
        text = "; ".join(f"v{n} = tile x" for n in range(2))
        sizes = {"v0": long, "v1": short}
        given = {v: {"cost_ns": n * MS, "spread": Spread(tiles=n * MS)} for v, n in sizes.items()}
        pg = partition(make(text, "v0 v1", **given), [Op("*")])
        return bool(Moldable(pg, 2, 1, 2, 55_000.0).best().on_lanes)

    assert gains(4, 4) and gains(5, 3)
    assert not gains(7, 1)  # an eighth less by the model; half of that may be had without lanes


@pytest.mark.parametrize("forks", [0.0, 2.0], ids=["loses", "gains"])
def test_lanes_gain_by_a_margin_or_are_hoped_for(
    make: Make, forks: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "numbers", lambda: machine.ASSUMED)
    # Two products beside each other: by itself each gains more by all cores than by a lane, but for forks.
    product = {"cost_ns": MS, "spread": Spread(products=MS, forks=forks)}
    pg = partition(make("a = dot x; b = dot x", "a b", a=product, b=product), [Op("*")])
    tasks = Moldable(pg, 2, 1, 2)
    lanes, original = tasks.placed(frozenset(), (1, 1)), tasks.all_wide()
    gain = 1.0 - lanes.length_ns / original.length_ns
    assert (gain > 0.02) == bool(forks) and gain > -0.2

    def overlaps(margin: float) -> bool:
        best = tasks.best(margin)
        assert len(best.lanes_used) == 2 or best == original
        return len(best.lanes_used) == 2

    if forks:
        assert overlaps(gain - 0.01) and not overlaps(gain + 0.01) and overlaps(-0.01)
    else:
        assert overlaps(gain - 0.01) and not overlaps(gain + 0.01) and not overlaps(0.0)


def test_without_anything_beside_there_are_no_lanes_to_hope_for(make: Make) -> None:
    chain_of = partition(make("a = dot x; b = dot a", "b", a=PRODUCT, b=PRODUCT), [Op("*")])
    alone = Moldable(chain_of, 2, 1, 2)
    assert alone.best(-0.9) == alone.best() == alone.all_wide()


class Counted(list[set[int]]):
    """Sets, and how often one was asked for."""

    asked = 0

    def __getitem__(self, index: Any) -> Any:
        type(self).asked += 1
        return super().__getitem__(index)


def test_what_is_ready_is_looked_at_once(make: Make) -> None:
    """A look at each ready region for each placed one: 512 independent sorts took 18 s to plan."""
    many = 200
    text = "; ".join(f"s{k} = sort x" for k in range(many))
    pg = partition(make(text, " ".join(f"s{k}" for k in range(many))), [Op("*")])
    tasks = Moldable(pg, 2, 1, 2)
    tasks.preds = Counted(tasks.preds)
    placed = tasks.placed(frozenset(), (1, 1))
    assert [region for region, _ in placed.order] == list(range(many))
    assert Counted.asked <= 20 * many
