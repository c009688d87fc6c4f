"""The command line on functions of JAX and PyTorch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click", reason="the command line is made with it")
pytest.importorskip("rich", reason="the command line is made with it")

import jax
from click.testing import CliRunner, Result

import dynaflow_xla as dfx
from dynaflow_xla.cli import main, trace

MODEL = """
import jax, jax.numpy as jnp
import dynaflow_xla as dfx

def f(x, y):
    return jnp.sort(x) + jnp.sort(y)

fast = dfx.schedule(f, dfx.Branches(wide=False), lanes=2)

def make_args():
    return jnp.arange(64.0)[::-1], jnp.sin(jnp.arange(64.0))

class Aside(dfx.Branches):
    pass
"""

SCRIPT = """
import sys
import jax, jax.numpy as jnp
import dynaflow_xla as dfx

@dfx.schedule(strategy=dfx.Branches(wide=False), lanes=2)
def first(x, y):
    return jnp.sort(x) + jnp.sort(y)

second = dfx.schedule(lambda x: jnp.sin(x), "sequential")
inside = dfx.schedule(lambda x: jnp.cos(x), "sequential")

if __name__ == "__main__":
    x = jnp.arange(64.0)
    first(x, x[::-1])
    second(x)
    jax.jit(lambda a: inside(a) + 1)(x)
    print("args:", sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DYNAFLOW_XLA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "script.py").write_text(SCRIPT)


def run(*args: str) -> Result:
    found = CliRunner().invoke(main.cli, list(args))
    assert found.exit_code == 0, found.output
    return found


def test_explain() -> None:
    told = run("explain", "model.py:f", "f32[64]", "f32[64]", "--strategy", "branches",
               "--framework", "jax").stdout  # fmt: skip
    assert "strategy Branches()" in told and "model.py:6" in told
    data = json.loads(run("explain", "model.py:fast", "--args", "make_args", "--json").stdout)
    assert data["plan"]["lanes"] == 2 and data["graph"] and "lane" in data["text"]
    own = run("explain", "model.py:f", "--args", "make_args", "--strategy", "model.py:Aside")
    assert "strategy Branches(" in own.stdout


def test_keywords_of_the_function_that_its_inspectors_have_too(tmp_path: Path) -> None:
    own = "def g(x, deep, costs, rounds):\n    return jnp.sort(x) * costs + jnp.cos(x) * rounds\n"
    given = 'def given():\n    return {"x": jnp.arange(8.0), "deep": True, "costs": 2.0, "rounds": 3.0}\n'
    (tmp_path / "own.py").write_text(f"import jax.numpy as jnp\n{own}{given}")
    args = ["own.py:g", "--args", "given", "--strategy", "branches"]
    assert "strategy Branches()" in run("explain", *args).stdout
    run("why", *args, "--estimated")
    run("trace", *args, "--predicted")


def test_trace_of_a_function(tmp_path: Path) -> None:
    run("trace", "model.py:fast", "--args", "make_args", "-o", "t.json", "--predicted")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    told = run("trace", "model.py:fast", "--args", "make_args", "--json").stdout
    assert json.loads(told)["timelines"][0]["path"] == "trace.html"
    assert "<html" in (tmp_path / "trace.html").read_text()


def test_trace_of_a_script(tmp_path: Path) -> None:
    before = dfx.schedule
    told = run("trace", "script.py", "--predicted", "--", "one", "--two").stdout
    assert "args: ['one', '--two']" in told
    # What JAX traced has no values; the others were called.
    assert len(list(tmp_path.glob("trace-*.html"))) == 2 and "trace-1-first.html" in told
    assert dfx.schedule is before
    empty = tmp_path / "empty.py"
    empty.write_text("import dynaflow_xla\n")
    found = CliRunner().invoke(main.cli, ["trace", "empty.py"])
    assert found.exit_code == 1 and "called nothing that dfx.schedule" in found.stderr


def test_why() -> None:
    args = ["why", "model.py:fast", "--args", "make_args", "--estimated"]
    assert "original" in run(*args, "-o", "why.html").stdout
    data = json.loads(run(*args, "--json").stdout)
    assert data["reason"] == "too short" and not data["measured"]


def test_bench_and_compare(tmp_path: Path) -> None:
    made: Any = run(
        "bench", "model.py:f", "--args", "make_args", "--strategy", "branches", "--strategy", "nano_batch",
        "--rounds", "3", "-o", "a.json", "--json",
    )  # fmt: skip
    record = json.loads((tmp_path / "a.json").read_text())
    assert record == {k: v for k, v in json.loads(made.stdout).items() if k != "notes"}
    (case,) = record["cases"]
    assert {"jit", "branches"} <= set(case["samples_ms"]) and "jit" in case["plain"]
    assert "nano_batch" in case["failed"]  # it needs in_axes: said, and the rest goes on
    assert set(case["ratios"]) == {"branches"}
    assert "0 slower" in run("compare", "a.json", "a.json").stdout
    wrong = CliRunner().invoke(main.cli, ["bench", "--case", "none", "--framework", "jax"])
    assert wrong.exit_code == 1 and "there is no case 'none'; there are sorts" in wrong.stderr


@pytest.mark.parametrize("without", [["--lanes", "4096"], ["--against", "none"]])
def test_a_bench_without_anything_to_compare_ends_with_status_1(
    tmp_path: Path, without: list[str]
) -> None:
    given = [
        "bench",
        "model.py:f",
        "--args",
        "make_args",
        "--strategy",
        "branches",
        "--rounds",
        "3",
    ]
    done = CliRunner().invoke(main.cli, [*given, *without])
    assert done.exit_code == 1 and "failed: " in done.output, done.output


def test_bench_compares_numbers_of_lanes_and_the_report_draws_them(tmp_path: Path) -> None:
    run(
        "bench", "model.py:f", "--args", "make_args", "--strategy", "branches", "--rounds", "3",
        "--lanes", "1", "--lanes", "2", "-o", "a.json",
    )  # fmt: skip
    (case,) = json.loads((tmp_path / "a.json").read_text())["cases"]
    ways = {"branches, 1 lanes": 1, "branches, 2 lanes": 2}
    assert set(case["ratios"]) == set(ways) == set(case["timelines"])
    for way, lanes in ways.items():
        told = case["timelines"][way]
        assert told["kind"] == "measured" and {span[0] for span in told["spans"]} <= set(
            range(lanes)
        )
    run("report", "a.json", "-o", "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "branches, N lanes" in page and "measured" in page


def test_a_picture_of_a_plan_that_does_not_run_says_so(tmp_path: Path) -> None:
    run(
        "bench",
        "--case",
        "small",
        "--framework",
        "jax",
        "--strategy",
        "auto",
        "--rounds",
        "3",
        "-o",
        "a.json",
    )
    (case,) = json.loads((tmp_path / "a.json").read_text())["cases"]
    assert any("does not run" in note for note in case["timelines"]["auto"]["notes"])


def test_bench_of_a_built_in_case_in_pytorch() -> None:
    pytest.importorskip("torch")
    told = run("bench", "--case", "small", "--framework", "torch", "--strategy", "branches",
               "--against", "eager", "--rounds", "3").stdout  # fmt: skip
    assert "small" in told and "eager" in told and "branches" in told


def test_a_torch_model_from_a_factory(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n"
        "    def __init__(self): super().__init__(nn.Linear(4, 4), nn.ReLU())\n"
    )
    told = run("explain", "net.py:Net", "--factory", "f32[2,4]", "--strategy", "sequential").stdout
    assert "strategy Sequential(" in told


DONATES = """
import jax, jax.numpy as jnp, numpy as np
import dynaflow_xla as dfx

step = dfx.schedule(jax.jit(lambda x, y: jnp.sort(x) + jnp.sort(y), donate_argnums=0), "branches", lanes=2)

@dfx.schedule(strategy="branches", lanes=2)
def late(x):
    import beside
    return jnp.sort(x) * beside.TWO

@dfx.schedule(strategy="branches", lanes=2)
def moody(x):
    if len(state) > 1:
        raise KeyError("not again")
    state.append(x)
    return jnp.sort(x) + 1

state = []
x, y = jnp.arange(64.0)[::-1], np.arange(64.0, dtype=np.float32)
for _ in range(2):
    x = step(x, y)
late(y)
y[:] = np.nan
moody(x)
state += [0, 0]
"""


def test_trace_of_a_script_that_calls_two_functions_together(tmp_path: Path) -> None:
    """What runs them is scheduled, too, and none of the script's."""
    (tmp_path / "both.py").write_text(
        "import jax.numpy as jnp\nimport dynaflow_xla as dfx\n"
        "both = dfx.together(jnp.sin, jnp.cos, names=('s', 'c'))\n"
        "both(jnp.arange(30.0), jnp.arange(30.0))\n"
    )
    (call,) = trace.of_script(tmp_path / "both.py", [])
    assert call.name == "s_and_c"


def test_trace_of_a_script_that_copies_what_it_scheduled(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (tmp_path / "copies.py").write_text(
        "import copy\nimport torch\nimport dynaflow_xla as dfx\n"
        "fast = dfx.schedule(torch.nn.Linear(3, 3))\n"
        "copy.deepcopy(fast)(torch.ones(2, 3))\n"
    )
    assert [call.name for call in trace.of_script(tmp_path / "copies.py", [])] == ["Linear"]


def test_trace_of_a_script_whose_arguments_are_gone(tmp_path: Path) -> None:
    """Donated, or changed in place after the call; a function that fails leaves the others."""
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "donates.py").write_text(DONATES)
    (tmp_path / "aside" / "beside.py").write_text("TWO = 2\n")
    calls = {call.name: call for call in trace.of_script(tmp_path / "aside" / "donates.py", [])}
    (donated, seen), (late,) = calls["<lambda>"].args, calls["late"].args
    assert not donated.is_deleted() and seen.tolist() == late.tolist() == list(range(64))
    del sys.modules["beside"]
    found = CliRunner().invoke(main.cli, ["trace", "aside/donates.py", "-o", "t.json", "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert {"late", "<lambda>"} <= {one["name"] for one in told["timelines"]}, told


def test_one_function_that_cannot_be_traced_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trace.timeline

    def broken(found: Any, fast: Any, predicted: bool) -> Any:
        if found.name == "first":
            raise KeyError("not again")
        return real(found, fast, predicted)

    monkeypatch.setattr(trace, "timeline", broken)
    told = json.loads(run("trace", "script.py", "--predicted", "--json").stdout)
    assert [one["name"] for one in told["failed"]] == ["first"] and len(told["timelines"]) == 1
    assert "not again" in told["failed"][0]["error"]


def test_arrays_that_jax_would_narrow_are_refused() -> None:
    if jax.config.jax_enable_x64:
        pytest.skip("64-bit types are on")
    for dtype in ("f64", "s64", "u64", "c128"):
        args = ["explain", "model.py:f", f"{dtype}[4]", "f32[4]", "--framework", "jax"]
        found = CliRunner().invoke(main.cli, args)
        assert found.exit_code == 1 and "JAX_ENABLE_X64=1" in found.stderr, found.stderr


def test_bench_of_what_falls_back_has_a_batch_or_attributes(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import warnings\nimport dynaflow_xla as dfx\nfrom model import f, make_args\n"
        "class Falls(dfx.Branches):\n"
        "    def schedule(self, s):\n"
        "        warnings.warn('it fell back', dfx.FallbackWarning)\n"
        "        super().schedule(s)\n"
        "f.original = 'of the user'\n"
    )
    told = json.loads(
        run("bench", "odd.py:f", "--args", "make_args", "--strategy", "odd.py:Falls", "--strategy",
            "NanoBatch(2)", "--in-axes", "(0, 0)", "--out-axes", "0", "--against", "jit", "--rounds", "3",
            "--json").stdout
    )  # fmt: skip
    (case,) = told["cases"]
    assert set(case["samples_ms"]) == {"jit", "odd.py:Falls", "NanoBatch(2)"}, case["failed"]
    assert case["notes"] == {"odd.py:Falls": "it fell back"}
