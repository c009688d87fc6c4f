"""What runs on a GPU machine, tried without one: nothing there may fail for a reason seen here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
        [sys.executable, "benchmarks/gpu/bench.py", "--dry", "--out", str(out), *words],
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
    done = _python("benchmarks/gpu/bench.py", "--dry", "--cases", "nothing")
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
        "def run(self, queues, *_):\n"
        "    for part in [p for q in queues for p in q.parts]:\n"
        "        ran.append(part.name)\n"
        "        self.note(part, {'ended': 'passed'})\n"
        "gpu_all.Runner.run = run\n"
        "gpu_all.has_xdist = lambda *_: False\n"
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
        "gpu_all.time.sleep = lambda seconds: took(5, None)\n"
        "gpu_all.has_xdist = lambda *_: True\n"
        "class Process:\n"
        "    pid = 0\n"
        "    returncode = None\n"
        "    def __init__(self, *_, **__): pass\n"
        "    def wait(self): return 0\n"
        "gpu_all.subprocess.Popen = Process\n"
        "gpu_all.exited = lambda process: False\n"
        "gpu_all.os.killpg = gpu_all.sweep = lambda *_: None\n"
        "names = [p.name for p in gpu_all.parts('', pathlib.Path(), pathlib.Path(), [])]\n"
        "for name in [*names, ' '.join(names)]:\n"
        "    clock[0] = 0.0\n"
        "    sys.argv = ['gpu_all.py', '--parts', *name.split(), '--out', sys.argv[-1]]\n"
        "    gpu_all.main()\n"
        "    print('took', clock[0])\n"
    )
    done = _python("-c", code, str(tmp_path / "gpu"))
    times = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("took")]
    assert len(times) == 13 and max(times) < 600, done.stdout + done.stderr
    made = json.loads((tmp_path / "gpu/summary.json").read_text())["parts"]
    assert made["cores"]["ended"] == "not started: no time is left in this run"
    # All that measures nothing hung, and left time for what measures.
    assert "which were left" in made["tests"]["ended"] and made["probes-timed"]["seconds"] > 100


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


PARTS = (
    "import json, os, pathlib, signal, sys, time; sys.path.insert(0, 'benchmarks'); import gpu_all\n"
    "out, py, made = pathlib.Path(sys.argv[1]), sys.executable, {}\n"
    "env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}\n"
    "runner = gpu_all.Runner(env, out, made)\n"
    "part = lambda name, code, s=20: gpu_all.Part(name, [py, '-c', code], s)\n"
    "beside = lambda *parts: [gpu_all.Queue([p]) for p in parts]\n"
)


def test_what_is_carried_needs_nothing_else() -> None:
    """It is installed without an index, and without looking at what it needs: pytest does not start then."""
    (carried,) = re.findall(r'^CARRY = "(.+)"$', (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    names = carried.split()
    assert {"msgspec", "threadpoolctl", "pytest", "pytest-xdist"}.issubset(names)
    for name in names:
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert needed.name in names, f"{name} needs {text}"


def test_a_part_that_fails_or_hangs_stops_nothing(tmp_path: Path) -> None:
    """Nor does it leave a process behind, in whichever session."""
    child = (
        "import subprocess\np = subprocess.Popen(['sleep', '77'], start_new_session={})\n"
        "print(p.pid, flush=True)"
    )
    code = PARTS + (
        f"child = {child!r}\n"
        "begin = time.monotonic()\n"
        "runner.run(beside(part('good', 'print(1)'), part('bad', 'raise SystemExit(3)'),\n"
        "    part('slow', child.format(False) + ';import time; time.sleep(60)', 2),\n"
        "    part('leaves', child.format(True)), gpu_all.Part('none', ['/nowhere'], 2)))\n"
        "gpu_all.reports.joined_logs(out, list(made))\n"
        "made['took'] = time.monotonic() - begin\n"
        "print(json.dumps(made))\n"
    )
    done = _python("-c", code, str(tmp_path))
    made = json.loads(done.stdout.splitlines()[-1])
    assert 2 <= made.pop("took") < 15, made
    ended = {name: part["ended"] for name, part in made.items()}
    assert ended.pop("none").startswith("not started: ")
    assert ended == {
        "good": "passed", "bad": "status 3", "slow": "stopped after 2 s", "leaves": "passed",
    }, done.stdout + done.stderr  # fmt: skip
    assert made["good"]["tail"] == "1\n"
    for name in ("slow", "leaves"):
        assert not _runs(int(made[name]["tail"]))
    log = (tmp_path / "log.txt").read_text()
    assert all(f"==== {name}" in log for name in ended)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_parts_run_beside_each_other_within_one_limit(tmp_path: Path) -> None:
    """Two wait for each other, which neither could do alone; all that hangs ends with the time."""
    meet = (
        "import pathlib,sys,time\n"
        "me, other = (pathlib.Path({0!r}) / n for n in {1!r})\n"
        "me.touch()\n"
        "while not other.exists(): time.sleep(0.05)"
    )
    code = PARTS + (
        f"meet = {meet!r}\n"
        "a, b = meet.format(str(out), ('a', 'b')), meet.format(str(out), ('b', 'a'))\n"
        "late = gpu_all.Queue([part('hangs', 'import time; time.sleep(60)'), part('after', '')])\n"
        "begin = time.monotonic()\n"
        "runner.run([*beside(part('one', a), part('two', b)), late], begin + 5)\n"
        "print(json.dumps([{n: p['ended'] for n, p in made.items()}, time.monotonic() - begin]))\n"
    )
    done = _python("-c", code, str(tmp_path))
    made, took = json.loads(done.stdout.splitlines()[-1])
    assert made["one"] == made["two"] == "passed", done.stdout
    assert made["hangs"].startswith("stopped after 4 s, which were left of this run")
    assert made["after"] == "not started: no time is left in this run" and took < 10


def test_a_run_without_a_limit_ends_with_what_it_asked_the_machine(tmp_path: Path) -> None:
    """That question may take longer than all parts together."""
    code = PARTS + (
        "gpu_all.parts = lambda *_: [part('install', ''), part('quick', '')]\n"
        "gpu_all.machine = lambda *_: (time.sleep(2), {'nvcc': 'none'})[1]\n"
        "sys.argv = ['gpu_all.py', '--out', str(out / 'gpu'), '--build', str(out)]\n"
        "raise SystemExit(gpu_all.main())\n"
    )
    done = _python("-c", code, str(tmp_path), timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "gpu/summary.json").read_text())["machine"] == {"nvcc": "none"}


def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path) -> None:
    code = PARTS + (
        "gpu_all.parts = lambda *_: [part('install', ''), part('quick', 'print(5)'),\n"
        "    part('hangs', 'import time; print(6, flush=True); time.sleep(60)')]\n"
        "gpu_all.machine = lambda *_: {}\n"
        "def note(self, part, made, before=gpu_all.Runner.note):\n"
        "    before(self, part, made)\n"
        "    if part.name == 'quick': time.sleep(1); os.kill(os.getpid(), signal.SIGTERM)\n"
        "gpu_all.Runner.note = note\n"
        "sys.argv = ['gpu_all.py', '--out', str(out / 'gpu'), '--build', str(out)]\n"
        "gpu_all.main()\n"
    )
    done = _python("-c", code, str(tmp_path), timeout=50)
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    made = json.loads((tmp_path / "gpu/summary.json").read_text())["parts"]
    assert made["hangs"]["ended"] == "interrupted" and made["hangs"]["tail"] == "6\n"
    assert "\n5\n" in (tmp_path / "gpu/log.txt").read_text()
    with tarfile.open(tmp_path / "gpu.tar.gz") as packed:
        assert {"gpu/log.txt", "gpu/log-hangs.txt", "gpu/summary.json"} <= set(packed.getnames())


def test_stages(tmp_path: Path) -> None:
    """What is timed comes alone and later; on many cores the CPU's benchmark has some of its own."""
    code = PARTS + (
        "parts = gpu_all.parts('python', out, out, [])\n"
        "made = []\n"
        "for cores, beside, but in ((16, True, ''), (16, False, ''), (8, True, ''), (16, True, 'bench')):\n"
        "    gpu_all.os.sched_getaffinity = lambda _: set(range(cores))\n"
        "    chosen = [p for p in parts if not but or but not in p.name]\n"
        "    made.append([[timed, [([p.name for p in q.parts], sorted(q.cores), q.beside) for q in queues]]\n"
        "        for timed, queues in gpu_all.stages(chosen, beside)])\n"
        "print(json.dumps(made))\n"
    )
    done = _python("-c", code, str(tmp_path))
    many, asked, few, alone = json.loads(done.stdout.splitlines()[-1])
    names = ["target", "tests", "probes", "tests-jax", "sanitizer"]
    free = [False, [[[name], [], ", ".join(names)] for name in names]]
    benches = ["bench", "bench-torch", "bench-jax", "bench-ffi"]
    said = "bench on cores 0-3, cores on cores 4-15"
    beside = [[benches, list(range(4)), said], [["cores"], list(range(4, 16)), said]]
    assert many == [free, [True, [[["probes-timed"], [], ""]]], [True, beside]]
    assert asked == few == [free, [True, [[["probes-timed", *benches, "cores"], [], ""]]]]
    assert alone == [free, [True, [[["probes-timed", "cores"], [], ""]]]]


def test_a_benchmark_measures_as_long_as_there_is_time(tmp_path: Path) -> None:
    code = PARTS + (
        "inf = float('inf')\n"
        "pick = lambda more: [p for p in gpu_all.parts('python', out, out, more) if p.measures]\n"
        "benches = pick([])[1:]\n"
        "said = lambda queue, left: (lambda s, c: [s, int(c[-1])])(*gpu_all.granted(queue[0], queue, left))\n"
        "made = [said(benches, inf), said(benches, 265), said(benches[2:], 100), said(benches, 20)]\n"
        "print(json.dumps([*made, said(pick(['--seconds', '33']), inf)]))\n"
    )
    done = _python("-c", code, str(tmp_path))
    assert json.loads(done.stdout.splitlines()[-1]) == [
        [490, 400], [206, 116], [100, 80], [20, 5], [123, 33],
    ], done.stdout + done.stderr  # fmt: skip


SUITE = """
import os, time
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="no")
def test_skipped(): pass
@pytest.mark.timeout(2)
def test_hangs(): time.sleep(60)
def test_dies(): os._exit(3)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_tests_are_counted_also_where_their_process_died(tmp_path: Path, workers: int) -> None:
    if workers:
        pytest.importorskip("xdist")
    suite = tmp_path / "tests" / "gpu"
    suite.mkdir(parents=True)
    (suite / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra -v\n")
    code = PARTS + (
        "gpu_all.ROOT, runner.xdist = out, True\n"
        "command = [py, '-P', '-m', 'pytest', 'tests/gpu', '-v', '-p', 'no:cacheprovider',\n"
        "    '-o', 'timeout_method=thread', '--junitxml', str(out / 'suite.xml')]\n"
        "runner.run(beside(gpu_all.Part('suite', command, 60, workers=int(sys.argv[2]))))\n"
        "print(gpu_all.reports.shown(out, made))\n"
        "print(json.dumps(made['suite']['tests']))\n"
    )
    done = _python("-c", code, str(tmp_path), str(workers))
    found = json.loads(done.stdout.splitlines()[-1])
    failed = {name.split("::")[-1]: why for name, why in found["failures"].items()}
    if workers:
        assert (found["passed"], found["failed"], found["skipped"]) == (1, 3, 1), done.stdout
        assert failed.keys() == {"test_bad", "test_hangs", "test_dies"}
        assert failed["test_bad"] == "assert 1 == 2" and "crashed" in failed["test_dies"]
        assert "FAILED suite" in done.stdout
    else:  # the process that hung wrote no report
        assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1), done.stdout
        assert found["unfinished"] == ["tests/gpu/test_suite.py::test_hangs"]


def test_answers_of_several_processes_are_all_kept(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, os, sys; sys.path.insert(0, 'tests/gpu'); import test_probes\n"
        "def keep(n):\n"
        "    for k in range(20): test_probes.keep(f'{n} {k}', {'answer': 'yes'})\n"
        "made = [multiprocessing.get_context('fork').Process(target=keep, args=(n,)) for n in range(4)]\n"
        "[p.start() for p in made], [p.join() for p in made]\n"
    )
    done = _python("-c", code, GPU_OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "gpu-probes.json").read_text())) == 80


HANGS = """
import faulthandler, os, sys, threading, time
def below(): time.sleep(60)
for depth in range(30):
    print("step", depth, file=sys.stderr, flush=True)
faulthandler.dump_traceback_later(0.5 * float(os.environ["PROBE_SECONDS"]))
threading.Thread(target=below, daemon=True).start()
below()
"""


def test_a_probe_that_hangs_tells_how_far_it_came(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    code = (
        "import pathlib, sys; sys.path.insert(0, 'tests/gpu'); import test_probes\n"
        "test_probes.LIMITS['any'] = 3\n"
        "test_probes.ask('any', pathlib.Path(sys.argv[1]))\n"
    )
    done = _python("-c", code, str(script), GPU_OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "gpu-probes.json").read_text())["any"]
    assert answer["answer"] == "hangs" and answer["seconds"] == 3
    assert answer["said"].splitlines()[-1] == "step 29"
    assert answer["stacks"].count("hread 0x") == 2 and answer["stacks"].count("in below") == 2
    assert len(answer["stacks"]) <= 2000


def test_an_answer_is_kept_whole(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text(
        "import json; print(json.dumps({'answer': 'x', 'profile': 'line\\n' * 4000}))"
    )
    code = (
        "import pathlib, sys; sys.path.insert(0, 'tests/gpu'); import test_probes\n"
        "test_probes.ask('any', pathlib.Path(sys.argv[1]))\n"
    )
    done = _python("-c", code, str(script), GPU_OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "gpu-probes.json").read_text())["any"]
    assert answer["profile"] == "line\n" * 4000


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
