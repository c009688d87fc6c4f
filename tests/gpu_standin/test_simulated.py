"""The machine that simulated times assume: what runs beside what, and what cannot."""

from __future__ import annotations

import json

import pytest
from driver_trace import Trace
from simulated import H200, simulate

MB = 1 << 20


def trace(*kernels: tuple[int, int, int, list[int]], graph: int = 0) -> Trace:
    """Of kernels, each with its stream, blocks, megabytes read, and the numbers of those before it."""
    rows = [
        {
            "op": number, "stream": stream, "kind": "kernel", "name": f"k{number}", "after": after,
            "blocks": blocks, "accesses": [[number << 40, mb * MB, False]], "graph": graph, "launched": 1,
        }
        for number, (stream, blocks, mb, after) in enumerate(kernels, 1)
    ]  # fmt: skip
    return Trace("\n".join(map(json.dumps, rows)))


def test_small_kernels_overlap_and_chains_do_not() -> None:
    one = simulate(trace((1, 4, 0, []), graph=1))
    assert one == pytest.approx(H200.graph_us + H200.floor_us)
    assert simulate(trace((1, 4, 0, []), (1, 4, 0, []), graph=1)) == pytest.approx(one)
    both = simulate(trace((1, 4, 0, []), (1, 4, 0, [1]), graph=1))
    assert both == pytest.approx(one + H200.edge_us + H200.floor_us)


def test_kernels_that_fill_the_device_gain_nothing_from_each_other() -> None:
    alone = simulate(trace((1, 4096, 480, []), graph=1)) - H200.graph_us
    assert alone == pytest.approx(480 * MB / H200.bytes_per_us)
    both = simulate(trace((1, 4096, 480, []), (1, 4096, 480, []), graph=1)) - H200.graph_us
    assert both == pytest.approx(2 * alone)


def test_the_host_and_other_streams_take_time() -> None:
    apart = simulate(trace((1, 4, 0, []), (2, 4, 0, [])))
    assert apart == pytest.approx(2 * H200.launch_us + H200.floor_us)
    after = simulate(trace((1, 4, 0, []), (2, 4, 0, [1])))
    assert after == pytest.approx(H200.launch_us + 2 * H200.floor_us + H200.event_us)
