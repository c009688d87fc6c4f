"""Optional dependencies: looked for when needed, missed with a sentence that says what to do."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from types import ModuleType

from dynaflow_xla.errors import UnsupportedError

Version = tuple[int, int]

VERSIONS: dict[str, tuple[Version, Version | None]] = {
    "jax": ((0, 10), (0, 13)),
    "torch": ((2, 11), (2, 16)),
}
"""Oldest version of a framework that works, and the first that is not known to: as in pyproject.toml."""


def available(name: str) -> bool:
    """Whether a module can be imported (it is not imported)."""
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def require(name: str, why: str, extra: str) -> ModuleType:
    """Imports an optional module, before anything that builds on it.

    Raises:
        UnsupportedError: it is not installed, or its version is not in ``VERSIONS``; names the extra
            that installs it.
    """
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"{why} needs the package {name!r}, which cannot be imported ({error}). "
            f"Install it with: pip install 'dynaflow-xla[{extra}]'"
        ) from error
    oldest, too_new = VERSIONS.get(name, ((0, 0), None))
    found = str(getattr(module, "__version__", "")) if name in VERSIONS else "0.0"
    number = re.match(r"(\d+)\.(\d+)", found)
    version = (int(number[1]), int(number[2])) if number else (0, 0)
    if version < oldest or (too_new is not None and version >= too_new):
        wanted = f">= {oldest[0]}.{oldest[1]}" + (
            f", < {too_new[0]}.{too_new[1]}" if too_new else ""
        )
        raise UnsupportedError(
            f"{why} needs {name} {wanted}; found {found or 'a module without a version'}. "
            f"Install one with: pip install -U 'dynaflow-xla[{extra}]'"
        )
    return module
