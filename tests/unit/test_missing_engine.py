"""A package without the engine of this Python says what is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dynaflow_xla

LOOK = """
import sys
sys.path.insert(0, {where!r})
sys.meta_path[:] = [f for f in sys.meta_path if "ditable" not in repr(f)]  # of an editable install
import dynaflow_xla.ffi
assert dynaflow_xla.ffi.__file__.startswith({where!r}), dynaflow_xla.ffi.__file__
try:
    from dynaflow_xla.ffi import _engine
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("other", ["", "_engine.cpython-27-x86_64-linux-gnu.so"])
def test_a_missing_engine_is_named(other: str, tmp_path: Path) -> None:
    away = shutil.ignore_patterns("_engine*.so", "__pycache__", "frontends")
    shutil.copytree(dynaflow_xla.__path__[0], tmp_path / "dynaflow_xla", ignore=away)
    if other:
        (tmp_path / "dynaflow_xla" / "ffi" / other).write_bytes(b"")
    code = LOOK.format(where=str(tmp_path))
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the compiled engine of dynaflow_xla for Python 3" in done.stdout, done.stdout
    assert (other or "there is none") in done.stdout and "circular" not in done.stdout
