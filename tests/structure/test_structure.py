"""Folders are small enough to be read, and a class name stands for one idea."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from modules import sources

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 12

# Both frontends have their own of one idea, most of them behind a protocol of the core.
SHARED = {
    "Backend", "Captured", "Choice", "Decisions", "Entry", "Planned", "ScheduledFunction", "Serving",
    "Site", "SplitCapture", "Stage", "Subject", "Walker", "XlaEntry",
    # Public, by different paths: a rule for calls of nested functions, and what ``select`` gets of a call.
    "Call",
}  # fmt: skip


def crowded(paths: Iterable[Path]) -> dict[str, int]:
    """Folders with more files than one looks through."""
    counts = Counter(
        path.parent for path in paths if path.name not in ("__init__.py", "_engine.pyi")
    )
    return {str(folder): count for folder, count in counts.items() if count > MOST_FILES}


def repeated(texts: dict[str, str]) -> dict[str, list[str]]:
    """Classes that more than one module defines, private ones left out; each with its modules."""
    found = defaultdict(list)
    for module, text in texts.items():
        for name in re.findall(r"^class ([A-Z]\w*)", text, re.MULTILINE):
            found[name].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_folder_is_crowded() -> None:
    # Of the package's top level the entrance and the version are no files that one looks through.
    own = [p for p in sources().values() if p.name not in ("__main__.py", "_version.py")]
    engine = [
        path
        for folder in ("csrc/include", "csrc/src", "ffi/module")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".cc", ".h")
    ]
    assert len(own) > 100 and len(engine) > 30
    assert crowded([*own, *engine]) == {}


def test_a_class_name_stands_for_one_idea() -> None:
    texts = {name: path.read_text() for name, path in sources().items()}
    assert set(repeated(texts)) <= SHARED, repeated(texts)


def test_what_is_crowded_or_repeated_is_found() -> None:
    assert crowded(Path("a", f"{n}.py") for n in range(MOST_FILES + 1)) == {"a": MOST_FILES + 1}
    assert repeated(
        {"a": "class Split:\n", "b": "\nclass Split(Base):\n", "c": "class Other: ..."}
    ) == {"Split": ["a", "b"]}


def test_paths_of_the_calls_that_are_followed_are_there() -> None:
    """Each file in the table of docs/design.md that follows a call through every backend."""
    page = (ROOT / "docs/design.md").read_text()
    table = page.split("## One call, followed")[1].split("## ")[0]
    files = set(re.findall(r"`([\w/]+\.(?:py|cc))`", table))
    assert len(files) > 25
    places = ("", "frontends", "frontends/jax", "frontends/torch", "dynaflow_xla", "ffi/module")
    missing = [f for f in files if not any((ROOT / p / f).is_file() for p in places)]
    assert not missing
    rows = [line.split("|")[1:-1] for line in table.splitlines() if re.match(r"\| [\d]", line)]
    assert len(rows) <= 8 and all(len(row) == 5 for row in rows)
