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
