"""Random plans, thousands of them: values, and no two accesses of launches without an order between them."""

from __future__ import annotations

import os
from typing import Any

import driver_trace
import pytest
from kernel_plans import Plans, unordered
from standin_plugin import TOTAL

PLANS = int(os.environ.get("STANDIN_PLANS") or 2000)
FIRST = int(os.environ.get("STANDIN_FIRST") or 0)  # seed
PARTS = 8


@pytest.fixture(scope="module")
def plans() -> Any:
    from standin_plugin import DRIVER

    return Plans(DRIVER)


def _lanes(told: Any) -> list[int]:
    return [t[1] for t in told if t[0] == "step"]


@pytest.mark.values
@pytest.mark.parametrize("part", range(PARTS))
def test_random_plans(part: int, plans: Any, driver: Any) -> None:
    driver.delay(40)
    for seed in range(FIRST + part * PLANS // PARTS, FIRST + (part + 1) * PLANS // PARTS):
        made = plans.planned(seed)
        trace, right = plans.run(made, seed)
        races = trace.races()
        assert not races, f"plan {seed}: {driver_trace.report(races)}"
        assert right, f"plan {seed}: wrong values"
        kernels = trace.kernels()
        assert len(kernels) == len(made.of.steps)
        TOTAL.update(plans=1, pairs=len(kernels) * (len(kernels) - 1) // 2)


def test_a_wait_that_is_dropped_is_a_race_where_it_was_needed(plans: Any) -> None:
    """Each wait of some plans; whether it was needed is worked out without the driver."""
    needed = spare = 0
    for seed in range(120):
        made = plans.planned(seed)
        told = [t for t in made.stage.told if t[0] in ("step", "record", "wait")]
        for drop in range(sum(t[0] == "wait" for t in told)):
            trace, _ = plans.run(made, seed, plans.without(made, drop))
            expected = unordered(told, drop)
            races = trace.races()
            assert bool(races) == expected, f"plan {seed} without its wait {drop}"
            if races:  # told with both regions and lanes, which are not the same
                told_of = driver_trace.report(races[:1])
                (a, b, _), numbers = races[0], dict(zip(made.order, _lanes(told), strict=True))
                for op in (a, b):
                    (region,) = op.regions
                    assert f"(lane {numbers[int(region[1:])]} of {region})" in told_of, told_of
                assert a.lane != b.lane
            needed, spare = needed + expected, spare + (not expected)
    TOTAL.update(mutants=needed)
    assert needed > 50, (needed, spare)
