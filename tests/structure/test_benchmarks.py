"""The folder of benchmarks: its index names every script and result, and what pages name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
MOST_FILES = 12
SCRIPTS = sorted(p for p in BENCHMARKS.rglob("*.py") if p.name != "__init__.py")
PACKAGES = sorted({path.parent.name for path in SCRIPTS} - {BENCHMARKS.name})
IMPORTS = re.compile(rf"^ *(?:from|import) (?:{'|'.join(PACKAGES)})\b", re.MULTILINE)
PAGES = [
    *(ROOT / name for name in ("Makefile", "noxfile.py", ".ci/run")),
    *(page for folder in (ROOT, ROOT / "docs", BENCHMARKS) for page in folder.glob("*.md")),
    *(path for folder in ("benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")),
    *(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cc", ".h", ".txt")),
    *(path for folder in ("dynaflow_xla", "frontends") for path in (ROOT / folder).rglob("*.py")),
]
# These read nothing from a command line, or begin with work.
NO_HELP = {"demo.py", "environment.py", "worker.py"}


def _is_program(path: Path) -> bool:
    return "__main__" in path.read_text()


def test_the_index_names_every_script_below_its_folder() -> None:
    index = (BENCHMARKS / "README.md").read_text()
    sections = dict(re.findall(r"^(?:## |- )`(\w+)/`(.*?)(?=^## |^- |\Z)", index, re.M | re.S))
    assert sorted(sections) == PACKAGES
    for path in SCRIPTS:
        part = index if path.parent == BENCHMARKS else sections[path.parent.name]
        assert f"`{path.name}`" in part, path.relative_to(ROOT)


def test_every_result_is_in_the_index_and_nothing_else_is() -> None:
    named = set(re.findall(r"`([\w.-]+\.(?:json|txtpb)|[\w.-]+/)`", _without_titles()))
    there = {p.name + "/" * p.is_dir() for p in (BENCHMARKS / "results").iterdir()}
    pictures = {name for name in there if name.endswith(".png")}
    assert named - {"results/", "out/"} - {f"{name}/" for name in PACKAGES} == there - pictures
    assert {p.removesuffix(".png") + ".json" for p in pictures} <= named


def _without_titles() -> str:
    lines = (BENCHMARKS / "README.md").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def test_no_folder_is_crowded() -> None:
    for name in PACKAGES:
        assert len([p for p in SCRIPTS if p.parent.name == name]) <= MOST_FILES, name


def test_every_script_that_is_named_is_there() -> None:
    found = {
        (page.relative_to(ROOT).as_posix(), name)
        for page in PAGES
        for name in re.findall(r"\bbenchmarks/[\w/]+\.py\b", page.read_text())
    }
    places = (ROOT, ROOT / "tests")  # tests/benchmarks/ is meant, too
    assert not {x for x in found if not any((place / x[1]).is_file() for place in places)}
    assert len(found) > 60


def test_programs_find_what_they_import() -> None:
    """With ``python -P``, too: each puts ``benchmarks/`` on the path before it imports from it."""
    for path in filter(_is_program, SCRIPTS):
        text = path.read_text()
        first = IMPORTS.search(text)
        if first is not None:
            assert "sys.path" in text[: first.start()], path.relative_to(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for path in SCRIPTS if _is_program(path) and path.name not in NO_HELP],
    ids=lambda path: path.relative_to(BENCHMARKS).as_posix(),
)
def test_programs_tell_how_they_are_called(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(path), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if done.returncode and "ModuleNotFoundError" in done.stderr:
        missing = re.findall(r"No module named '(\w+)", done.stderr)[-1]
        assert missing not in PACKAGES, done.stderr
        pytest.skip(f"it needs {missing}")
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr
