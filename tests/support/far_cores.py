"""Decisions while a machine's two cores are far from each other, alike in every frontend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dynaflow_xla.machine import distance
from dynaflow_xla.tuning import autotune, quiet


def check_whom_decisions_serve(patch: pytest.MonkeyPatch, decided: Callable[[], Any]) -> None:
    """A decision of far cores is for processes that find them so, until there is one of near cores.

    Args:
        patch: For the cores, and for what is measured: lanes win.
        decided: What is decided for a function that nobody scheduled before in this process.
    """
    trip, far = 320.0, True
    patch.setattr(distance, "round_trip_ns", lambda: trip)

    def measure(runs: dict[str, Any], *_: Any, **__: Any) -> autotune.Medians:
        for run in runs.values():
            run()
        return autotune.Medians({n: [2.0 if n == "original" else 1.0] * 6 for n in runs}, far)

    patch.setattr(autotune, "measure", measure)
    first = decided()
    assert first.far and "while the two cores were far" in first.reason
    assert decided().reason == f"cached: {first.reason}"
    trip, far = 50.0, False
    second = decided()
    assert not second.far and not second.reason.startswith("cached")
    trip = 320.0
    assert decided().reason == f"cached: {second.reason}"


def check_a_faster_way_waits_for_near_cores(
    patch: pytest.MonkeyPatch, call: Callable[[], Any], explained: Callable[[], str], decisions: Any
) -> None:
    """While the cores are far the original runs where a quarter has to be gained; once near it is decided.

    Args:
        patch: For the cores, and for what is measured: lanes take nine tenths.
        call: Calls the function, compares its result, and gives what is decided.
        explained: What ``explain`` says of the function.
        decisions: Of the function.
    """
    trip, now = 320.0, 0.0
    patch.setattr(distance, "round_trip_ns", lambda: trip)
    decisions.put_off = quiet.PutOff(clock=lambda: now)

    def measure(runs: dict[str, Any], *_: Any, **__: Any) -> autotune.Medians:
        for run in runs.values():
            run()
        samples = {n: [1.0 if n == "original" else 0.9] * 12 for n in runs}
        return autotune.Medians(samples, trip > distance.FAR_NS)

    patch.setattr(autotune, "measure", measure)
    assert call() is None
    told = explained()
    assert "which has to gain 25% while the two cores were far" in told and "tries again" in told
    now += 1000.0
    assert call() is None
    now, trip = now + 1000.0, 50.0
    made = call()
    assert made is not None and made.planned and not made.far, made
