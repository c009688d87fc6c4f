"""What lies in the cache folder: which files are ours, how large they are, and how to be rid of them."""

from __future__ import annotations

import contextlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

_DECISION = re.compile(r"[0-9a-f]{32}\.json")
_MACHINE = re.compile(r"machine-[0-9a-f]{16}\.json")
_COMPILED = ("inductor", "aoti")
# Other things may lie in the same folder (environments of the project's own tests, say): these are not ours.


@dataclass(frozen=True)
class CacheFile:
    """A file of the cache.

    Attributes:
        path: Where it is.
        kind: ``decision`` (what ``Auto`` measured), ``machine`` (its numbers) or ``compiled`` (a
            region's note or library).
        bytes: Its size.
        age_s: Seconds since it was written.
    """

    path: Path
    kind: str
    bytes: int
    age_s: float

    def about(self) -> str:
        """What it holds, in a few words."""
        if self.kind == "compiled":
            return self.path.parent.name
        try:
            data = json.loads(self.path.read_bytes())
            if self.kind == "machine":
                return f"measured {data['measured']}"
            return f"{data['choice']}: {data['reason']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "cannot be read; it will be made again"


def entries(folder: Path) -> list[CacheFile]:
    """All files of ours in the folder, the newest first; none if it does not exist.

    Raises:
        OSError: it is no folder, or cannot be read.
    """
    found: list[CacheFile] = []
    try:
        there = list(folder.iterdir())
    except FileNotFoundError:
        return found
    files = [(p, "decision") for p in there if _DECISION.fullmatch(p.name)]
    files += [(p, "machine") for p in there if _MACHINE.fullmatch(p.name)]
    for name in _COMPILED:
        files += [
            (p, "compiled") for p in (folder / name).glob("*") if p.suffix in (".json", ".so")
        ]
    for path, kind in files:
        with contextlib.suppress(OSError):  # another process may have removed it
            told = path.stat()
            found.append(CacheFile(path, kind, told.st_size, max(0.0, time.time() - told.st_mtime)))
    return sorted(found, key=lambda entry: (entry.age_s, str(entry.path)))


def clear(found: list[CacheFile]) -> list[str]:
    """Removes files; returns a sentence for each that could not be."""
    failed = []
    for entry in found:
        try:
            entry.path.unlink(missing_ok=True)
        except OSError as error:
            failed.append(f"{entry.path}: {error.strerror}")
    return failed


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def age(seconds: float) -> str:
    """A time span for people."""
    for unit, length in (("s", 60.0), ("min", 60.0), ("h", 24.0)):
        if seconds < length:
            return f"{seconds:.0f} {unit}"
        seconds /= length
    return f"{seconds:.0f} d"
