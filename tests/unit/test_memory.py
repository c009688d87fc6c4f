"""Scratch offsets and the order they rest on, against plain definitions of both."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings, strategies as st

from dynaflow_xla.machine import ALIGNMENT, aligned
from dynaflow_xla.planning.instructions import Instruction, Launch, Merge, Record, Slice, Wait
from dynaflow_xla.planning.memory import Request, assign_offsets, disjoint_in_time
from dynaflow_xla.planning.order import HappensBefore


def launch(lane: int) -> Launch:
    return Launch(0, "f", lane, 0, (), ())


# -- happens_before -------------------------------------------------------------------------------


def test_lane_order_events_and_barriers() -> None:
    instructions = [
        launch(0), launch(1), Record(0, 0), launch(0), Wait(0, 1), launch(1), launch(-1), launch(2),
    ]  # fmt: skip
    before = HappensBefore(instructions)
    assert before(0, 2) and before(0, 3) and before(1, 4)
    assert before(0, 5) and not before(3, 5)  # what lane 0 does after its record is not waited for
    assert not before(0, 1) and not before(1, 0)
    assert all(before(i, 6) and before(i, 7) for i in range(6)) and before(6, 7)
    assert not any(before(i, i) or before(7, i) for i in range(7))


def test_slices_and_merges_order_nothing() -> None:
    before = HappensBefore([Slice(0, 1, 0, 0, 4), launch(0), launch(0), Merge((1,), 2, 0)])
    assert before(1, 2)
    assert not any(before(0, i) or before(i, 3) for i in range(4))


def random_instructions(rng: random.Random, lanes: int, count: int) -> list[Instruction]:
    made: list[Instruction] = []
    recorded: list[int] = []
    for _ in range(count):
        lane = rng.randrange(lanes)
        kind = rng.random()
        if kind < 0.25:
            made.append(Record(len(recorded), lane))
            recorded.append(len(recorded))
        elif kind < 0.5 and recorded:
            made.append(Wait(rng.choice(recorded), lane))
        else:
            made.append(launch(-1 if rng.random() < 0.1 else lane))
    return made


def lane_of(instruction: Instruction) -> int:
    assert isinstance(instruction, Launch | Record | Wait)
    return instruction.lane


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 18))
def test_happens_before_is_the_closure_of_its_edges(seed: int, lanes: int, count: int) -> None:
    instructions = random_instructions(random.Random(seed), lanes, count)
    edges = {
        (i, j)
        for (i, a), (j, b) in itertools.combinations(enumerate(instructions), 2)
        if lane_of(a) == lane_of(b)
        or -1 in (lane_of(a), lane_of(b))
        or (isinstance(a, Record) and isinstance(b, Wait) and a.event == b.event)
    }
    reach = set(edges)
    for middle in range(count):
        reach |= {
            (i, j) for i in range(count) for j in range(count)
            if (i, middle) in reach and (middle, j) in reach
        }  # fmt: skip
    before = HappensBefore(instructions)
    assert {(i, j) for i in range(count) for j in range(count) if before(i, j)} == reach


# -- offsets --------------------------------------------------------------------------------------


def test_align() -> None:
    assert [aligned(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


def test_disjoint_in_time() -> None:
    def before(i: int, j: int) -> bool:
        return i < j

    assert disjoint_in_time((0, 1), (2, 3), before) and disjoint_in_time((2, 3), (0, 1), before)
    assert not disjoint_in_time((0, 2), (1, 3), before)
    assert not disjoint_in_time((0, 1), (1, 2), before)  # one reads while the other is written
    assert disjoint_in_time((), (0,), before)


def test_one_lane_reuses_all_it_can() -> None:
    """A chain of equal buffers needs two of them at a time, whatever its length."""
    requests = [Request(k, 100, (k, k + 1)) for k in range(50)]
    offsets, peak = assign_offsets(requests, lambda i, j: i < j)
    assert peak == 2 * 128 and set(offsets.values()) == {0, 128}


def test_nothing_is_shared_where_nothing_is_ordered() -> None:
    requests = [Request(k, 64 * (k + 1), (2 * k, 2 * k + 1)) for k in range(5)]
    offsets, peak = assign_offsets(requests, lambda i, j: False)
    assert peak == 64 * 15 and len(set(offsets.values())) == 5


def test_a_gap_is_used_where_it_fits_best() -> None:
    before = {(2, 3), (2, 4), (2, 5)}
    requests = [
        Request(0, 256, (0, 1)), Request(1, 192, (2, 2)), Request(2, 128, (6, 6)),
        Request(3, 64, (3, 4)), Request(4, 128, (5, 5)),
    ]  # fmt: skip
    offsets, peak = assign_offsets(requests, lambda i, j: (i, j) in before)
    assert offsets == {0: 0, 1: 256, 2: 448, 4: 256, 3: 384}
    assert peak == 576


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(1, 14))
def test_live_buffers_never_overlap(seed: int, lanes: int, wanted: int) -> None:
    rng = random.Random(seed)
    instructions = random_instructions(rng, lanes, 20)
    before = HappensBefore(instructions)
    requests = [
        Request(
            number,
            rng.choice([0, 1, 63, 64, 65, 1000, 4096]),
            tuple(sorted(rng.sample(range(len(instructions)), rng.randint(1, 4)))),
        )
        for number in range(wanted)
    ]
    offsets, peak = assign_offsets(requests, before)
    assert set(offsets) == {r.id for r in requests}
    assert all(offset >= 0 and offset % ALIGNMENT == 0 for offset in offsets.values())
    ends = [offsets[r.id] + max(aligned(r.bytes), ALIGNMENT) for r in requests]
    assert peak == max(ends), "the peak that is stated is the one that is used"
    for a, b in itertools.combinations(requests, 2):
        apart = offsets[a.id] + a.bytes <= offsets[b.id] or offsets[b.id] + b.bytes <= offsets[a.id]
        in_turn = all(before(i, j) for i in a.accesses for j in b.accesses) or all(
            before(j, i) for i in a.accesses for j in b.accesses
        )
        assert apart or in_turn, (a, b)
    assert peak <= sum(max(aligned(r.bytes), ALIGNMENT) for r in requests)
    assert (offsets, peak) == assign_offsets(requests, before)
