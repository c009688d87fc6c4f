"""What later processes read comes from folders of the owner alone, and is as it was written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.caches import private_files
from dynaflow_xla.tuning import autotune

DECISION = {
    "choice": "original", "reason": "r", "medians_ms": {"original": 1.0}, "predicted_ms": {}, "left_out": {},
    "seconds": 0.5, "costs": None, "memory": "", "far": False,
    "unsure": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "cache"
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(made))
    return made


def refused() -> int:
    return dfx.stats().refused_caches


def test_folders_and_files_are_the_owners_alone(folder: Path) -> None:
    old = os.umask(0)
    try:
        autotune.store("k", DECISION)
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "k.json").stat().st_mode & 0o077 == 0
    assert autotune.load("k") == DECISION


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used_and_that_is_said_once(
    folder: Path, mode: int
) -> None:
    autotune.store("k", DECISION)
    folder.chmod(mode)
    before = refused()
    with pytest.warns(
        dfx.FallbackWarning, match=r"is not used: .* may be written by others"
    ) as said:
        assert autotune.load("k") is None
        assert autotune.load("k") is None
        autotune.store("other", DECISION)
    assert len(said) == 1 and refused() == before + 1
    assert [p.name for p in folder.iterdir()] == ["k.json"], "nothing is written, nothing removed"


def test_a_folder_of_another_user_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    autotune.store("k", DECISION)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.warns(dfx.FallbackWarning, match="belongs to another user"):
        assert autotune.load("k") is None
        autotune.store("k", DECISION)


def test_a_file_that_others_may_write_is_not_read(folder: Path) -> None:
    autotune.store("k", DECISION)
    (folder / "k.json").chmod(0o666)
    with pytest.warns(dfx.FallbackWarning, match=r"k\.json may be written by others"):
        assert autotune.load("k") is None


def test_a_folder_where_anybody_may_put_another_in_its_place_is_not_used(
    folder: Path, tmp_path: Path
) -> None:
    autotune.store("k", DECISION)
    tmp_path.chmod(0o777)
    with pytest.warns(dfx.FallbackWarning, match="who could put another folder there"):
        assert autotune.load("k") is None
    tmp_path.chmod(0o1777)  # as /tmp: what is there stays its owner's
    assert autotune.load("k") == DECISION


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"choice": "another"}, "its hash is not that of its content"),
        ({"sha256": "0" * 64}, "its hash is not that of its content"),
        ({"version": 1}, "it must be of version"),
    ],
)
def test_a_decision_that_was_changed_is_made_again(
    folder: Path, change: dict[str, object], why: str
) -> None:
    autotune.store("k", DECISION)
    path = folder / "k.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.warns(dfx.FallbackWarning, match=rf"cannot be read \({why}.*it is made again"):
        assert autotune.load("k") is None
    assert not path.exists()


@pytest.mark.parametrize("content", [{"choice": 3.5, "medians_ms": 3}, {"costs": 3}, {}])
def test_a_hash_does_not_make_a_decision_of_something_else(
    folder: Path, content: dict[str, object]
) -> None:
    private_files.write(folder / "k.json", private_files.sealed(content, autotune.CACHE_VERSION))
    with pytest.warns(dfx.FallbackWarning, match="cannot be read"):
        assert autotune.load("k") is None


def test_a_library_is_what_was_written_or_it_is_made_again(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from dynaflow_xla.frontends.torch.native.compiling import worker as compile_worker

    made, note = tmp_path / "made.so", tmp_path / "aoti" / "key.json"
    made.write_bytes(b"code")
    assert compile_worker.kept(note) is None
    compile_worker.place(made, str(note))
    library = compile_worker.kept(note)
    assert library is not None and library.read_bytes() == b"code"
    assert library.parent.stat().st_mode & 0o777 == 0o700
    library.chmod(0o600)
    library.write_bytes(b"other")
    with pytest.raises(private_files.Broken, match="is not the one noted"):
        compile_worker.kept(note)
    library.unlink()
    assert compile_worker.kept(note) is None
    private_files.write(
        note, private_files.sealed({"library": "../made.so", "digest": ""}, compile_worker.VERSION)
    )
    with pytest.raises(private_files.Broken, match="names a file elsewhere"):
        compile_worker.kept(note)


def test_compiled_regions_are_kept_by_the_process_where_the_cache_is_not_trusted(
    folder: Path,
) -> None:
    pytest.importorskip("torch")
    from dynaflow_xla.frontends.torch.native.compiling import compilers

    assert compilers._folder("aoti") == folder / "aoti"
    folder.chmod(0o777)
    with pytest.warns(dfx.FallbackWarning, match="is not used"):
        own = compilers._folder("aoti")
    assert folder not in own.parents and own.stat().st_mode & 0o777 == 0o700


def test_without_a_home_nothing_is_kept_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Containers run programs as users that have no entry and no HOME."""

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DYNAFLOW_XLA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", none)
    monkeypatch.setattr(private_files, "_refused", set())
    with pytest.raises(OSError, match=r"no home folder .* name a folder in DYNAFLOW_XLA_CACHE_DIR"):
        private_files.cache_folder()
    with pytest.warns(dfx.FallbackWarning, match=r"decisions cannot be kept .*no home") as said:
        for key in ("k", "other"):
            assert autotune.load(key) is None
            autotune.store(key, DECISION)
    assert len(said) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert private_files.cache_folder() == Path("/somewhere/dynaflow_xla")


def test_the_home_of_nobody_is_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", "~no_such_user_here/x")
    with pytest.warns(
        dfx.FallbackWarning, match="'~no_such_user_here/x', and there is no such user"
    ):
        autotune.store("k", DECISION)
    assert autotune.load("k") is None and not list(tmp_path.iterdir())
