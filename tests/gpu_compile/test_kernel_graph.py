"""A plan of kernels in a program compiled for a GPU is a command of XLA's command buffer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

import fake_driver  # noqa: E402


def test_a_plan_of_kernels_is_in_the_command_buffer(tmp_path: Path) -> None:
    try:
        library = fake_driver.build(tmp_path)
    except FileNotFoundError as error:
        pytest.skip(f"needs {error}")
    dumps = tmp_path / "dumps"
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("kernel_graph.py")), str(dumps)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "DYNAFLOW_XLA_LIBCUDA": str(library)},
        capture_output=True, text=True, timeout=360,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (sequence,) = dumps.glob("*around*thunk_sequence_after_thunk_passes.txt")
    text = sequence.read_text()
    lines = [line for line in text.splitlines() if "dfx_run_graph" in line or "kCustomCall" in line]
    top = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert any("kCommandBuffer" in line for line in top), text
    assert not any("kCustomCall" in line for line in top), text
    assert lines, text
