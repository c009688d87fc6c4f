"""The benchmarks' paired rounds: rounds while the cores are far apart, and samples of steady speed."""

from __future__ import annotations

import itertools
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("jax", reason="JAX is not installed")


@pytest.fixture
def measure() -> Any:
    from common import measure

    return measure


def _trips(monkeypatch: pytest.MonkeyPatch, measure: Any, trips: Iterator[float]) -> None:
    monkeypatch.setattr(measure.distance, "round_trip_ns", lambda: next(trips))


def test_far_rounds_are_kept_apart_and_taken_again(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before and after: the third round begins near and ends far.
    _trips(monkeypatch, measure, itertools.chain([50, 50, 300, 310, 60, 320], itertools.repeat(55)))
    ticks: list[int] = []
    made, calls = measure.paired(
        {"a": lambda: None, "b": lambda: None}, 4, sample_ms=0.0, tick=lambda: ticks.append(1)
    )
    assert calls == 1 and len(ticks) == 4
    assert [len(made[name]) for name in ("a", "b")] == [4, 4]
    assert [len(made.far[name]) for name in ("a", "b")] == [2, 2]
    assert made.far_counted == 0 and made.round_trips_ns == [50, 310, 320, 55, 55, 55]
    told = made.as_dict()
    assert told["samples_ms"] == dict(made) and told["samples_far_ms"] == made.far


def test_cores_that_stay_far_are_counted(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _trips(monkeypatch, measure, itertools.repeat(300.0))
    made, _ = measure.paired({"a": lambda: None}, 3, sample_ms=0.0)
    assert len(made["a"]) == made.far_counted == 3 and len(made.far["a"]) == 9


def test_nothing_to_run(measure: Any) -> None:
    made, calls = measure.paired({}, 3)
    assert made == {} and calls == 1


def test_a_run_is_warm_before_its_sample(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _trips(monkeypatch, measure, itertools.repeat(0.0))
    now, called = 0.0, {"a": 0, "b": 0}

    def run(name: str) -> None:
        nonlocal now
        called[name] += 1
        now += 2e-3

    clock = types.SimpleNamespace(perf_counter=lambda: now, sleep=time.sleep)
    monkeypatch.setattr(measure, "time", clock)
    runs = {name: (lambda name=name: run(name)) for name in called}  # type: ignore[misc]
    made, calls = measure.paired(runs, 5, warm_ms=20.0, sample_ms=30.0, warmup=3)
    assert calls == 15
    assert made["a"] == pytest.approx([2.0] * 5)
    assert called == dict.fromkeys(called, 3 + 5 * (10 + 15))
