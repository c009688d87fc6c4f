"""Turns to measure, what disturbs a measurement, and when what was put off is tried again."""

from __future__ import annotations

import threading
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


def test_a_busy_thread_is_named() -> None:
    watch = quiet.Watch()
    watch.begin()
    with beside(lambda: None):
        with pytest.raises(quiet.Disturbed, match="not measured: .*busy|'somebody'"):
            watch.settle()
        with pytest.raises(DynaflowError):
            watch.check()
    watch = quiet.Watch()
    watch.begin()
    watch.settle()
    watch.check()


def test_a_thread_that_waits_disturbs_nobody() -> None:
    pause = threading.Event()
    with beside(lambda: pause.wait(0.01) and None):
        watch = quiet.Watch()
        watch.begin()
        watch.settle()
        pause.wait(0.1)
        watch.check()


def test_a_measurement_beside_other_work_gives_no_times() -> None:
    ran: list[int] = []
    with beside(lambda: None), pytest.raises(quiet.Disturbed):
        autotune.measure({"a": lambda: ran.append(1)}, budget_s=60.0)
    started = threading.Event()
    with beside(lambda: started.wait(0.01) and None):

        def run() -> None:
            if len(ran) == 30:
                started.set()  # in the midst of it
            ran.append(1)

        ran.clear()
        with pytest.raises(quiet.Disturbed, match="'somebody'|busy"):
            autotune.measure({"a": run}, budget_s=60.0, rounds=10_000)


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
