"""Turns to measure, what disturbs a measurement, and when what was put off is tried again."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dynaflow_xla.errors import DynaflowError
from dynaflow_xla.tuning import autotune, quiet


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[threading.Thread]:
    """Another Python thread that does this over and over."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=loop, name="somebody", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(60)


def sooner_or_later(look: Callable[[], None]) -> None:
    """Looks until it raises, for a minute at most."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        look()
        time.sleep(0.001)


def test_one_thread_measures_at_a_time() -> None:
    refused: list[BaseException] = []

    def other() -> None:
        try:
            with quiet.turn():
                pass
        except quiet.Disturbed as error:
            refused.append(error)

    with quiet.turn() as watch:
        watch.check()
        thread = threading.Thread(target=other, name="other")
        thread.start()
        thread.join(60)
        with pytest.raises(quiet.Disturbed, match="'other' called beside it"):
            watch.check()
    assert [type(e) for e in refused] == [quiet.NotMyTurn]
    with quiet.turn() as watch:  # the next one is not disturbed by it
        watch.check()


def test_a_turn_inside_a_turn_is_refused_and_no_disturbance() -> None:
    with quiet.turn() as watch:
        with pytest.raises(quiet.NotMyTurn), quiet.turn():
            pass
        watch.check()


def test_a_turn_can_be_waited_for() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with quiet.turn():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(quiet.NotMyTurn), quiet.turn(wait_s=0.01):
        pass
    threading.Timer(0.05, leave.set).start()
    with quiet.turn(wait_s=60):
        pass
    thread.join(60)


def test_an_error_gives_the_turn_back() -> None:
    with pytest.raises(KeyError), quiet.turn():
        raise KeyError
    with quiet.turn() as watch:
        watch.check()


def test_a_busy_thread_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """However seldom it has a core: on a busy machine a short look may find it waiting."""
    monkeypatch.setattr(quiet, "PATIENCE_S", 0.02)
    watch = quiet.ActivityWatch()
    watch.begin()
    with beside(lambda: None):
        with pytest.raises(quiet.Disturbed, match="not measured: .*busy|'somebody'"):
            sooner_or_later(watch.settle)
        with pytest.raises(DynaflowError):
            watch.check()
        watch = quiet.ActivityWatch()
        watch.begin()
        with pytest.raises(quiet.Disturbed, match="'somebody' ran beside it"):
            sooner_or_later(watch.check)
    monkeypatch.setattr(quiet, "PATIENCE_S", 60.0)
    watch = quiet.ActivityWatch()
    watch.begin()
    watch.settle()
    watch.check()


def test_a_thread_that_waits_disturbs_nobody() -> None:
    pause = threading.Event()
    with beside(lambda: pause.wait(60) and None):
        watch = quiet.ActivityWatch()
        watch.begin()
        watch.settle()
        watch.check()
        pause.set()


@pytest.mark.parametrize(
    ("ran", "wanted", "disturbs"),
    [(0.005, 0.05, False), (0.02, 0.05, True), (0.005, 0.3, True)],
)
def test_what_a_thread_may_run_and_wait_for(
    ran: float, wanted: float, disturbs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of the time, on a clock of the test's own: a timer's are allowed, a worker's are not."""
    now, stop = 0.0, threading.Event()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    with beside(lambda: stop.wait(60) and None) as thread:
        shares = {thread.native_id: (ran, wanted)}
        clock = types.SimpleNamespace(perf_counter=lambda: now, sleep=sleep)
        monkeypatch.setattr(quiet, "time", clock)
        monkeypatch.setattr(
            quiet, "_seconds", lambda tid: tuple(now * x for x in shares.get(tid, (0.0, 0.0)))
        )
        watch = quiet.ActivityWatch()
        watch.begin()
        if wanted < 0.2:
            watch.settle()
        else:
            with pytest.raises(quiet.Disturbed, match="busy"):
                watch.settle()
            watch = quiet.ActivityWatch()
            watch.begin()
        now += 1.0
        if disturbs:
            with pytest.raises(quiet.Disturbed, match="'somebody' ran beside it"):
                watch.check()
        else:
            watch.check()
        stop.set()


def test_a_measurement_beside_other_work_gives_no_times() -> None:
    ran: list[int] = []
    with beside(lambda: None), pytest.raises(quiet.Disturbed):
        autotune.measure({"a": lambda: ran.append(1)}, budget_s=60.0, rounds=10**9)
    started = threading.Event()
    with beside(lambda: started.wait(60) and None):

        def run() -> None:
            if len(ran) == 30:
                started.set()  # in the midst of it
            ran.append(1)

        ran.clear()
        with pytest.raises(quiet.Disturbed, match="'somebody'|busy"):
            autotune.measure({"a": run}, budget_s=60.0, rounds=10**9)
        started.set()


def test_what_was_put_off_is_tried_later_and_later_and_not_for_ever() -> None:
    now = 0.0
    put_off = quiet.PutOff(clock=lambda: now)
    error = quiet.Disturbed("not measured: the thread 'x' ran")
    assert put_off.due("f") and not put_off.reason("f") and not len(put_off)
    waits = []
    while not (final := put_off.again("f", error)):
        assert "'x' ran; a later call tries again" in put_off.reason("f")
        assert not put_off.due("f") and put_off.due("g") and len(put_off) == 1
        before = now
        while not put_off.due("f"):
            now += 0.05
        waits.append(now - before)
    assert "dfx.tune" in final and "'x' ran" in final
    assert len(waits) >= 3 and waits == sorted(waits) and waits[-1] > 10 * waits[0]
    assert put_off.due("f") and not len(put_off)
    put_off.again("f", error)
    put_off.done("f")
    assert put_off.due("f")


def test_what_one_call_uses_up_is_made_anew_and_not_timed() -> None:
    made: list[object] = []
    used: list[object] = []

    def given() -> object:
        made.append(object())
        return made[-1]

    def run(value: object) -> None:
        assert value not in used
        used.append(value)

    medians = autotune.measure({"a": autotune.Fresh(given, run)}, budget_s=60.0, rounds=3)
    assert used == made and medians["a"] >= 0.0
