"""The benchmark against what users would pick instead: models are the same, a peer that fails is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
jax = pytest.importorskip("jax", reason="every model has a form in JAX")
np = pytest.importorskip("numpy")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CASES = re.findall(r'"([\w-]+)": _', (BENCHMARKS / "peers" / "cases.py").read_text())


@pytest.fixture
def peers() -> Any:
    import peers
    from peers import cases, compare, ways  # noqa: F401 - now attributes of the package

    return peers


def test_there_are_enough_models(peers: Any) -> None:
    assert list(peers.cases.CASES) == CASES and len(CASES) >= 12


@pytest.mark.parametrize("name", CASES)
def test_both_forms_and_the_parts_are_the_same_model(peers: Any, name: str) -> None:
    model = peers.cases.make(name)
    fn, args = model.jax_function()
    with torch.no_grad():
        want = model.module(*model.args)
        assert want.abs().max() > 1e-3
        parts = [p.module(*[model.args[i] for i in p.takes]) for p in model.parts]
        torch.testing.assert_close(model.join(parts, *model.args), want)
        torch.testing.assert_close(model.marked(*model.args), want)
    got = torch.from_numpy(np.array(jax.jit(fn)(*args)))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    if model.rows:
        with torch.no_grad():
            halves = [model.module(*chunk) for chunk in peers.ways._chunks(model)]
        torch.testing.assert_close(torch.cat(halves), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["towers", "prefill"])
def test_threads_by_hand_are_the_model(peers: Any, name: str) -> None:
    model = peers.cases.make(name)
    with torch.no_grad():
        want = model.module(*model.args)
        for _, make in peers.ways.by_hand(model):
            way = make()
            torch.testing.assert_close(way.value(way.run()), want, rtol=1e-3, atol=1e-4)


def test_what_fails_or_differs_is_told_and_the_rest_goes_on(
    peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = peers.ways.Way

    def eager(model: Any) -> Any:
        yield "eager", lambda: way(lambda: model.module(*model.args), "sequential")

    def broken(_: Any) -> Any:
        raise RuntimeError("no operator GRU\nand more")
        yield

    def half_broken(model: Any) -> Any:
        def fail() -> Any:
            raise ValueError("no such split")

        yield "bad split", fail
        yield "good split", lambda: way(lambda: model.module(*model.args), "parallel")

    def wrong(model: Any) -> Any:
        yield "wrong", lambda: way(lambda: model.module(*model.args) + 1, "sequential")
        yield "shape", lambda: way(lambda: model.module(*model.args)[:1], "sequential")
        yield "nan", lambda: way(lambda: model.module(*model.args) * float("nan"), "sequential")

    def ours(model: Any) -> Any:
        yield "ours", lambda: way(lambda: model.module(*model.args), "parallel")

    kinds = {
        "a": (eager, "torch"), "b": (broken, "torch"), "c": (half_broken, "torch"),
        "d": (wrong, "torch"), "e": (eager, "no_such"),
    }  # fmt: skip
    monkeypatch.setattr(peers.ways, "PEERS", kinds)
    monkeypatch.setattr(peers.ways, "OURS", {"torch": ours})
    with torch.no_grad():
        made = peers.compare.study(peers.cases.make("ensemble"), rounds=2)
    assert made["failed"]["b"] == "RuntimeError: no operator GRU"
    assert made["failed"]["bad split"] == "ValueError: no such split"
    assert "differs by" in made["failed"]["wrong"] and "differs by nan" in made["failed"]["nan"]
    assert "has shape" in made["failed"]["shape"]
    assert made["failed"]["e"] == "no_such is not installed"
    assert set(made["samples_ms"]) | set(made["slow_ms"]) == {"ours", "eager", "good split"}
    told = peers.compare.summary(made | {"slow_ms": {}})
    assert told["ours"] == "ours" and set(told["against"]) <= {"a", "c"}
    assert "| ensemble of 4 |" in peers.compare.markdown({"cases": [made]})


def test_a_case_that_crashes_is_told(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers.compare.sys, "executable", "/bin/false")
    made = peers.compare.in_process("ensemble", 1)
    assert made["failed"]["all"].startswith("status 1")
    assert "ensemble | failed" in peers.compare.markdown({"cases": [made]})


def test_a_run_goes_on_where_the_last_one_stopped(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def case(name: str, rounds: int) -> Any:
        ran.append(name)
        return {
            "case": name,
            "name": name,
            "failed": {},
            "peers": {},
            "modes": {},
            "samples_ms": {},
        }

    monkeypatch.setattr(peers.compare, "in_process", case)
    out = tmp_path / "made.json"
    for names in (["clip"], ["clip", "sorts"]):
        words = [word for name in names for word in ("--case", name)]
        monkeypatch.setattr(peers.compare.sys, "argv", ["compare.py", *words, "-o", str(out)])
        peers.compare.main()
    assert ran == ["clip", "sorts"]
    assert [x["case"] for x in json.loads(out.read_text())["cases"]] == ran


@pytest.mark.parametrize("name", ["towers", "guidance"])
def test_streams_of_onnx_runtime_are_the_lanes_of_the_plan(
    peers: Any, name: str, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    model = peers.cases.make(name)
    with peers.ways.quiet():
        data = peers.ways.to_onnx(peers.ways.WithParts(model), model.args)
        made = peers.ways.partition(model, data, str(tmp_path))
    left, right = made["streams"]
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    assert sorted(left + right) == sorted(node.name for node in nodes)
    makers = {out: node.name for node in nodes for out in node.output}
    # The parts do not need each other: only what joins them reads the other stream.
    crossing = {
        node.name
        for node in nodes
        for x in node.input
        if x in makers and (makers[x] in left) != (node.name in left)
    }
    assert 1 <= len(crossing) <= 2 and min(len(left), len(right)) > 0
