"""Where a benchmark's result is written, and how."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

RESULTS = Path(__file__).resolve().parents[1] / "results"


def save(record: Mapping[str, Any], path: Path | None = None) -> Path:
    """Writes a record as JSON; returns where.

    Args:
        record: With ``benchmark``, its name, and ``environment``, the stamp of ``environment.stamp``.
        path: Default: ``results/<benchmark>-<date of the stamp>.json``.
    """
    if path is None:
        date = record["environment"]["date"].replace(":", "").replace("+0000", "Z")
        path = RESULTS / f"{record['benchmark']}-{date}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    return path
