"""The run-time side: engine binding, lane clients and the XLA custom calls."""

import importlib
import platform
from pathlib import Path
from typing import Any

from dynaflow_xla.errors import EngineError

_ENGINE = f"{__name__}._engine"

try:
    # Not `from ... import _engine`, whose error speaks of a circular import where the file is missing.
    importlib.import_module(_ENGINE)
except ModuleNotFoundError as error:
    if error.name != _ENGINE:
        raise
    # Whoever needs it says so: below.
except ImportError as error:
    if "nanobind" not in str(error):
        raise
    # Its types, lanes and custom calls are the process's: a second one would run calls of the first.
    raise EngineError(
        "this process has the engine of dynaflow_xla already: the package was imported, taken out of "
        f"sys.modules (a reload, or a second copy on sys.path) and imported again, from {__path__[0]}. "
        "A process has one copy, imported once: restart it, or keep the modules that are there"
    ) from error


def __getattr__(name: str) -> Any:
    """The engine, where it is not: an ``ImportError`` that says what is there instead."""
    if name != "_engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    there = sorted(file.name for place in __path__ for file in Path(place).glob("_engine*.so"))
    found = (
        f"there is {', '.join(there)}, of another Python or system" if there else "there is none"
    )
    raise ImportError(
        f"the compiled engine of dynaflow_xla for Python {platform.python_version()} is not in "
        f"{__path__[0]}: {found}. Install the wheel of this Python (pip install --force-reinstall "
        "dynaflow-xla), or build it from source",
        name=_ENGINE,
    )
