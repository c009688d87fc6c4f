"""The benchmark against what users would pick instead: ways are compared, a peer that fails is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("rich", reason="the table is made with it")
pytest.importorskip("jax", reason="what is shared with the other benchmarks needs it")

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("peers", "measure", "environment", "records"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import peers

    return peers


def test_parts_by_hand_are_the_model(peers: Any) -> None:
    for model in peers.models():
        with torch.no_grad():
            want = model.module(*model.args)
            (run, _), *others = peers.by_hand(model).values()
            assert not others and torch.allclose(run(), want, atol=1e-5), model.name


def test_what_fails_or_differs_is_told_and_the_rest_goes_on(
    peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def eager(model: Any) -> Any:
        return {"eager": (lambda: model.module(*model.args), 1)}

    def broken(_: Any) -> Any:
        raise RuntimeError("no operator GRU\nand more")

    def wrong(model: Any) -> Any:
        return {"wrong": (lambda: model.module(*model.args) + 1, 1)}

    kinds = {
        "a": (eager, "torch"),
        "b": (broken, "torch"),
        "c": (wrong, "torch"),
        "d": (eager, "no_such"),
    }
    monkeypatch.setattr(peers, "PEERS", kinds)
    monkeypatch.setattr(peers, "ours", lambda model: {"ours": eager(model)["eager"]})
    model = next(m for m in peers.models() if m.name == "ensemble of 4 MLPs")
    with torch.no_grad():
        made = peers.study(model, rounds=2)
    assert made["failed"]["b"] == "RuntimeError: no operator GRU"
    assert "differs from eager" in made["failed"]["wrong"]
    assert made["failed"]["d"] == "no_such is not installed"
    assert set(made["samples_ms"]) == {"ours", "eager"} and list(made["ratios"]["ours"]) == ["a"]
    record = {"cases": [made]}
    assert peers.table(record).row_count == 1
