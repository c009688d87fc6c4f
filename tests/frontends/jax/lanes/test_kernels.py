"""Plans with CUDA kernels, on the fake driver in libcuda's place; each scenario is a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

import fake_driver  # noqa: E402


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return fake_driver.build(tmp_path_factory.mktemp("cuda"))
    except FileNotFoundError as error:
        pytest.skip(f"needs {error}")


def _run(scenario: str, library: Path | str, **settings: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", fake_driver.__file__, scenario],
        env={**os.environ, "DYNAFLOW_XLA_LIBCUDA": str(library), **settings},
        capture_output=True, text=True, timeout=360,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_a_plan_of_kernels_is_one_graph(library: Path) -> None:
    _run("values", library, FAKE_CUDA_DELAY_US="200")


def test_a_plan_with_executables_is_not_recorded(library: Path) -> None:
    _run("mixed", library)


def test_a_kernel_that_faults_is_named(library: Path) -> None:
    _run("faults", library, DYNAFLOW_XLA_CHECK_STEPS="1")


def test_what_the_driver_refuses(library: Path) -> None:
    _run("refusals", library)


def test_drivers_that_cannot_be_used(library: Path, tmp_path: Path) -> None:
    assert "there is no CUDA driver on this machine" in _run("problem", tmp_path / "nothing.so")
    empty = tmp_path / "empty.so"
    subprocess.run(["c++", "-shared", "-x", "c++", "/dev/null", "-o", str(empty)], check=True)
    assert "the CUDA driver has no cuInit: it is older than the 11.4" in _run("problem", empty)
    told = _run("problem", library, FAKE_CUDA_VERSION="11030")
    assert "speaks version 11030; dynaflow_xla needs 11040: update it" in told
    assert _run("problem", library, FAKE_CUDA_DEVICES="0") == "the CUDA driver sees no device"
    assert _run("problem", library) == ""


def test_a_driver_without_green_contexts(library: Path) -> None:
    _run("no_green", fake_driver.build(library.parent, green=False))
