"""The command line, as far as it needs no framework."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("click", reason="the command line is made with it")
pytest.importorskip("rich", reason="the command line is made with it")

from click.testing import CliRunner, Result

from dynaflow_xla import __main__ as entry, machine
from dynaflow_xla.cli import console, kept, main, targets
from dynaflow_xla.cli.health import checks, doctor
from dynaflow_xla.cli.health.checks import Check
from dynaflow_xla.cli.timing import bench, compare, measuring, pictures, report
from dynaflow_xla.tuning import autotune


def run(*args: Any, **options: Any) -> Result:
    return CliRunner().invoke(main.cli, [str(a) for a in args], **options)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, and a current folder, of the test's own."""
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "cache"


# -- targets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["explain", "nothing"], "module:function or file.py:function; got 'nothing'"),
        (["explain", "no_such_module:f"], "there is no module 'no_such_module'"),
        (["explain", "here.py:f"], "there is no file here.py"),
        (["explain", "a/nb.ipynb:f"], "notebooks are not read; got a/nb.ipynb"),
        (["explain", "a/nb.ipynb:f"], "and name that: a/nb.py:f"),
        (["trace", "nb.ipynb"], "and name that: nb.py"),
        (["explain", "math:sqr"], "math has no 'sqr'; did you mean 'sqrt'"),
        (["explain", "math:pi"], "is no function or model; it is a float"),
        (["explain", "collections:Counter"], "is a class. With --factory"),
        (["explain", "math:sqrt", "f99[2]", "--framework", "jax"], "the type must be one of"),
        (["explain", "math:sqrt", "f32[3]", "q32[2]"], "the type must be one of"),
        (["explain", "math:sqrt", "f32[3]", "f32[-2]"], "a shape such as f32[8,128] or s32[]"),
        (["explain", "math:sqrt", "x+1"], "a shape such as f32[8,128] or s32[], or a Python literal"),
        (["explain", "math:sqrt", "1", "--args", "math:pi"], "leave one of them out"),
        (["explain", "math:sqrt", "--args", "math:pi"], "a tuple of arguments, a mapping"),
        (["explain", "math:sqrt", "2", "--strategy", "Nano(4)"], "a strategy is a name"),
        (["explain", "math:sqrt", "2", "--in-axes", "a b"], "--in-axes must be a Python literal"),
        (["trace", "math:sqrt", "2", "-o", "x.gif"], "a timeline is written as"),
        (["trace", "gone.py"], "there is no file gone.py"),
        (["bench", "math:sqrt", "--case", "sorts"], "takes a TARGET or --case; got both"),
        (["compare", "a.json", "b.json"], "a.json cannot be read: No such file"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(args: list[str], said: str) -> None:
    found = run(*args)
    assert found.exit_code == 1 and said in found.stderr, found.stderr
    assert "Traceback" not in found.output


@pytest.mark.parametrize(("marks", "module"), [(("p/q", "p"), "p.q.a"), (("p/q",), "q.a")])
def test_a_file_of_a_package_is_named_as_a_module(
    marks: tuple[str, ...], module: str, tmp_path: Path
) -> None:
    (tmp_path / "p" / "q").mkdir(parents=True)
    for folder in marks:
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "p" / "q" / "b.py").write_text("n = 1\n")
    (tmp_path / "p" / "q" / "a.py").write_text("from .b import n\ndef g(x): return x\n")
    said = run("explain", "p/q/a.py:g", "1").stderr
    assert "relative imports" in said and f"as a module: {module}:g" in " ".join(said.split())
    # From the folder that it says, or the one that it is in already, that works.
    assert (f"in the folder {tmp_path / 'p'}" in said) == (module == "q.a")
    if module == "p.q.a":
        assert targets.named(f"{module}:g")(3) == 3


def test_errors_as_json_and_with_a_traceback(tmp_path: Path) -> None:
    found = run("explain", "nothing", "--json")
    assert json.loads(found.stdout) == {"error": found.stderr.removeprefix("error: ").strip(),
                                        "kind": "TargetError"}  # fmt: skip
    (tmp_path / "broken.py").write_text("def f(x):\n    return x\n\n1 / 0\n")
    plain = run("explain", "broken.py:f", "1")
    assert plain.exit_code == 1 and "Traceback" not in plain.stderr
    assert "ZeroDivisionError: division by zero" in plain.stderr and "broken.py:4" in plain.stderr
    assert "--traceback" in plain.stderr
    assert "Traceback" in run("explain", "broken.py:f", "1", "--traceback").stderr


def test_literals_mappings_and_factories(tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text(
        "import dynaflow_xla as dfx\n"
        "def f(a, b=2): ...\n"
        "def make(): return f\n"
        "def some(): return {'a': 1}\n"
        "def both(): return dfx.Arguments(1, b=3)\n"
    )
    assert targets.target("given.py:f", ["1", "True"]).args == (1, True)
    assert targets.target("given.py:f", make="some").kwargs == {"a": 1}
    both = targets.target("given.py:make", make="given.py:both", factory=True)
    assert (both.args, both.kwargs, both.fn.__name__) == ((1,), {"b": 3}, "f")
    with pytest.raises(targets.TargetError, match="takes a. Give a shape"):
        targets.target("given.py:f")
    assert repr(targets.strategy("NanoBatch(4)")) == "NanoBatch(4)"
    assert targets.strategy("branches") == "branches"
    assert repr(targets.strategy("TwoBatchOverlap(rows=8)")).startswith("TwoBatchOverlap(")
    with pytest.raises(targets.TargetError, match=r"dynaflow_xla\.published"):
        targets.strategy("Nobody()")


# -- compare ----------------------------------------------------------------------------------------


def _file(path: Path, ways: dict[str, float], noise: float = 0.02, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    samples = {k: (v * (1 + noise * rng.standard_normal(30))).tolist() for k, v in ways.items()}
    cases = [{"name": "sorts", "framework": "jax", "samples_ms": samples}]
    path.write_text(json.dumps({"baselines": ["jit"], "cases": cases}))
    return path


def _verdicts(*args: Any) -> tuple[int, dict[str, str]]:
    found = run("compare", *args, "--json")
    return found.exit_code, {r["way"]: r["verdict"] for r in json.loads(found.stdout)["rows"]}


def test_compare_tells_changes_from_noise(tmp_path: Path) -> None:
    a = _file(tmp_path / "a.json", {"jit": 10.0, "branches": 6.0, "auto": 6.0})
    same = _file(tmp_path / "b.json", {"jit": 10.0, "branches": 6.0, "auto": 6.0}, seed=1)
    assert _verdicts(a, same) == (0, {"jit": "same", "branches": "same", "auto": "same"})
    other = _file(tmp_path / "c.json", {"jit": 10.0, "branches": 7.0, "auto": 5.0}, seed=2)
    assert _verdicts(a, other) == (1, {"jit": "same", "branches": "slower", "auto": "faster"})
    assert _verdicts(other, a)[1]["branches"] == "faster"
    noisy = _file(tmp_path / "d.json", {"jit": 10.0, "branches": 6.4, "auto": 6.0}, noise=0.5)
    assert _verdicts(a, noisy)[1]["branches"] == "same"


def test_compare_takes_out_what_the_machine_did(tmp_path: Path) -> None:
    a = _file(tmp_path / "a.json", {"jit": 10.0, "branches": 6.0})
    slow = _file(tmp_path / "b.json", {"jit": 13.0, "branches": 7.8}, seed=1)
    assert _verdicts(a, slow) == (0, {"jit": "slower", "branches": "same"})
    told = run("compare", a, slow).stdout
    assert "slower (the machine)" in told and "0 slower, 0 faster, 1 the same" in told
    worse = _file(tmp_path / "c.json", {"jit": 13.0, "branches": 10.0}, seed=1)
    assert _verdicts(a, worse) == (1, {"jit": "slower", "branches": "slower"})
    # Without schedules the plain ways are what is compared.
    a, slow = (_file(tmp_path / f"{ms}.json", {"jit": ms}) for ms in (10.0, 13.0))
    assert _verdicts(a, slow) == (1, {"jit": "slower"})


def test_compare_reads_committed_results_and_says_its_rule() -> None:
    results = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("cases-*.json"))
    if not results:
        pytest.skip("no result files beside the tests")
    found = run("compare", results[-1], results[-1])
    assert found.exit_code == 0, found.output
    assert "0 slower, 0 faster" in found.stdout and "95 % interval" in found.stdout


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"cases": [{"name": "a", "samples_ms": {"b": [0]}}]}']
)
def test_compare_refuses_what_is_no_result(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    found = run("compare", "a.json", "a.json")
    assert found.exit_code == 1 and "a.json" in found.stderr and "Traceback" not in found.stderr


def test_paired_samples_every_run_in_every_round() -> None:
    counts = {"a": 0, "b": 0}

    def call(name: str) -> Any:
        def run() -> None:
            counts[name] += 1

        return run

    samples = measuring.paired({n: call(n) for n in counts}, 5, sample_s=1e-6)
    assert {n: len(v) for n, v in samples.items()} == {"a": 5, "b": 5}
    told = measuring.ratio({"a": [2.0] * 5, "b": [4.0] * 5, "c": [3.0] * 5}, "a", ["b", "c"])
    assert told["baseline"] == "c" and told["ratio"] == pytest.approx(2 / 3) == told["high"]


# -- report -----------------------------------------------------------------------------------------


def test_report_says_what_gains_and_loses(tmp_path: Path) -> None:
    _file(tmp_path / "a.json", {"jit": 10.0, "fast <b>|": 6.0, "slow": 14.0})
    told = json.loads(run("report", "a.json", "-o", "r.html", "--json").stdout)
    assert {r["way"]: r["ratio"] < 1 for r in told["rows"]} == {"fast <b>|": True, "slow": False}
    page = (tmp_path / "r.html").read_text()
    assert "fast &lt;b&gt;|" in page and "1 gain, 1 lose" in page
    assert "http" not in page and "<script" not in page  # it loads nothing
    assert run("report", "a.json", "-o", "r.md").exit_code == 0
    table = (tmp_path / "r.md").read_text()
    assert r"| fast <b>\| |" in table and "0.6" in table


def test_report_draws_lanes_and_scaling(tmp_path: Path) -> None:
    case = {
        "name": "a<b", "samples_ms": {"jit": [1.0, 1.0], "fast 1": [2.0, 2.0], "fast 2": [0.9, 0.9]},
        "timelines": {"fast 2": {"spans": [[0, "left", 0, 500], [1, "ri<ght", 100, 1000]]}},
    }  # fmt: skip
    page = report.page([("a", {"cases": [case], "baselines": ["jit"]})])
    assert page.count("<rect") == 2 + 2 and "ri&lt;ght" in page and "2 lanes" in page
    assert "fast N" in page and "a<b" not in page
    # Pictures of a case have one scale: half the time is half as wide.
    both = {
        "fast 1": {"spans": [[0, "left", 0, 2000]]},
        "fast 2": {"spans": [[0, "left", 0, 1000]]},
    }
    drawn = pictures.timelines({"timelines": both})
    wide, narrow = (float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn))
    assert wide == 2 * narrow and drawn.count("predicted") == 2
    # What is damaged is left out, not the page.
    for bad in (None, 3, {"fast 2": None}, {"fast 2": {"spans": [[0, "x"]]}}, {"x": {"spans": 1}}):
        page = report.page([("a", {"cases": [case | {"timelines": bad}], "baselines": ["jit"]})])
        assert page.count("<rect") == 2


def test_report_compares_with_peers() -> None:
    case = {
        "name": "n", "samples_ms": {"ours": [1.0, 1.0], "other": [2.0, 2.0], "third": [3.0, 3.0]},
        "peers": {"dynaflow jax": ["ours"], "A": ["other"], "B": ["third"]},
    }  # fmt: skip
    (row,) = report.rows({"cases": [case]})
    assert (row.way, row.baseline, row.ratio) == ("ours", "other", 0.5)


def test_report_shows_what_is_beyond_the_scale() -> None:
    samples = {"jit": [1.0, 1.1], "fast": [9.0, 9.1]}
    page = report.page(
        [("a", {"cases": [{"name": "n", "samples_ms": samples}], "baselines": ["jit"]})]
    )
    assert "beyond 2" in page and "<circle" not in page


def test_report_of_committed_results(tmp_path: Path) -> None:
    results = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("cases-*.json"))
    if not results:
        pytest.skip("no result files beside the tests")
    told = json.loads(run("report", results[-1], "--json").stdout)
    assert len(told["rows"]) > 10 and (tmp_path / "report.html").stat().st_size > 5000


def test_report_refuses(tmp_path: Path) -> None:
    _file(tmp_path / "a.json", {"branches": 1.0})
    assert "a report is written as" in run("report", "a.json", "-o", "x.pdf").stderr
    said = " ".join(run("report", "a.json").stderr.split())
    assert "with and without a plan" in said and "dynaflow-xla compare A.json B.json" in said


def test_the_page_says_which_committed_results_are_read() -> None:
    root = Path(__file__).parents[2]
    results = {p.name: p for p in (root / "benchmarks" / "results").glob("*.json")}
    if not results:
        pytest.skip("no result files beside the tests")
    page = (root / "docs" / "command_line.md").read_text()
    told = {}
    for who, names in re.findall(
        r"^\| (`compare` (?:and `report`|alone)) \| (.*) \|$", page, re.MULTILINE
    ):
        for pattern in re.findall(r"`(\S+\.json)`", names):
            matched = fnmatch.filter(results, pattern)
            assert matched, pattern
            told |= dict.fromkeys(matched, "report" in who)
    found = {}
    for name, path in results.items():
        with contextlib.suppress(targets.TargetError):
            found[name] = bool(report.rows(compare.read(path)))
    assert told == found


# -- cache ------------------------------------------------------------------------------------------


def _fill(folder: Path) -> list[Path]:
    autotune.store("a" * 32, {"choice": "branches", "reason": "it is faster", "medians_ms": {}})
    compiled = folder / "inductor"
    compiled.mkdir(mode=0o700)
    (compiled / "k.json").write_text("{}")
    other = [folder / "torch-env", folder / "notes.txt"]
    other[0].mkdir()
    other[1].write_text("mine")
    return other


def test_cache_lists_sums_and_clears_its_own_files_only(folder: Path) -> None:
    assert json.loads(run("cache", "--json").stdout)["files"] == 0
    other = _fill(folder)
    told = json.loads(run("cache", "list", "--json").stdout)
    assert {e["kind"]: e["about"] for e in told["entries"]} == {
        "decision": "branches: it is faster", "compiled": "inductor",
    }  # fmt: skip
    assert "it is faster" in run("cache", "list").stdout
    assert "2 files" in run("cache", "size").stdout
    assert run("cache", "clear", input="n\n").exit_code == 1 and len(kept.entries(folder)) == 2
    assert run("cache", "clear", "--json").exit_code == 1
    assert run("cache", "clear", "--kind", "compiled", "--yes").exit_code == 0
    assert [e.kind for e in kept.entries(folder)] == ["decision"]
    assert run("cache", "clear", input="y\n").exit_code == 0
    assert kept.entries(folder) == [] and all(path.exists() for path in other)


def test_a_cache_that_is_no_folder_is_told(folder: Path) -> None:
    folder.write_text("mine")
    done = run("cache", "list")
    assert done.exit_code == 1 and f"{folder} cannot be read: Not a directory" in done.stderr


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DYNAFLOW_XLA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", none)
    done = run("cache")
    assert done.exit_code == 1 and "no home folder" in done.stderr
    assert "RuntimeError" not in done.stderr
    (check,) = checks.of_cache()
    assert check.status == "warn" and "no home folder" in check.found
    assert "DYNAFLOW_XLA_CACHE_DIR" in check.mend


# -- doctor -----------------------------------------------------------------------------------------


def _doctor(monkeypatch: pytest.MonkeyPatch, trials: dict[str, Any]) -> Any:
    """Its JSON, with what the trials of other processes say given by name."""
    monkeypatch.setattr(doctor, "_trial", lambda what, _: trials[what])
    found = run("doctor", "--json")
    told = json.loads(found.stdout)
    assert told["ok"] is (found.exit_code == 0)
    return found, {(c["area"], c["name"]): c for c in told["checks"]}


WORKS = {
    "engine": ({"abi": 1}, ""),
    "gpu": ({"missing": "no libcuda"}, ""),
    "jax": ({"version": "0.10.2", "devices": ["cpu:0"], "gpu": False, "lanes": 2}, ""),
    "torch": ({"version": "2.13.0", "devices": ["cpu"], "gpu": False, "lanes": 2}, ""),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What is installed, whatever is."""
    versions: dict[str, str | None] = {"jax": "0.10.2", "jaxlib": "0.10.2", "torch": "2.13.0"}
    real = checks._version
    monkeypatch.setattr(checks, "_version", lambda n: versions[n] if n in versions else real(n))
    return versions


@pytest.mark.usefixtures("installed")
def test_doctor_of_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = _doctor(monkeypatch, WORKS)
    assert found["jax", "lanes"]["status"] == "ok" == found["torch", "lanes"]["status"]
    assert found["gpu", "driver"]["status"] == "note"


def test_doctor_without_one_framework_or_both(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str | None]
) -> None:
    installed["torch"] = None
    done, found = _doctor(monkeypatch, WORKS)
    assert done.exit_code == 0 and found["torch", "PyTorch"]["mend"].endswith(
        "'dynaflow-xla[torch]'"
    )
    installed["jax"] = None
    done, found = _doctor(monkeypatch, WORKS)
    assert done.exit_code == 1 and found["package", "frameworks"]["status"] == "fail"


def test_doctor_names_what_is_broken(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str | None]
) -> None:
    installed["torch"] = "2.4.1"
    trials = {
        **WORKS,
        "engine": ({}, "ImportError: undefined symbol"),
        "gpu": ({"failed": "cuInit: no device"}, ""),
        "jax": ({}, "did not end within 3 s"),
    }
    done, found = _doctor(monkeypatch, trials)
    assert done.exit_code == 1
    for key, status in {
        ("package", "engine"): "fail", ("gpu", "driver"): "warn", ("jax", "lanes"): "fail",
        ("torch", "PyTorch"): "fail",
    }.items():  # fmt: skip
        assert found[key]["status"] == status and found[key]["mend"], found[key]
    assert "2.4.1" in found["torch", "PyTorch"]["found"]


def test_doctor_of_a_gpu_that_is_not_used(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str | None]
) -> None:
    installed["jax-cuda13-plugin"] = "0.10.1"
    _, found = _doctor(
        monkeypatch, {**WORKS, "gpu": ({"cuda": "13.0", "devices": ["NVIDIA H100"]}, "")}
    )
    assert "NVIDIA H100" in found["gpu", "driver"]["found"]
    assert found["gpu", "jax-cuda13-plugin"]["status"] == "fail"  # not jaxlib's version
    assert found["jax", "GPU"]["status"] == found["torch", "GPU"]["status"] == "warn"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('x')", "said 'x'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11"),
        ("raise ValueError('no')", "ValueError: no"),
        ("import time; time.sleep(60)", "did not end within"),
    ],
)
def test_a_trial_that_dies_or_hangs_is_told(
    monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    real = doctor.subprocess.run
    monkeypatch.setattr(
        doctor.subprocess, "run", lambda _, **more: real([sys.executable, "-c", code], **more)
    )
    told, why = doctor._trial("jax", 120.0 if "sleep" not in code else 0.3)
    assert told == {} and said in why


def test_doctor_prints_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Check("jax", "lanes", "fail", "broken [1]", "do this"), Check("jax", "x", "warn", "y")]
    assert doctor.show(found, console.CommandOutput()) == 1
    out = capsys.readouterr().out
    assert "fail  lanes: broken [1]" in out and "> do this" in out and "\x1b" not in out


def test_limits_of_control_groups(tmp_path: Path) -> None:
    member = tmp_path / "cgroup"
    member.write_text("0::/a/b\n")
    assert machine.quota_cores(tmp_path, member) is None
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert machine.quota_cores(tmp_path, member) == 1.5  # of the group above
    member.write_text("4:cpu,cpuacct:/x\n0::/\n")
    (tmp_path / "cpu" / "x").mkdir(parents=True)
    (tmp_path / "cpu" / "x" / "cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu" / "x" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.quota_cores(tmp_path, member) == 0.5
    (tmp_path / "cpu" / "x" / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine.quota_cores(tmp_path, member) is None


# -- the whole --------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_its_packages_it_says_which(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("dynaflow_xla.cli")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [n for n in sys.modules if n == missing or n.startswith(missing + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=f"needs the package '{missing}'.*pip install"):
        entry.main()


def test_help_of_every_command() -> None:
    for name in main.cli.commands:
        found = run(name, "--help")
        assert found.exit_code == 0 and "--json" in found.output
    assert run("--version").output.startswith("dynaflow-xla, version ")


def _file_of(path: Path, code: str) -> str:
    path.write_text(code)
    return f"{path.name}:f"


NOISY = (
    "import os, subprocess, sys\nprint('on import')\nout = sys.stdout\n"
    "def f(x):\n    print('in the call'); out.write('kept\\n'); os.write(1, b'by number\\n')\n"
    "    subprocess.run([sys.executable, '-c', 'print(1)'])\n    {then}\n"
)


@pytest.mark.parametrize(
    ("then", "error"),
    [("return [f]", "is a list"), ("1 / 0", "ZeroDivisionError"), ("sys.exit(3)", "SystemExit")],
)
def test_json_is_all_of_standard_output(then: str, error: str, tmp_path: Path) -> None:
    """In a process of its own: users' code prints by number, too, and from children."""
    code = NOISY.format(then=then).replace("def f(x)", "def f()")
    name = _file_of(tmp_path / "noisy.py", code)
    command = [sys.executable, "-P", "-c", "from dynaflow_xla.__main__ import main; main()"]
    done = subprocess.run(
        [*command, "explain", name, "--factory", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 1 and error in json.loads(done.stdout)["error"], done
    for text in ("on import", "in the call", "kept", "by number"):
        assert text in done.stderr


@pytest.mark.parametrize(
    "args", [["explain"], ["explain", "--none"], ["none"], ["bench", "--rounds", "1"]]
)
def test_usage_errors_are_json_where_that_is_asked_for(args: list[str]) -> None:
    found = run(*args, "--json")
    told = json.loads(found.stdout)
    assert found.exit_code == 2 == run(*args).exit_code
    assert told["error"] and told["kind"] and told["error"] in found.stderr
    assert run(*args).stdout == "" and run("explain", "--", "--json").stdout == ""


def test_args_that_are_shapes_say_where_shapes_go(tmp_path: Path) -> None:
    name = _file_of(tmp_path / "plain.py", "def f(x): return x\n")
    for given in (["f32[8]"], ["4"], ["f32[8]", "s32[]"]):
        found = run("explain", name, "--args", *given)
        assert "--args names a function that makes the arguments" in found.stderr
        assert f"after TARGET: {name} " in found.stderr and given[-1] in found.stderr


@pytest.mark.parametrize("command", ["bench", "why", "trace"])
def test_where_nothing_can_be_written_is_said_before_anything_runs(
    command: str, tmp_path: Path
) -> None:
    name = _file_of(tmp_path / "runs.py", "raise SystemExit('it ran')\n")
    (tmp_path / "folder.html").mkdir()
    for path in ("gone/x.html", "folder.html"):
        found = run(command, name, "1", "-o", path)
        assert found.exit_code == 1 and f"{path} cannot be written" in found.stderr, found.stderr
    if command != "bench":
        assert "a timeline is written as" in run(command, name, "1", "-o", "x.txt").stderr


def test_a_result_that_cannot_be_written_is_printed(tmp_path: Path) -> None:
    record = {"environment": {"load_average": [0]}, "cases": []}
    out = console.CommandOutput(True)
    with pytest.raises(targets.TargetError, match="cannot be written"):
        bench.show(record, tmp_path / "gone" / "x.json", [], out)
    assert out.document == {**record, "notes": []}


@pytest.mark.parametrize(
    ("text", "said"),
    [("NanoBatch(1, 2, 3, 4)", "TypeError"), ("own.py:Own", "RuntimeError: not today")],
)
def test_strategies_that_cannot_be_made(text: str, said: str, tmp_path: Path) -> None:
    _file_of(
        tmp_path / "own.py",
        "class Own:\n    def __init__(self): raise RuntimeError('not today')\ndef f(): ...\n",
    )
    for command in (["bench", "own.py:f"], ["explain", "own.py:f"]):
        found = run(*command, "--strategy", text)
        assert f"the strategy {text!r} cannot be made: {said}" in found.stderr, found.stderr


def test_the_users_line_below_a_prefix_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", "/")
    name = _file_of(tmp_path / "mine.py", "import json\njson.loads('{')\n")
    told = run("explain", name, "1").stderr
    assert "mine.py:2, in <module>" in told, told


# -- what is missing --------------------------------------------------------------------------------


def test_a_missing_import_of_the_users_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text(
        "raise ModuleNotFoundError('No module named', name='jaxlib')\n"
    )
    found = CliRunner().invoke(main.cli, ["explain", str(tmp_path / "needs.py") + ":f", "f32[2]"])
    assert found.exit_code == 1 and "pip install 'dynaflow-xla[jax]'" in found.stderr, found.stderr
    (tmp_path / "other.py").write_text(
        "raise ModuleNotFoundError('No module named', name='mine')\n"
    )
    found = CliRunner().invoke(main.cli, ["explain", str(tmp_path / "other.py") + ":f", "f32[2]"])
    assert found.exit_code == 1 and "pip install" not in found.stderr


@pytest.mark.parametrize("free", [0, 1])
def test_doctor_notes_a_free_threaded_python(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    real = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: free if name == "Py_GIL_DISABLED" else real(name)
    )
    told = {check.name: check for check in checks.of_package()}
    assert ("GIL" in told) == bool(free)
    assert not free or told["GIL"].status == "note"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("options", [["--json"], []])
def test_output_that_cannot_be_written_is_told_in_a_sentence(options: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "dynaflow_xla", "cache", "size", *options]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode and "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_looks_at_the_caches_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_MB", "much")
    found = {check.name: check for check in checks.of_machine()}
    told = found["DYNAFLOW_XLA_CACHE_MB"]
    assert (told.status, told.found) == ("warn", "much")
    assert "must be a number of megabytes" in told.mend
