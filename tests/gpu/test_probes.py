"""Open questions about XLA on a GPU, each answered by a program of its own with a time limit.

The answers are facts of a machine and a jaxlib, not right or wrong: a probe fails only if it breaks in
a way that is no answer. They are printed and written to ``gpu-probes.json`` in ``out`` or
``$GPU_OUT``.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
OUT = Path(os.environ.get("GPU_OUT", "out")) / "gpu-probes.json"
QUESTIONS = ["in_place", "ordered", "reenter"]
TIMED = ["overlap", "streams", "execute_cost", "gates"]
SECONDS, SHOWN, FRAMES = 85, 2000, 8
LIMITS = {"reenter": 45}  # known to hang in some versions


def ask(question: str, script: Path = HERE / "probes.py") -> dict[str, Any]:
    seconds = LIMITS.get(question, SECONDS)
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PROBE_SECONDS": str(seconds)}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(script), question],
            capture_output=True, text=True, timeout=seconds, env=env,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        died = {"answer": "died", "status": done.returncode, "stderr": done.stderr[-SHOWN:]}
        answer = json.loads(lines[-1]) if lines else died
    except subprocess.TimeoutExpired as late:
        stderr = late.stderr or b""
        text = stderr if isinstance(stderr, str) else stderr.decode(errors="replace")
        answer = {"answer": "hangs", "seconds": seconds, **hung(text)}
    print(question, answer)
    keep(question, answer)
    if answer["answer"] == "died":
        pytest.fail(f"{question}: {answer}")
    return answer


def hung(stderr: str) -> dict[str, str]:
    """The last that a probe said, and the innermost calls of its threads, of faulthandler's text."""
    said, _, stacks = stderr.partition("Timeout (")
    shown: list[str] = []
    for line in stacks.splitlines()[1:]:
        if line.startswith(("Thread ", "Current thread ")):
            shown.append(line)
            frames = 0
        elif line.startswith("  File ") and shown:
            frames += 1
            if frames <= FRAMES:
                shown.append(re.sub(r'"[^"]*/((?:[^/"]+/){0,2}[^/"]+)"', r'"\1"', line))
    return {"said": said[-SHOWN:], "stacks": "\n".join(shown)[:SHOWN]}


def keep(question: str, answer: dict[str, Any]) -> None:
    """Adds an answer to the file, which other processes may do in the same moment."""
    OUT.parent.mkdir(parents=True, exist_ok=True)
    with OUT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = json.loads(OUT.read_text()) if OUT.exists() else {}
        made = OUT.with_suffix(".new")
        made.write_text(json.dumps({**found, question: answer}, indent=1) + "\n")
        made.replace(OUT)  # who is killed here leaves the old answers


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("question", QUESTIONS)
def test_probe(jax: Any, question: str) -> None:
    ask(question)


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("question", TIMED)
def test_timed_probe(jax: Any, question: str) -> None:
    """The answer is a time, or comes from times: nothing else may run on the machine."""
    ask(question)


@pytest.mark.timeout(SECONDS + 20)
def test_timed_costs_of_pytorch() -> None:
    ask("host_costs", HERE / "host_costs.py")


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
