"""The count of the engine's instructions: its rule, and what it says where it cannot count."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Any:
    from engine import instructions

    monkeypatch.setattr(sys, "argv", ["instructions.py", "program"])
    monkeypatch.setattr(instructions.shutil, "which", lambda _: "valgrind")
    monkeypatch.setattr(instructions, "compiler", lambda _: json.loads(kept)["compiler"])
    kept = instructions.RESULT.read_text()
    return instructions


def _counting(count: Any, monkeypatch: pytest.MonkeyPatch, call: float, step: float) -> None:
    def counted(_: Path, steps: int, calls: int) -> int:
        return int(10_000 + 50 * steps + calls * (call + step * (steps - 1)))

    monkeypatch.setattr(count, "counted", counted)


def test_a_start_of_the_process_falls_out(count: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _counting(count, monkeypatch, 300.0, 40.0)
    assert count.measured(Path("x")) == {"call": 300.0, "step": 40.0}


def test_more_instructions_fail(
    count: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = json.loads(count.RESULT.read_text())["instructions"]
    _counting(count, monkeypatch, kept["call"], kept["step"])
    assert count.main() == 0
    _counting(count, monkeypatch, kept["call"] * 1.05 + 3, kept["step"])
    assert count.main() == 1 and "a call takes" in capsys.readouterr().out
    monkeypatch.setattr(count, "compiler", lambda _: "another")
    assert count.main() == 0 and "only told" in capsys.readouterr().out


def test_without_valgrind_it_says_so(
    count: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(count.shutil, "which", lambda _: None)
    assert count.main() == 0 and "valgrind is not installed" in capsys.readouterr().out
