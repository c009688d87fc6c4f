"""Open questions about XLA on a GPU, each answered by a program of its own with a time limit.

The answers are facts of a machine and a jaxlib, not right or wrong: a probe fails only if it breaks in
a way that is no answer. They are printed and written to ``gpu-probes.json`` in ``out`` or
``$GPU_OUT``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROBES = Path(__file__).parent / "probes.py"
OUT = Path(os.environ.get("GPU_OUT", "out")) / "gpu-probes.json"
QUESTIONS = ["overlap", "in_place", "ordered", "reenter", "streams", "execute_cost", "gates"]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("question", QUESTIONS)
def test_probe(jax: Any, question: str) -> None:
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(PROBES), question],
            capture_output=True, text=True, timeout=120, env=env,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        died = {"answer": "died", "status": done.returncode, "stderr": done.stderr[-2000:]}
        answer = json.loads(lines[-1]) if lines else died
    except subprocess.TimeoutExpired:
        answer = {"answer": "hangs", "seconds": 120}
    print(question, answer)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    OUT.write_text(json.dumps({**found, question: answer}, indent=1) + "\n")
    if answer["answer"] == "died":
        pytest.fail(f"{question}: {answer}")


@pytest.mark.timeout(240)
def test_compute_sanitizer_finds_nothing() -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    here = Path(__file__).parent / "test_engine.py"
    done = subprocess.run(
        [tool, "--error-exitcode", "9", sys.executable, "-P", "-m", "pytest", "-q", str(here), "-k",
         "random_programs and (0 or 1)", "-p", "no:cacheprovider"],
        capture_output=True, text=True, timeout=220,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
