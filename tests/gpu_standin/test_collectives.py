"""Collectives of one process with two devices; each case is a process, which sees two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_devices.py")


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", ["reduced", "gathered", "exchanged", "training"])
def test_two_devices(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), name, "xla"], capture_output=True, text=True, timeout=140,
        env={**os.environ, "FAKE_CUDA_DEVICES": "2"},
    )  # fmt: skip
    said = done.stdout + done.stderr[-3000:]
    assert done.returncode == 0, said
    assert "collectives" in done.stdout, said


def test_arrays_of_a_second_device_are_refused() -> None:
    """The test that one GPU cannot show."""
    test = Path(__file__).parents[1] / "gpu/test_models.py"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "standin_plugin", "-p", "no:cacheprovider",
         str(test), "-k", "second_device"],
        capture_output=True, text=True, timeout=140, env={**os.environ, "FAKE_CUDA_DEVICES": "2"},
    )  # fmt: skip
    assert "1 passed" in done.stdout, done.stdout + done.stderr[-3000:]
