"""A folder of compiled code is kept below a size."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.caches import trimming

HOUR = 3600.0


def entry(folder: Path, key: str, size: int, hours_ago: float) -> list[Path]:
    """A note and its library, last used some time ago."""
    files = [folder / f"{key}.json", folder / f"{key}-0123456789abcdef.so"]
    files[0].write_bytes(b"{}")
    files[1].write_bytes(b"x" * size)
    for path in files:
        os.utime(path, (time.time() - hours_ago * HOUR,) * 2)
    return files


def left(folder: Path) -> set[str]:
    return {path.name.split("-")[0].removesuffix(".json") for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def _one_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trimming.VARIABLE, "1")


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    for hours, key in enumerate("dcba", start=1):
        entry(tmp_path, key, 400_000, hours)
    again = entry(tmp_path, "e", 400_000, 9)
    trimming.used(*again)
    assert trimming.trim(tmp_path) == 3 * 400_002
    assert left(tmp_path) == {"d", "e"}
    assert trimming.trim(tmp_path) == 0


def test_what_somebody_may_be_loading_stays(tmp_path: Path) -> None:
    for key in "abc":
        entry(tmp_path, key, 1 << 20, 0)
    entry(tmp_path, "old", 10, 1)
    assert trimming.trim(tmp_path) == 12
    assert left(tmp_path) == {"a", "b", "c"}


def test_an_entry_of_which_one_file_was_used_stays_whole(tmp_path: Path) -> None:
    note, _ = entry(tmp_path, "a", 900_000, 2)
    entry(tmp_path, "b", 900_000, 1)
    trimming.used(note)
    trimming.trim(tmp_path)
    assert left(tmp_path) == {"a"} and len(list(tmp_path.iterdir())) == 2


def test_folders_are_not_followed_and_none_need_be_there(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    entry(inner, "a", 2 << 20, 1)
    (tmp_path / "link.so").symlink_to(inner / "a.json")
    assert trimming.trim(tmp_path) == 0
    assert trimming.trim(tmp_path / "nowhere") == 0
    assert len(list(inner.iterdir())) == 2


@pytest.mark.parametrize("text", ["-1", "much", "nan"])
def test_a_limit_that_is_none_is_told(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trimming.VARIABLE, text)
    with pytest.raises(dfx.PlanError, match=f"{trimming.VARIABLE} must be a number of megabytes"):
        trimming.trim(tmp_path)


def test_without_a_limit_nothing_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry(tmp_path, "a", 2 << 20, 1)
    monkeypatch.setenv(trimming.VARIABLE, "inf")
    assert trimming.trim(tmp_path) == 0


def test_a_library_that_is_placed_or_read_trims_and_counts_as_used(tmp_path: Path) -> None:
    worker = pytest.importorskip("dynaflow_xla.frontends.torch.native.compiling.worker")
    folder = tmp_path / "aoti"
    folder.mkdir(mode=0o700)
    os.chmod(folder, 0o700)
    made = tmp_path / "made.so"
    made.write_bytes(b"y" * 400_000)
    for key, hours in (("a", 3), ("b", 2)):
        worker.place(made, str(folder / f"{key}.json"))
        for path in folder.glob(f"{key}*"):
            os.utime(path, (time.time() - hours * HOUR,) * 2)
    assert worker.kept(folder / "a.json") is not None  # used now: b is older
    worker.place(made, str(folder / "c.json"))
    assert left(folder) == {"a", "c"}
    assert worker.kept(folder / "b.json") is None
    assert worker.kept(folder / "c.json") is not None
