"""Which sources a wheel was built from: a digest that is carried beside it, and kept where it is installed.

Needs the standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT_FROM = "pyproject.toml CMakeLists.txt README.md dynaflow_xla frontends ffi csrc".split()
BUT = ("csrc/tests", "csrc/bench")
MADE_OF = "made_of"
"""The file's name."""


def contents(names: Sequence[str], without: Sequence[str] = (), root: Path = ROOT) -> str:
    """A digest of what the folders and files below `root` hold, but for what was built in them."""
    digest = hashlib.sha256()
    for name in names:
        place = root / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            text = path.relative_to(root).as_posix()
            built = "__pycache__" in text or path.suffix in (".so", ".pyi")
            if built or path.is_dir() or any(text.startswith(w) for w in without):
                continue
            digest.update(text.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def current() -> str:
    """That of a wheel that is built now."""
    return contents(BUILT_FROM, BUT)


def beside(folder: Path) -> str:
    """That of the wheel or the installation in a folder; ``""`` if it has none."""
    try:
        return (folder / MADE_OF).read_text()
    except OSError:
        return ""
