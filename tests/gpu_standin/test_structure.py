"""What the driver was asked to do has the plan's order, and no more: recorded, replayed, and updated."""

from __future__ import annotations

import re
from typing import Any

import driver_trace
import jax
import jax.numpy as jnp
import pytest
from cases import BACKENDS, CASES, OneLane, assert_close, matrix, scheduled, two_products, wanted

import dynaflow_xla as dfx
from dynaflow_xla.frontends.jax.lanes.device_stage import DeviceStageBuilder
from dynaflow_xla.planning.instructions import Wait


def traced(fast: Any, x: Any, driver: Any, values: Any) -> tuple[driver_trace.Trace, Any]:
    x = jax.block_until_ready(jax.device_put(x))
    with driver.tracing(values.kernel) as traces:
        got = jax.block_until_ready(fast(x))
    return traces[0], got


def check(trace: driver_trace.Trace, case: Any) -> None:
    races = trace.races()
    assert not races, driver_trace.report(races)
    for first, then in case.before:
        a, b = trace.kernels(first), trace.kernels(then)
        assert a and b, f"no kernels of {first} or {then}: {[str(k) for k in trace.kernels()]}"
        fused = [x for x in a if x in b]  # XLA may fuse regions
        apart = [(x, y) for x in a for y in b if x not in fused and y not in fused]
        held = fused or any(trace.before(x, y) for x, y in apart)
        assert held, f"{first} is not before {then}: {[str(k) for k in trace.kernels()]}"
        wrong = [(x, y) for x, y in apart if trace.before(y, x)]
        assert case.in_axes is not None or not wrong, f"{then} is before {first}"
    for one, other in case.free:
        pairs = [
            (x, y) for x in trace.kernels(one) for y in trace.kernels(other)
            if x is not y and not trace.ordered(x, y)
        ]  # fmt: skip
        assert pairs, f"{one} and {other} are one after the other"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.values
@pytest.mark.parametrize("name", CASES)
def test_the_order_is_the_plans(name: str, backend: str, driver: Any, values: Any) -> None:
    """The first call records, the second replays, the third has arguments elsewhere."""
    case = CASES[name]
    if backend not in case.backends:
        pytest.skip(case.why)
    fast = scheduled(case, backend)
    kept = []
    for seed in range(3):
        x = matrix(seed)
        trace, got = traced(fast, x, driver, values)
        check(trace, case)
        assert_close(wanted(case.fn, x), got)
        kept.append(got)  # new results have to lie elsewhere
    if backend == "xla":
        assert any(k.graph for k in trace.kernels()), "nothing was a part of a CUDA graph"


def test_lanes_are_streams_of_their_own(driver: Any, values: Any) -> None:
    fast = scheduled(CASES["branches"], "ffi")
    traced(fast, matrix(0), driver, values)
    trace, _ = traced(fast, matrix(1), driver, values)
    left, right = ({k.stream for k in trace.kernels(r)} for r in ("left", "right"))
    assert left and right and not left & right


def three_regions(x: Any) -> Any:
    """Of this file's mutant alone: a program is known by its plan, which says nothing of the fault."""
    with dfx.mark("left"):
        a = jnp.tanh(x @ x) + 3
    with dfx.mark("right"):
        b = jax.nn.softmax(x, axis=1) * 5
    with dfx.mark("join"):
        return jnp.sin(a * 2 + b)


def test_a_wait_dropped_from_a_plan_is_a_race_of_regions_and_lanes(
    driver: Any, values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a plan of XLA executables whose lanes do not wait for each other."""
    segments = DeviceStageBuilder._segments

    def without_waits(self: Any) -> Any:
        return [item for item in segments(self) if not isinstance(item, Wait)]

    monkeypatch.setattr(DeviceStageBuilder, "_segments", without_waits)
    fast = dfx.schedule(three_regions, strategy=dfx.Branches(), backend="ffi", lanes=dfx.Lanes(2))
    trace, _ = traced(fast, matrix(0), driver, values)
    said = driver_trace.report(trace.races())
    pair = r"\(lane (\d) of .*(left|right).*\) and .* \(lane (\d) of .*join.*\), which meet"
    found = re.search(pair, said)
    assert found and found[1] != found[3], said


def test_a_gate_without_its_edge_is_seen(driver: Any, values: Any) -> None:
    """The mutant: a chain that only gates hold, without them."""
    chain = dfx.schedule(two_products, strategy=OneLane(), backend="xla", lanes=dfx.Lanes(1))
    x = jax.device_put(matrix(0))
    chain.planned((x,), {}).gates.clear()
    trace, _ = traced(chain, matrix(0), driver, values)
    with pytest.raises(AssertionError, match="left is not before right"):
        check(trace, CASES["chain"])
