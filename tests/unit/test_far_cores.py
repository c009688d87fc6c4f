"""Rounds while a machine's two cores are far from each other, and what they may decide."""

from __future__ import annotations

import itertools
import os
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from dynaflow_xla.machine import distance
from dynaflow_xla.tuning import autotune, choice, rounds

REAL = distance.round_trip_ns


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_only_two_cores_have_a_distance(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    engine = types.SimpleNamespace(round_trip_ns=lambda: 321.0)
    monkeypatch.setitem(sys.modules, "dynaflow_xla.ffi._engine", engine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    assert REAL() == (321.0 if cores == 2 else 0.0)


def test_without_an_engine_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dynaflow_xla.ffi._engine", raising=False)
    assert REAL() == 0.0


def test_the_engine_tells_the_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pytest.importorskip("dynaflow_xla.ffi._engine")
    found = [engine.round_trip_ns() for _ in range(20)]
    if len(os.sched_getaffinity(0)) < 2:
        assert not any(found)
    else:
        assert 1.0 < max(found) < 1e6
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        assert engine.round_trip_ns() == 0.0
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> Any:
    """See ``_measured``."""
    return partial(_measured, monkeypatch, sleep)


def _measured(
    monkeypatch: pytest.MonkeyPatch,
    sleep: Callable[[float], None],
    trips: Sequence[float],
    seconds: Callable[[str, bool], float],
    names: Sequence[str] = ("original", "lanes"),
    turns: int = 6,
) -> autotune.Medians:
    """Measures candidates whose calls take what ``seconds`` says of a name and of far cores."""
    told = itertools.chain(trips, itertools.repeat(trips[-1]))
    state = 0.0

    def trip() -> float:
        nonlocal state
        state = next(told)
        return state

    monkeypatch.setattr(distance, "round_trip_ns", trip)
    monkeypatch.setattr(autotune, "ROW_S", 0.0)

    def run(name: str) -> None:
        sleep(seconds(name, state > distance.FAR_NS))

    runs = {name: (lambda name=name: run(name)) for name in names}  # type: ignore[misc]
    return autotune.measure(
        runs, budget_s=60.0, rounds=turns, sample_s=0.0, plain=["original"], margin=0.03
    )


def _decoder(name: str, far: bool) -> float:
    """Seconds as one of JAX took them: lanes lose, and gain where the cores are far."""
    return {"original": (8.7e-3, 14.5e-3), "lanes": (9.6e-3, 12.1e-3)}[name][far]


def test_near_rounds_decide_if_there_are_enough(measured: Any) -> None:
    made = measured([300.0, 55.0] * 20, _decoder)
    assert not made.far
    assert made == {"original": pytest.approx(8.7), "lanes": pytest.approx(9.6)}
    assert all(len(values) == 6 for values in made.samples.values())
    assert autotune.pick(made, "original", 0.03)[0] == "original"


def test_far_cores_alone_have_to_show_a_quarter(measured: Any) -> None:
    made = measured([320.0], _decoder)
    assert made.far and made == {"original": pytest.approx(14.5), "lanes": pytest.approx(12.1)}
    name, why = autotune.pick(made, "original", 0.03)
    assert name == "original"
    assert why.endswith("which has to gain 25% while the two cores were far from each other")
    made = measured([320.0], lambda name, _: 2e-3 if name == "original" else 1e-3)
    name, why = autotune.pick(made, "original", 0.03)
    assert name == "lanes" and why.endswith("while the two cores were far from each other")


def _three(name: str, far: bool) -> float:
    """Seconds of an original that suffers most from far cores, and of two that lose to it."""
    return {"original": (8.7e-3, 14.5e-3), "a": (9.6e-3, 11.9e-3), "b": (9.7e-3, 11.95e-3)}[name][
        far
    ]


@pytest.mark.parametrize("far_rounds", [0, 2, 5, 6, 7, 11, 12, 40])
def test_nobody_is_compared_in_other_rounds(measured: Any, far_rounds: int) -> None:
    """With far cores alone the original would have been given up, and near rounds decided without it."""
    made = measured([320.0] * far_rounds + [50.0], _three, ("original", "a", "b"), turns=11)
    assert autotune.pick(made, "original", 0.03)[0] == "original"
    there = {name: 1e3 * _three(name, made.far) for name in made}
    assert made == {name: pytest.approx(ms) for name, ms in there.items()}
    assert made.far == (far_rounds == 40)


@pytest.mark.parametrize("far_rounds", [0, 11])
def test_who_is_slow_is_given_up_while_cores_are_near(measured: Any, far_rounds: int) -> None:
    made = measured([320.0] * far_rounds + [50.0], lambda name, _: 9e-3 if name == "slow" else 1e-3,
        ("original", "lanes", "slow"), turns=11,
    )  # fmt: skip
    assert not made.far and made["slow"] == pytest.approx(9.0)
    assert len(made.samples["slow"]) == 11
    assert len(made.samples["original"]) == (11 if far_rounds else 22)


@pytest.mark.parametrize(("begin", "then"), [(50.0, 320.0), (320.0, 50.0)])
def test_rounds_in_doubt_are_of_one_kind(measured: Any, begin: float, then: float) -> None:
    """A gain in doubt while the cores were near, or far, is not settled by the other rounds."""
    number = 0

    def seconds(name: str, far: bool) -> float:
        nonlocal number
        number += name == "lanes"
        gain = 0.3 if number % 4 < 2 else 1.2
        return (gain if name == "lanes" else 1.0) * (2e-3 if far else 1e-3)

    made = measured([begin] * 12 + [then], seconds)
    assert made.far == (begin > distance.FAR_NS)
    assert made["original"] == pytest.approx(2.0 if made.far else 1.0)
    assert len(made.samples["lanes"]) == len(made.samples["original"]) == 12


@pytest.mark.parametrize(("near", "far", "is_far"), [
    (5, 9, False), (4, 3, True), (4, 2, False), (2, 3, True), (2, 2, True), (2, 0, False),
])  # fmt: skip
def test_which_rounds_count(
    monkeypatch: pytest.MonkeyPatch, near: int, far: int, is_far: bool
) -> None:
    taken = rounds.Rounds(["a", "b"])
    for count, ns in ((near, 60.0), (far, 300.0)):
        monkeypatch.setattr(distance, "round_trip_ns", lambda ns=ns: ns)
        for _ in range(count):
            names, samples = taken.begin()
            for name in names:
                samples[name].append(ns)
    made = taken.medians()
    assert made.far == is_far
    wanted = {(2, 2): 4, (2, 0): 2}.get((near, far), far if is_far else near)
    assert len(made.samples["a"]) == len(made.samples["b"]) == wanted


def test_cores_that_were_never_near_are_so_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trip = 100.0, 320.0
    monkeypatch.setattr(distance, "time", types.SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(distance, "round_trip_ns", lambda: trip)
    samples = {"original": [14.5] * 11, "lanes": [12.1] * 11}

    def chosen() -> str:
        assert distance.are_far() == (trip > distance.FAR_NS)
        return autotune.pick(autotune.Medians(samples, far=True), "original", 0.03)[0]

    assert chosen() == "original"
    now += distance.FOR_GOOD_S / 2
    assert chosen() == "original"
    now += distance.FOR_GOOD_S
    assert chosen() == "lanes"
    trip = 0.0  # nobody knows
    assert chosen() == "lanes"
    trip = 50.0
    assert chosen() == "original"
    trip = 320.0
    assert chosen() == "original", "they were near"


@pytest.mark.parametrize(("trips", "far"), [
    ([60.0, 210.0], [False, True]),  # within a core complex, and between two
    ([250.0, 130.0, 190.0, 250.0, 300.0], [False, False, False, False, True]),  # a mesh
    ([320.0, 320.0, 60.0, 210.0], [True, True, False, True]),
])  # fmt: skip
def test_what_is_far_depends_on_what_is_near(
    monkeypatch: pytest.MonkeyPatch, trips: list[float], far: list[bool]
) -> None:
    told = iter(trips)
    monkeypatch.setattr(distance, "round_trip_ns", lambda: next(told))
    assert [distance.are_far() for _ in trips] == far


def test_one_of_a_few_rounds_does_not_weigh() -> None:
    made = autotune.Medians({"original": [100.0, 100.0, 130.0], "b": [99.5] * 3})
    assert made["original"] == 100.0
    assert autotune.pick(made, "original", 0.03)[0] == "original"


@pytest.mark.parametrize(("then", "now", "holds"), [
    (False, 60.0, True), (False, 300.0, True), (True, 300.0, True), (True, 60.0, False),
])  # fmt: skip
def test_a_decision_of_far_cores_holds_while_they_are(
    monkeypatch: pytest.MonkeyPatch, then: bool, now: float, holds: bool, tmp_path: Any
) -> None:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(distance, "round_trip_ns", lambda: now)
    made = choice.Choice(None, "it was measured", {"original": 1.0}, candidate="original", far=then)
    choice.to_disk("key", made)
    found = choice.from_disk("key", lambda _: None, choice.Choice)
    assert (found is not None) == holds
    assert found is None or found.far == then


@pytest.mark.parametrize("far", [False, True])
def test_a_near_decision_stays_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, far: bool
) -> None:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path))
    for reason, state in (("first", False), ("then", far)):
        choice.to_disk("key", choice.Choice(None, reason, {}, candidate="original", far=state))
    found = autotune.load("key")
    assert found is not None and found["reason"] == ("first" if far else "then")
