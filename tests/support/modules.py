"""The package's own files, wherever it is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

PACKAGE = "dynaflow_xla"


def sources() -> dict[str, Path]:
    """The package's modules by name."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    found = {}
    for place in spec.submodule_search_locations:
        for folder, folders, names in os.walk(place, followlinks=True):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in names:
                path = Path(folder, name)
                if path.suffix == ".py":
                    parts = path.relative_to(place).with_suffix("").parts
                    parts = parts[:-1] if parts[-1] == "__init__" else parts
                    found.setdefault(".".join((PACKAGE, *parts)), path)
    return found
