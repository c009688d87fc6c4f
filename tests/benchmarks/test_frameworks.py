"""The command that runs the frameworks' own tests: what it counts, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

RUN = Path(__file__).parents[1] / "frameworks" / "run.py"

SUITE = """
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest


class Suite:
    def check(self, f):
        x = jnp.arange(4.0)
        np.testing.assert_allclose(jax.jit(f)(x), f(x), rtol=1e-6)

    def test_value(self):
        self.check(lambda x: jnp.sin(x) + jnp.cos(x))
        assert "scheduled" in repr(jax.jit(jnp.sin))

    def test_forward_mode(self):
        self.check(lambda x: jax.jvp(jax.jit(lambda y: jnp.sin(y) * jnp.cos(y)), (x,), (x,))[1])

    def test_refused(self):
        jax.jit(jnp.sin, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))(1.0)

    def test_wrong(self):
        assert "scheduled" not in repr(jax.jit(jnp.sin))

    def test_takes_the_process_with_it(self):
        if "scheduled" in repr(jax.jit(jnp.sin)):
            os.kill(os.getpid(), 9)

    def test_fails_anyway(self):
        assert False

    def test_skipped(self):
        pytest.skip("here")


class TestSuite(Suite):
    pass
"""


def checkout(folder: Path, version: str) -> Path:
    (folder / "jax").mkdir()
    (folder / "jax" / "version.py").write_text(f'_version = "{version}"\n')
    (folder / "tests").mkdir()
    (folder / "tests" / "lax_control_flow_test.py").write_text(SUITE)
    return folder / "tests"


def run(tests: Path, *args: str) -> Any:
    command = [sys.executable, "-P", str(RUN), "--jax-tests", str(tests), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_what_is_counted(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.md"
    tests = checkout(tmp_path, jax.__version__)
    only = ["--suites", "lax_control_flow_test", "--modes", "branches", "--keep", str(tmp_path)]
    done = run(tests, *only, "--out", str(out), "--page", str(page))
    assert done.returncode == 1, done.stderr  # something is wrong
    (row,) = json.loads(out.read_text())["rows"]
    counts = {key: row[key] for key in ("whole", "passed", "refused", "wrong", "excluded")}
    assert counts == {"whole": True, "passed": 2, "refused": 1, "wrong": 2, "excluded": 0}
    assert set(row["failures"]) == {
        "TestSuite.test_wrong",
        "TestSuite.test_takes_the_process_with_it",
    }
    line = next(x for x in page.read_text().splitlines() if x.startswith("| `lax_control"))
    cells = [cell.strip() for cell in line.split("|")[1:]]
    assert cells[1:3] == ["branches", "2"] and cells[5:8] == ["1", "2", "0"], line
    out.unlink()
    kept = run(tests, *only, "--limit", "0", "--out", str(out))  # nothing runs again
    assert kept.returncode == 1, kept.stderr
    assert json.loads(out.read_text())["rows"] == [row]


def test_tests_of_another_version(tmp_path: Path) -> None:
    done = run(checkout(tmp_path, "0.3.1"))
    assert done.returncode and f"git checkout jax-v{jax.__version__}" in done.stderr


def test_no_tests_there(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode and "JAX_TESTS" in done.stderr and "Traceback" not in done.stderr
