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
        "--as-it-is",
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
        "gpu_all.why_not_installed = lambda *_: 'not installed here'\n"
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


def test_any_single_part_fits_in_ten_minutes(tmp_path: Path) -> None:
    """Also where all that is run, and an installation before it, takes as long as it may."""
    code = (
        "import sys, pathlib; sys.path.insert(0, 'benchmarks'); import gpu_all\n"
        "clock = [0.0]\n"
        "gpu_all.time.monotonic = lambda: clock[0]\n"
        "def took(seconds, made):\n"
        "    clock[0] += seconds\n"
        "    return made\n"
        "gpu_all.why_not_installed = lambda *_: took(60, 'not installed here')\n"
        "gpu_all.machine = lambda *_: took(60, {})\n"
        "class Process:\n"
        "    pid = 0\n"
        "    def __init__(self, *_, **__): pass\n"
        "    def wait(self, seconds): raise gpu_all.subprocess.TimeoutExpired('', took(seconds, seconds))\n"
        "    def poll(self): return 0\n"
        "gpu_all.subprocess.Popen = Process\n"
        "names = [p.name for p in gpu_all.parts('', pathlib.Path(), pathlib.Path(), [])]\n"
        "for name in [*names, ' '.join(names)]:\n"
        "    clock[0] = 0.0\n"
        "    sys.argv = ['gpu_all.py', '--parts', *name.split(), '--out', sys.argv[-1]]\n"
        "    gpu_all.main()\n"
        "    print('took', clock[0])\n"
    )
    done = _python("-c", code, str(tmp_path / "gpu"))
    times = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("took")]
    assert len(times) == 11 and max(times) < 600, done.stdout + done.stderr
    ended = json.loads((tmp_path / "gpu/summary.json").read_text())["parts"]["sanitizer"]["ended"]
    assert ended == "not started: no time is left in this run"


def test_an_installation_of_other_sources_is_not_used(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; sys.path.insert(0, 'benchmarks'); import gpu_all\n"
        "site = pathlib.Path(sys.argv[1]) / 'site'\n"
        "why = lambda path='': print(gpu_all.why_not_installed(sys.executable, {'PYTHONPATH': path}, site))\n"
        "why()\n"
        "site.mkdir()\n"
        "(site / 'made_of').write_text('older')\n"
        "why()\n"
        "import sources\n"
        "(site / 'made_of').write_text(sources.current())\n"
        "why()\n"
        "package = site / 'dynaflow_xla'\n"
        "package.mkdir()\n"
        "(package / '__init__.py').write_text('raise ImportError')\n"
        "why(str(site))\n"
        "(package / '__init__.py').write_text('import time; time.sleep(60)')\n"
        "gpu_all.IMPORT = 1\n"
        "why(str(site))\n"
    )
    done = _python("-c", code, str(tmp_path), PYTHONPATH="")
    assert done.stdout.splitlines() == [
        "not installed here", "installed from other sources than these", "",
        "installed, and cannot be imported", "installed, and its import hangs",
    ], done.stdout + done.stderr  # fmt: skip


def test_a_wheel_of_other_sources_is_not_installed(tmp_path: Path) -> None:
    """With what a Python without build tools says then."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "dynaflow_xla-0.1.0-py3-none-any.whl").write_text("")
    (wheels / "made_of").write_text("older")
    code = (
        "import sys; sys.path.insert(0, 'tests/gpu'); import install\n"
        "install.pip = lambda *args: print('pip', args[0], args[-1]) or 1\n"
        "print(install.main())\n"
    )
    done = _python("-c", code, str(tmp_path / "site"), str(wheels))
    assert (
        "the wheel was built from other sources than these; building from the sources"
        in done.stdout
    )
    assert (
        f"pip install {ROOT}" in done.stdout
        and ".whl" not in done.stdout.split("building")[1].split("\n")[0]
    )
    assert done.stdout.splitlines()[-1] == "1", done.stdout + done.stderr


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
