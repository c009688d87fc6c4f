"""A folder of compiled code is kept below a size: what was not used for longest goes first."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
from pathlib import Path

from dynaflow_xla.errors import PlanError
from dynaflow_xla.watching import telling

VARIABLE = "DYNAFLOW_XLA_CACHE_MB"
DEFAULT_MB = 4096.0

KEPT_S = 600.0
"""What was used so lately stays, whatever the size: a process may be about to load it."""


def limit_bytes() -> float:
    """How much a folder may hold.

    Raises:
        PlanError: the variable holds no number of megabytes.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        megabytes = float(text) if text else DEFAULT_MB
    except ValueError:
        megabytes = math.nan
    if not megabytes >= 0:
        raise PlanError(
            f"{VARIABLE} must be a number of megabytes, at least 0 (inf: no limit); got {text!r}"
        )
    return megabytes * 2**20


def used(*paths: Path) -> None:
    """Notes that files were used now."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path)


def trim(folder: Path) -> int:
    """Removes what was not used for longest, until the limit is kept; how many bytes went.

    A note ``KEY.json`` goes with the library ``KEY-HASH.so`` that it names. Other processes may trim the same
    folder at the same time.
    """
    limit = limit_bytes()
    entries: dict[str, list[tuple[Path, os.stat_result]]] = {}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    key = path.stem.rpartition("-")[0] if path.suffix == ".so" else path.stem
                    entries.setdefault(key, []).append((path, found))
    total = sum(found.st_size for files in entries.values() for _, found in files)
    freed = 0
    lately = time.time() - KEPT_S
    by_age = sorted((max(f.st_mtime for _, f in files), key) for key, files in entries.items())
    for last, key in by_age:
        if total - freed <= limit or last > lately:
            break
        # The note first: it never names what is not there.
        for path, found in sorted(entries[key], key=lambda e: e[0].suffix != ".json"):
            with contextlib.suppress(OSError):
                path.unlink()
                freed += found.st_size
    if freed:
        telling.told("cache", f"{freed} bytes removed", folder=str(folder), freed=freed)
    return freed
