"""Lines about what takes long: where they go, and that nothing fails where they cannot go anywhere."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import pytest

from dynaflow_xla.watching import progress


class OnlyWrites:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def closed() -> Any:
    made = io.StringIO()
    made.close()
    return made


class Full(Terminal):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


class Broken(OnlyWrites):
    def isatty(self) -> bool:
        raise OSError(9, "Bad file descriptor")


class NoMethod(OnlyWrites):
    isatty = False


@pytest.mark.parametrize("wish", [None, "1", "0"])
@pytest.mark.parametrize(
    "stream",
    [None, OnlyWrites(), closed(), Full(), Broken(), NoMethod()],
    ids=["none", "no isatty", "closed", "full", "broken", "no method"],
)
def test_a_step_needs_no_standard_error(
    monkeypatch: pytest.MonkeyPatch, stream: Any, wish: str | None
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(sys, "stderr", stream)
    if wish is None:
        monkeypatch.delenv("DYNAFLOW_XLA_PROGRESS", raising=False)
    else:
        monkeypatch.setenv("DYNAFLOW_XLA_PROGRESS", wish)
    with progress.report("a step") as tick:
        time.sleep(0.03)
        tick("half of it")
    progress.say("a line")


@pytest.mark.parametrize(
    ("wish", "terminal", "want"),
    [
        ("1", False, True), ("yes", False, True), ("0", True, False), ("no", True, False),
        ("OFF", True, False), ("false ", True, False), ("", True, True), (None, True, True),
        (None, False, False), ("", False, False),
    ],
)  # fmt: skip
def test_who_is_told(
    monkeypatch: pytest.MonkeyPatch, wish: str | None, terminal: bool, want: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    monkeypatch.delenv("DYNAFLOW_XLA_PROGRESS", raising=False)
    if wish is not None:
        monkeypatch.setenv("DYNAFLOW_XLA_PROGRESS", wish)
    assert progress.shown() is want
