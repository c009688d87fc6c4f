"""Decisions that a faster way is not chosen for because of far cores: they are made again near."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.machine import distance
from dynaflow_xla.strategies.auto import Auto
from dynaflow_xla.tuning import quiet
from dynaflow_xla.tuning.choice import Choice, to_disk, tuned
from dynaflow_xla.tuning.decisions import Decisions


class _Scene:
    """Decisions of one function on a machine whose cores move apart as told; its clock stands still."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.trip, self.measured = 0.0, 320.0, 0
        self.made: Callable[[], Choice] = lambda: _kept(far=self.trip > 200)
        patch.setattr(distance, "round_trip_ns", lambda: self.trip)
        self.decisions = Decisions(lambda reason: Choice(None, reason))
        self.decisions.put_off = quiet.PutOff(clock=lambda: self.now)

    def call(self, after_s: float = 1e4) -> Choice | None:
        self.now += after_s

        def choose(_: Any) -> Choice:
            self.measured += 1
            return self.made()

        decided = self.decisions.decided("f")
        return decided or self.decisions.now("f", choose, self.decisions.put, margin=0.02)


def _kept(far: bool, lanes_ms: float = 8.5) -> Choice:
    return Choice(None, "the original (10 ms)", {"original": 10.0, "lanes": lanes_ms}, far=far)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> _Scene:
    return _Scene(monkeypatch)


def test_it_is_measured_again_once_the_cores_are_near(scene: _Scene) -> None:
    assert scene.call() is None and scene.measured == 1
    why = scene.decisions.put_off.reason("f")
    assert why == "the original (10 ms); a later call tries again"
    for _ in range(30):  # longer than what something else may put off
        assert scene.call() is None
    assert scene.measured == 1, "far cores tell nothing new"
    scene.trip = 55.0
    assert scene.call(after_s=0.0) is None, "not before its time"
    scene.made = lambda: Choice(
        "child", "lanes", {"original": 10.0, "lanes": 8.5}, candidate="lanes"
    )
    made = scene.call()
    assert made is not None and made.child == "child" and scene.measured == 2
    assert not len(scene.decisions.put_off) and scene.call() is made


def test_pauses_grow_up_to_a_limit(scene: _Scene) -> None:
    scene.call()
    waits = []
    for _ in range(12):
        before = scene.now
        while not scene.decisions.put_off.due("f"):
            scene.now += 0.05
        waits.append(scene.now - before)
        scene.call(after_s=0.0)
    assert waits == sorted(waits) and waits[0] < 0.3 and 10 < waits[-1] < 20


@pytest.mark.parametrize(
    "made",
    [
        _kept(far=False),
        _kept(far=True, lanes_ms=10.5),
        _kept(far=True, lanes_ms=9.9),
        Choice("child", "lanes", {"original": 10.0, "lanes": 7.0}, candidate="lanes", far=True),
        Choice(None, "too small"),
    ],
    ids=["near", "slower", "too little for near cores, too", "chosen though far", "not measured"],
)
def test_others_are_decided_at_once(scene: _Scene, made: Choice) -> None:
    scene.made = lambda: made
    assert scene.call() is made and scene.measured == 1


def test_cores_that_stay_far_decide(scene: _Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scene.call() is None
    monkeypatch.setattr(distance, "may_come_near", lambda: False)
    made = scene.call()
    assert made is not None and made.far and scene.call() is made


def test_cores_that_never_stay_near_decide_in_the_end(
    scene: _Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distance, "are_far", lambda: False)  # whenever it looks; far in each round
    assert [scene.call() is None for _ in range(3)] == [True, True, False]
    assert scene.measured == 3


def test_what_was_measured_is_kept_if_it_cannot_be_again(scene: _Scene) -> None:
    assert scene.call() is None
    scene.trip = 55.0
    scene.made = lambda: Choice(None, "no seconds left")
    made = scene.call()
    assert made is not None and made.far and made.medians_ms


@pytest.mark.parametrize("far_for", [1, 30])
def test_what_is_disturbed_when_near_gets_what_was_measured(scene: _Scene, far_for: int) -> None:
    for _ in range(far_for):
        assert scene.call() is None
    scene.trip = 55.0

    def disturbed() -> Choice:
        raise quiet.Disturbed("somebody ran")

    scene.made = disturbed
    attempts = [scene.call() for _ in range(20)]
    made = next(made for made in attempts if made is not None)
    assert attempts.index(made) >= 5, "waiting for the cores is no attempt that was disturbed"
    assert made.far and made.medians_ms["lanes"] == 8.5


def test_what_was_faster_has_to_be_measured_again(scene: _Scene) -> None:
    assert scene.call() is None
    scene.trip = 55.0
    scene.made = lambda: Choice(None, "few seconds", {"original": 10.0, "small": 11.0})
    made = scene.call()
    assert made is not None and "lanes" in made.medians_ms


def test_what_is_chosen_near_is_kept_though_something_was_not_measured_again(scene: _Scene) -> None:
    assert scene.call() is None
    scene.trip = 55.0
    chosen = Choice("child", "other", {"original": 10.0, "other": 7.0}, candidate="other")
    scene.made = lambda: chosen
    assert scene.call() is chosen


def test_cleared_decisions_wait_for_nothing(scene: _Scene) -> None:
    assert scene.call() is None
    scene.decisions.clear()
    scene.made = lambda: _kept(far=False)
    assert scene.call() is not None and scene.measured == 2


def test_where_warnings_are_errors_a_decision_is_kept_before_one(
    scene: _Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be written to made each call measure anew."""
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", "/proc/none")
    scene.trip = 55.0

    def made() -> Choice:
        choice = _kept(far=False)
        to_disk("k", choice)
        return choice

    scene.made = made
    for where in (
        scene.call,
        lambda: tuned(Auto(), 1.0, lambda _: scene.decisions.put("g", made())),
    ):
        with (
            pytest.raises(dfx.FallbackWarning, match="decisions cannot be kept in /proc/none"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            where()
    assert scene.call() is scene.decisions.decided("f") is not None and scene.measured == 1
    assert scene.decisions.decided("g") is not None
    with pytest.warns(
        dfx.FallbackWarning, match="cannot be kept"
    ):  # at once, where nothing is decided
        to_disk("k", _kept(far=False))
