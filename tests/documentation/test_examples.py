"""Every program of examples/ runs, and says what its description promises."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# File -> what it needs besides the package, and what its output holds.
SAYS = {
    "compile_for_gpu.py": ("jax", ('graph="two_branches"', 'name="left" lane=0')),
    "jax_branches.py": ("jax", ("strategy Branches()", "result: float32[128, 16, 64]")),
    "nano_batches.py": ("jax", ("into nano-batches of [16, 16]", "refused: 'normalised'")),
    "own_strategy.py": ("jax", ('strategy="SortsAside()"', "result: float32[4096]")),
    "select_at_run_time.py": ("jax", ("split: NanoBatch(2), 1 call", "plain: the original, 1 call")),
    "timeline_to_perfetto.py": ("jax", ("measured timeline", "timeline.json")),
    "torch_model.py": ("torch", ("backend torch", "bit-equal")),
    "training_step.py": ("jax", ("strategy Branches()", "loss ")),
}  # fmt: skip


def test_every_program_is_known_and_listed() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == set(SAYS)
    page = (EXAMPLES / "README.md").read_text()
    assert not [name for name in files if f"]({name})" not in page]


@pytest.mark.parametrize("name", sorted(SAYS))
def test_runs(
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    framework, parts = SAYS[name]
    pytest.importorskip(framework, reason=f"{name} needs it")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [name])
    # In this process: importing the frameworks anew takes longer than all the programs.
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    out = capsys.readouterr().out
    assert not [part for part in parts if part not in out], out


def test_the_picture_of_the_readme_can_be_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("jax", reason="the picture needs it")
    pytest.importorskip("matplotlib", reason="the picture needs it")
    script = runpy.run_path(str(ROOT / "docs" / "pictures" / "timelines.py"))
    main = script["main"]
    main.__globals__["HERE"] = tmp_path
    main(rounds=1)
    out = capsys.readouterr().out
    assert "on 1 lane;" in out and "on 2 lanes;" in out, out
    assert (tmp_path / "timelines.png").read_bytes().startswith(b"\x89PNG")
