"""What lanes do is counted, and said when a call takes long; what is decided is logged with fields."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.planning.instructions import Launch, Record, Wait
from dynaflow_xla.watching import telling

_engine = pytest.importorskip("dynaflow_xla.ffi._engine")

from dynaflow_xla.ffi import watching  # noqa: E402


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(watching.VARIABLE, "1e6")
    watching.ensure()
    yield
    monkeypatch.delenv(watching.VARIABLE)
    watching.ensure()


def reported(before: int) -> None:
    """Returns when the watchdog has written once more."""
    until = time.monotonic() + 120
    while _engine.stats()["reports"] <= before:
        assert time.monotonic() < until
        time.sleep(0.005)


STAGE = (
    Launch(0, "left", 0, 0, (), ()),
    Launch(1, "right", 1, 0, (), ()),
    Record(7, 1),
    Wait(7, 0),
    Launch(2, "both", 0, 0, (), ()),
)


def program(held: threading.Event, started: threading.Event | None = None) -> Any:
    def right(_: Any) -> None:
        if started is not None:
            started.set()
        held.wait(120)

    made = _engine.Program(2, 1, 0, 0, 0, "the plan")
    watching.name(made, STAGE, {7: 0})
    made.add_python_launch(0, "region 'left'", lambda _: None, [], [])
    made.add_python_launch(1, "region 'right'", right, [], [])
    made.add_record(1, 0)
    made.add_wait(0, 0)
    made.add_python_launch(0, "region 'both'", lambda _: None, [], [])
    made.finish()
    return made


def two_calls(capfd: pytest.CaptureFixture[str]) -> str:
    """What is reported of a call that waits, and of one behind it."""
    held, started = threading.Event(), threading.Event()
    made, before = program(held, started), _engine.stats()
    ended: list[Any] = []
    first = threading.Thread(target=lambda: ended.append(made.run([], [])))
    first.start()
    assert started.wait(120)
    time.sleep(0.02)
    _engine.watch(0.001)
    reported(before["reports"])
    second = threading.Thread(target=lambda: ended.append(made.run([], [])))
    second.start()
    reported(before["reports"] + 1)
    held.set()
    first.join()
    second.join()
    _engine.watch(1e6)
    assert len(ended) == 2
    after = _engine.stats()
    assert after["reports"] == before["reports"] + 2
    assert after["calls"] == before["calls"] + 2 and after["failures"] == before["failures"]
    return capfd.readouterr().err


@pytest.mark.usefixtures("watched")
def test_a_call_that_takes_long_is_reported_once_and_ends(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for _ in range(50):  # a lane of a very busy machine may not be where it stays yet
        text = two_calls(capfd)
        if "lane 0: has waited" in text:
            break
    one, two = text.split("dynaflow_xla: ")[1:]
    assert one.startswith("a call of 'the plan' has run for ") and "goes on; its lanes:" in one
    assert "lane 0: has waited for event 0 for " in one
    assert "s, region 'right' on lane 1; next is region 'both'\n" in one
    assert "lane 1: runs 'region 'right''\n" in one
    assert "lane 0: has not begun, behind a call of 'the plan'\n" in two


def test_nothing_is_reported_unless_it_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    held = threading.Event()
    made, before = program(held), _engine.stats()["reports"]
    held.set()
    made.run([], [])
    assert _engine.stats()["reports"] == before and not capfd.readouterr().err


@pytest.mark.parametrize("wrong", ["soon", "-1", "nan", "inf", "1e30"])
def test_what_is_no_number_of_seconds_is_refused(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(watching.VARIABLE, wrong)
    with pytest.raises(dfx.PlanError, match=f"{watching.VARIABLE} must be a number of seconds"):
        watching.ensure()


def test_a_step_that_fails_is_counted_and_counts_can_be_reset() -> None:
    def failing(_: Any) -> None:
        raise ValueError("no")

    made = _engine.Program(1, 0, 0, 0, 0, "p")
    made.add_python_launch(0, "mine", failing, [], [])
    made.finish()
    dfx.stats(reset=True)
    assert dfx.stats().lane_calls == 0 and dfx.stats().lane_failures == 0
    with pytest.raises(RuntimeError):
        made.run([], [])
    found = dfx.stats(reset=True)
    assert (found.lane_calls, found.lane_failures, found.live_calls) == (1, 1, 0)
    assert "lane_failures: 1" in str(found)
    assert dfx.stats().lane_calls == 0


def test_a_fallback_warns_is_logged_with_fields_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = dfx.stats().fallbacks
    with (
        caplog.at_level(logging.INFO, "dynaflow_xla"),
        pytest.warns(dfx.FallbackWarning, match="plainer") as said,
    ):
        telling.fallback("it runs in a plainer way")
    assert said[0].filename == __file__
    (record,) = caplog.records
    assert record.name == "dynaflow_xla.fallback" and record.levelno == logging.WARNING
    assert record.dfx_reason == "it runs in a plainer way"  # type: ignore[attr-defined]
    assert dfx.stats().fallbacks == before + 1
