"""Optional dependencies: looked for when needed, missed with a sentence that says what to do."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from dynaflow_xla.errors import UnsupportedError


def available(name: str) -> bool:
    """Whether a module can be imported (it is not imported)."""
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def require(name: str, why: str, extra: str) -> ModuleType:
    """Imports an optional module.

    Raises:
        UnsupportedError: it is not installed; names the extra that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"{why} needs the package {name!r}, which cannot be imported ({error}). "
            f"Install it with: pip install 'dynaflow-xla[{extra}]'"
        ) from error
