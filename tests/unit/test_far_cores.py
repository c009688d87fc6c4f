"""Rounds while a machine's two cores are far from each other, and what they may decide."""

from __future__ import annotations

import itertools
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dynaflow_xla.machine import distance
from dynaflow_xla.tuning import autotune, choice, quiet, rounds

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


def _measured(
    monkeypatch: pytest.MonkeyPatch,
    trips: Sequence[float],
    seconds: Callable[[str, bool], float],
    names: Sequence[str] = ("original", "lanes"),
) -> autotune.Medians:
    """Measures candidates whose calls take what ``seconds`` says of a name and of far cores."""
    now = 0.0
    monkeypatch.setattr(
        autotune, "time", types.SimpleNamespace(perf_counter=lambda: now), raising=True
    )
    monkeypatch.setattr(autotune, "WARM_S", -1.0)
    monkeypatch.setattr(quiet, "PATIENCE_S", 60.0)
    told = itertools.chain(trips, itertools.repeat(trips[-1]))
    state = 0.0

    def trip() -> float:
        nonlocal state
        state = next(told)
        return state

    monkeypatch.setattr(distance, "round_trip_ns", trip)

    def run(name: str) -> None:
        nonlocal now
        now += seconds(name, state > distance.FAR_NS)

    runs = {name: (lambda name=name: run(name)) for name in names}  # type: ignore[misc]
    return autotune.measure(
        runs, budget_s=60.0, rounds=6, sample_s=0.0, plain=["original"], margin=0.03
    )


def _decoder(name: str, far: bool) -> float:
    """Seconds as one of JAX took them: lanes lose, and gain where the cores are far."""
    return {"original": (8.7e-3, 14.5e-3), "lanes": (9.6e-3, 12.1e-3)}[name][far]


def test_near_rounds_decide_if_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _measured(monkeypatch, [300.0, 55.0] * 20, _decoder)
    assert not made.far
    assert made == {"original": pytest.approx(8.7), "lanes": pytest.approx(9.6)}
    assert all(len(values) == 6 for values in made.samples.values())
    assert autotune.pick(made, "original", 0.03)[0] == "original"


def test_far_cores_alone_have_to_show_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _measured(monkeypatch, [320.0], _decoder)
    assert made.far and made == {"original": pytest.approx(14.5), "lanes": pytest.approx(12.1)}
    name, why = autotune.pick(made, "original", 0.03)
    assert name == "original"
    assert why.endswith(
        "which has to gain 25% while the two cores are as far from each other as now"
    )
    made = _measured(monkeypatch, [320.0], lambda name, _: 2e-3 if name == "original" else 1e-3)
    name, why = autotune.pick(made, "original", 0.03)
    assert name == "lanes" and why.endswith("as far from each other as now")


def test_who_was_given_up_before_the_cores_came_near(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _measured(
        monkeypatch, [320.0] * 6 + [50.0], lambda name, _: 9e-3 if name == "slow" else 1e-3,
        ("original", "lanes", "slow"),
    )  # fmt: skip
    assert not made.far and made["slow"] == pytest.approx(9.0)
    assert len(made.samples["original"]) == 6


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
            samples = taken.begin(["a", "b"])
            samples["a"].append(ns)
            samples["b"].append(ns)
    made = taken.medians()
    assert made.far == is_far
    wanted = {(2, 2): 4, (2, 0): 2}.get((near, far), far if is_far else near)
    assert len(made.samples["a"]) == len(made.samples["b"]) == wanted


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
