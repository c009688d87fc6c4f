"""The code in README.md and docs/ runs on what is installed, and is as short as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
STRATEGIES = ROOT / "docs" / "strategies.md"


def _block(name: str) -> str:
    match = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert match, f"README has no block {name}"
    return match.group(1)


def _lines(code: str) -> int:
    return sum(bool(line.strip()) for line in code.splitlines())


def _run(code: str, cwd: Path, *, silent: bool = True) -> str:
    """Runs ``code`` as a file, since a strategy's errors name lines, outside the source tree."""
    script = cwd / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-P", str(script)], capture_output=True, text=True, timeout=110, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    assert not silent or "Warning" not in done.stderr, done.stderr
    return done.stdout


def test_quickstart(tmp_path: Path) -> None:
    out = _run(_block("quickstart"), tmp_path)
    assert "strategy Branches()" in out and "measured timeline" in out


def test_strategy_example(tmp_path: Path) -> None:
    code = _block("quickstart") + _block("strategy")
    code += (
        "assert (fast(x, y) == f(x, y)).all()\n"
        "used = {i.lane for i in dfx.plan(fast, x, y).instructions}\n"
        "assert len(used) == min(2, dfx.plan(fast, x, y).lanes), used\n"
    )
    _run(code, tmp_path)


@pytest.mark.parametrize(("name", "limit"), [("quickstart", 10), ("strategy", 15), ("torch", 15)])
def test_size(name: str, limit: int) -> None:
    assert 0 < _lines(_block(name)) <= limit


def test_torch_quickstart(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    out = _run(_block("torch") + "assert torch.equal(fast(x), model(x))\n", tmp_path)
    assert "backend torch" in out and "bit-equal" in out


def test_torch_page(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    page = (ROOT / "docs" / "torch.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    _run(code, tmp_path, silent=False)  # torch.export warns of itself


def test_torch_xla_page(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    page = (ROOT / "docs" / "torch_xla.md").read_text()
    out = _run("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), tmp_path)
    assert "backend ffi" in out and "region 0" in out


def test_strategies_page(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", STRATEGIES.read_text(), re.DOTALL)
    out = _run("\n".join(blocks), tmp_path)
    assert "strategy RightAside()" in out and "measured timeline" in out


def test_timeline_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "timeline.md").read_text()
    out = _run("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), tmp_path)
    assert "at best" in out and "critical path" in out
    made = {path.name for path in tmp_path.iterdir()}
    assert {"timeline.html", "timeline.png", "timeline.json", "timeline.pftrace"} <= made


def test_training_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    out = _run("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), tmp_path)
    assert "strategy NanoBatch(2)" in out and "result" in out


def test_modules_page(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    page = (ROOT / "docs" / "modules.md").read_text()
    out = _run("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), tmp_path)
    assert "argument[0]['norm']['mean']" in out and "result" in out


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_local_links(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    missing = [t for t in targets if "://" not in t and not (path.parent / t).exists()]
    assert not missing
