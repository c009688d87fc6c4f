"""The README's code runs, and is as short as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def _block(name: str) -> str:
    match = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert match, f"README has no block {name}"
    return match.group(1)


def _lines(code: str) -> int:
    return sum(bool(line.strip()) for line in code.splitlines())


def test_quickstart_and_strategy_run() -> None:
    code = _block("quickstart") + _block("strategy")
    code += "assert (fast(x, y) == f(x, y)).all()\nprint('lanes', dfx.plan(fast, x, y).lanes)\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert "dfx" not in done.stderr and "lanes" in done.stdout


def test_sizes() -> None:
    assert _lines(_block("quickstart")) <= 10
    assert _lines(_block("strategy")) <= 15
