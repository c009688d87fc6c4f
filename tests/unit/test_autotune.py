"""Decisions on disk: read back, broken files reported and made again, many writers; and the choice."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynaflow_xla import autotune
from dynaflow_xla.errors import FallbackWarning

DECISION = {
    "choice": "Branches()",
    "reason": "it was faster",
    "medians_ms": {"original": 2.0, "b": 1.5},
    "predicted_ms": {"b": 1.25},
    "left_out": {"c": "far behind"},
    "seconds": 0.5,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    yield tmp_path / "deep" / "cache"


def test_what_is_stored_is_read_back(folder: Path) -> None:
    assert autotune.load("k") is None  # nothing there: no warning (warnings are errors here)
    autotune.store("k", DECISION)
    assert autotune.load("k") == DECISION
    autotune.store("k", DECISION | {"choice": "original"})
    assert autotune.load("k") == DECISION | {"choice": "original"}
    assert [p.name for p in folder.iterdir()] == ["k.json"], "no temporary files stay behind"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe\x00", b"[" * 100_000, b"{}",
        json.dumps(DECISION | {"medians_ms": 3}).encode(),
        json.dumps(DECISION | {"medians_ms": {"original": "fast"}}).encode(),
        json.dumps({k: v for k, v in DECISION.items() if k != "choice"}).encode(),
        json.dumps(DECISION).encode()[:-9],
    ],
)  # fmt: skip
def test_a_corrupt_file_is_said_removed_and_made_again(folder: Path, content: bytes) -> None:
    folder.mkdir(parents=True)
    path = folder / "k.json"
    path.write_bytes(content)
    with pytest.warns(FallbackWarning, match=r"k\.json cannot be read .* it is made again") as said:
        assert autotune.load("k") is None
    assert len(said) == 1 and not path.exists()
    assert autotune.load("k") is None  # said once
    autotune.store("k", DECISION)
    assert autotune.load("k") == DECISION


def test_a_file_that_cannot_be_removed_is_no_error(folder: Path) -> None:
    (folder / "k.json" / "inside").mkdir(parents=True)
    with pytest.warns(FallbackWarning, match="cannot be read"):
        assert autotune.load("k") is None
    with pytest.warns(FallbackWarning, match="cannot be kept"):
        autotune.store("k", DECISION)
    assert [p.name for p in folder.iterdir()] == ["k.json"], "no temporary files stay behind"


def test_a_cache_folder_that_is_a_file_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(FallbackWarning, match="cannot be read"):
        assert autotune.load("k") is None
    with pytest.warns(FallbackWarning, match="cannot be kept"):
        autotune.store("k", DECISION)


def test_another_version_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = autotune.cache_key("graph", "jax 0.10")
    assert key == autotune.cache_key("graph", "jax 0.10") and len(key) == 32
    others = {
        autotune.cache_key("graph", "jax 0.11"),
        autotune.cache_key("graphjax 0.10"),
        autotune.cache_key("graph", "jax 0.10", ""),
    }
    monkeypatch.setattr(autotune, "CACHE_VERSION", autotune.CACHE_VERSION + 1)
    others.add(autotune.cache_key("graph", "jax 0.10"))
    monkeypatch.undo()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(999)))
    others.add(autotune.cache_key("graph", "jax 0.10"))
    assert len(others) == 5 and key not in others


def test_a_decision_of_another_version_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    autotune.store(autotune.cache_key("graph"), DECISION)
    monkeypatch.setattr(autotune, "CACHE_VERSION", autotune.CACHE_VERSION + 1)
    assert autotune.load(autotune.cache_key("graph")) is None


def test_many_writers_and_readers(folder: Path) -> None:
    """A reader sees one whole decision or none, never a mixture, never an error."""
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        mine = DECISION | {"choice": f"s{number}", "reason": f"r{number}" * 500}
        start.wait()
        for _ in range(60):
            if number % 2 == 0:
                autotune.store("k", mine)
            found = autotune.load("k")
            if found is not None and found["reason"] != f"r{found['choice'][1:]}" * 500:
                wrong.append(found)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong and not said
    assert autotune.load("k") is not None
    assert [p.name for p in folder.iterdir()] == ["k.json"]


def test_a_decision_that_is_no_json_leaves_nothing_behind(folder: Path) -> None:
    with pytest.raises(TypeError):
        autotune.store("k", {"choice": object()})
    assert not folder.exists() or not list(folder.iterdir())


def test_every_candidate_is_measured_as_often() -> None:
    calls: dict[str, int] = {"a": 0, "b": 0, "c": 0}
    order: list[str] = []

    def run(name: str) -> None:
        calls[name] += 1
        order.append(name)

    runs = {name: (lambda name=name: run(name)) for name in calls}  # type: ignore[misc]
    medians = autotune.measure(runs, budget_s=60.0, rounds=6, sample_s=0.0)
    assert set(medians) == set(calls) and all(ms >= 0.0 for ms in medians.values())
    assert len(set(calls.values())) == 1
    # Two untimed calls of each, then rounds of two, in rotating order.
    rounds = [order[6 + 6 * r : 12 + 6 * r : 2] for r in range(6)]
    assert rounds[:3] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert len(order) == 6 + 6 * 6


def test_a_budget_too_small_is_an_error() -> None:
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1

    with pytest.raises(autotune.BudgetTooSmall, match="1 candidates 3 times.*budget_s"):
        autotune.measure({"a": run}, budget_s=0.0, rounds=15, sample_s=0.0)
    assert calls == 2


def test_a_budget_ends_the_rounds() -> None:
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.01)

    autotune.measure({"a": run}, budget_s=0.08, rounds=1000, sample_s=0.0)
    assert 2 + 3 * 2 <= calls < 2 + 1000 * 2


@pytest.mark.parametrize(
    ("medians", "choice", "words"),
    [
        ({"original": 1.0}, "original", "only candidate"),
        ({"original": 1.0, "b": 1.0}, "original", "not beaten by b"),
        ({"original": 1.0, "b": 0.98, "c": 2.0}, "original", "not beaten by b"),
        ({"original": 1.0, "b": 0.9, "c": 0.8}, "c", "c took 0.8 ms, the original 1 ms"),
        ({"original": 0.5, "b": 0.9}, "original", "not beaten by b"),
    ],
)
def test_the_original_wins_unless_it_is_beaten(
    medians: dict[str, float], choice: str, words: str
) -> None:
    picked, reason = autotune.pick(medians, baseline="original", margin=0.03)
    assert picked == choice and words in reason
