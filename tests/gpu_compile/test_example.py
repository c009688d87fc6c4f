"""The example that compiles for a GPU, where the plugin is: its report is the compiler's."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "compile_for_gpu.py"


def test_the_example_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert "not compiled" not in out
    assert "order edges of the plan: 2 held, 0 fused away, 0 broken" in out, out
