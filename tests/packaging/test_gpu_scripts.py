"""What runs on a GPU machine, tried without one: nothing there may fail for a reason seen here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_engine = pytest.importorskip("dynaflow_xla.ffi._engine")


def _python(
    *words: str, timeout: float = 360, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *words], cwd=ROOT, capture_output=True, text=True, timeout=timeout,
        env={**os.environ, **environment},
    )  # fmt: skip


def _dry(out: Path, *words: str, timeout: float = 360) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--dry", "--out", str(out), *words],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, object] = json.loads(out.read_text())
    return record


def _all_ran(record: dict[str, object], groups: set[str]) -> None:
    cases = record["cases"]
    assert isinstance(cases, dict) and not record["ended"]
    for name, case in cases.items():
        assert not case["failed"], (name, case["failed"])
        assert case["samples_us"] and all(len(v) == 3 for v in case["samples_us"].values()), name
        assert ("torch eager" in case["samples_us"]) == ("torch" in groups)


def test_the_jax_benchmarks_run_dry(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    words = ["--groups", "jax", "ffi", "--cases", "qkv", "inception"]
    _all_ran(_dry(tmp_path / "dry.json", *words), {"jax", "ffi"})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_benchmarks_run_dry(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    record = _dry(tmp_path / "dry.json", "--seconds", "2000", timeout=850)
    _all_ran(record, {"torch", "jax", "ffi"})
    assert len(record["cases"]) >= 12  # type: ignore[arg-type]
    assert (tmp_path / "dry.png").stat().st_size > 10_000


def test_an_unknown_case_is_named() -> None:
    done = _python("benchmarks/gpu.py", "--dry", "--cases", "nothing")
    assert done.returncode != 0


@pytest.mark.skipif(not _engine.cuda_problem(), reason="this machine has a CUDA device")
def test_without_a_gpu_everything_skips_with_reasons(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    out = tmp_path / "gpu"
    words = [
        "--parts",
        "target",
        "tests",
        "tests-jax",
        "bench-jax",
        "--out",
        str(out),
        "--build",
        str(tmp_path),
    ]
    done = _python("benchmarks/gpu_all.py", *words)
    summary = json.loads((out / "summary.json").read_text())["parts"]
    assert done.returncode == 0, (done.stdout, summary)
    assert {part["ended"] for part in summary.values()} == {"passed"}, summary
    assert "no target text: JAX runs on 'cpu'" in summary["target"]["tail"]
    for name in ("tests", "tests-jax"):
        tail = summary[name]["tail"]
        assert "no GPU: there is no CUDA driver" in tail
        assert " skipped" in tail and " passed" not in tail
    assert "bench-gpu: nothing to measure" in summary["bench-jax"]["tail"]
    assert (out / "tests.xml").exists() and (tmp_path / "gpu.tar.gz").exists()
    assert _python("benchmarks/gpu_all.py", "--parts", "nothing").returncode == 2


def test_a_single_part_on_a_fresh_machine_installs_first(tmp_path: Path) -> None:
    """There, an earlier run's installation may be gone; and no part of a run depends on packing."""
    code = (
        "import sys, pathlib; sys.path.insert(0, 'benchmarks'); import gpu_all\n"
        "gpu_all.has_package = lambda *_: False\n"
        "ran = []\n"
        "gpu_all.run = lambda part, *_: ran.append(part.name) or dict(ended='passed', seconds=0, tail='')\n"
        "def no(*_): raise PermissionError('read-only')\n"
        "gpu_all.shutil.make_archive = no\n"
        "gpu_all.machine = lambda *_: {}\n"
        "sys.argv = ['gpu_all.py', '--parts', 'probes', '--out', sys.argv[1]]\n"
        "print(gpu_all.main(), ran)\n"
    )
    done = _python("-c", code, str(tmp_path / "gpu"))
    assert done.stdout.splitlines()[-1:] == ["0 ['install', 'probes']"], done.stdout + done.stderr
    assert "(not packed: read-only)" in done.stdout


def test_a_part_that_fails_or_hangs_stops_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; sys.path.insert(0, 'benchmarks'); import gpu_all\n"
        "log, py = pathlib.Path(sys.argv[1]), sys.executable\n"
        "run = lambda name, code, s: gpu_all.run(gpu_all.Part(name, [py, '-c', code], s), {}, log)\n"
        "print(run('good', 'print(1)', 20)['ended'])\n"
        "print(run('bad', 'raise SystemExit(3)', 20)['ended'])\n"
        "print(run('slow', 'import time; print(2, flush=True); time.sleep(60)', 2)['ended'])\n"
        "print(gpu_all.run(gpu_all.Part('none', ['/nowhere'], 2), {}, log)['ended'])\n"
    )
    done = _python("-c", code, str(tmp_path / "log.txt"))
    lines = done.stdout.splitlines()
    assert lines[:3] == ["passed", "status 3", "stopped after 2 s"], done.stdout + done.stderr
    assert lines[3].startswith("not started: ")
    assert "==== slow" in (tmp_path / "log.txt").read_text()


def test_the_kernels_of_the_suite_assemble(tmp_path: Path) -> None:
    if shutil.which("ptxas") is None:
        pytest.skip("ptxas is not installed")
    scope: dict[str, str] = {}
    text = (ROOT / "tests/gpu/conftest.py").read_text()
    exec(text[text.index('PTX = """') : text.index("def pytest_collection")], scope)
    (tmp_path / "k.ptx").write_text(scope["PTX"])
    for target in ("sm_80", "sm_90"):
        subprocess.run(
            ["ptxas", f"-arch={target}", str(tmp_path / "k.ptx"), "-o", "/dev/null"], check=True
        )
