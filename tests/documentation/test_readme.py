"""The code in README.md and docs/ runs on what is installed, and is as short as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


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
        [sys.executable, "-P", str(script)], capture_output=True, text=True, timeout=360, cwd=cwd
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


# Page -> what it needs besides the package, and what it prints. Every page with Python code is here.
PAGES = {
    "command_line.md": (("jax",), ("original",)),
    "auto.md": (("jax",), ("auto: ",)),
    "index.md": (("jax",), ("strategy Branches()",)),
    "export.md": (("jax", "torch"), ()),
    "gpu.md": (("torch",), ()),
    "published.md": (("jax",), ("result", "bit-equal")),
    "modules.md": (("flax", "optax"), ("argument[0]['norm']['mean']", "result")),
    "nano_batches.md": (("jax", "torch"), ("strategy NanoBatch(2)", "result")),
    "reliability.md": (("jax",), ("marked: 3 regions", "nothing found")),
    "select.md": (("jax",), ("split: NanoBatch(2), 1 call",)),
    "strategies.md": (("jax",), ("strategy RightAside()", "measured timeline")),
    "timeline.md": (("jax",), ("at best", "critical path")),
    "together.md": (("jax",), ("strategy Branches()", "student", "result[1]")),
    "torch.md": (("torch",), ("strategy Branches()",)),
    "torch_xla.md": (("jax", "torch"), ("backend ffi", "region 0")),
    "training.md": (("jax",), ("strategy Branches()",)),
    "tutorials/jax.md": (("jax",), ("strategy Branches()", "forwards", "measured:")),
    "tutorials/torch.md": (("torch",), ("backend torch", "bit-equal", "out_axes=dfx.Mean()")),
    "xla.md": (("jax",), ()),
}
WRITES = {"timeline.html", "timeline.png", "timeline.json", "timeline.pftrace"}
WARNS = {"export.md", "torch.md"}  # torch.export warns of itself
_CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_every_page_with_code_runs() -> None:
    docs = ROOT / "docs"
    with_code = {
        path.relative_to(docs).as_posix()
        for path in docs.rglob("*.md")
        if _CODE.search(path.read_text())
    }
    assert with_code == set(PAGES)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_page(name: str, tmp_path: Path) -> None:
    needed, says = PAGES[name]
    for package in needed:
        pytest.importorskip(package, reason=f"{name} needs it")
    code = "\n".join(_CODE.findall((ROOT / "docs" / name).read_text()))
    out = _run(code, tmp_path, silent=name not in WARNS)
    assert not [part for part in says if part not in out], out
    if name == "timeline.md":
        assert {path.name for path in tmp_path.iterdir()} >= WRITES


@pytest.mark.parametrize(
    "path",
    [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").glob("*.md")),
        ROOT / "benchmarks" / "README.md",
    ],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_local_links(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    missing = [t for t in targets if "://" not in t and not (path.parent / t).exists()]
    assert not missing
