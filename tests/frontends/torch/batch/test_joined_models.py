"""Models that mix rows, split, from ``benchmarks/studies/joins.py``: results and gradients as before."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from studies import joins  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

MODELS = dict(joins.torch_models())
JOINED = {
    "eager": "calls {}Experts.forward", "CLIP": "joined: mm at", "ResNet": "batch_norm",
    "contrastive": "combines every row of the batch with every other row",
}  # fmt: skip
"""What is joined of models with this in their name; nothing of the others."""


@pytest.mark.parametrize("split", [2, [5, 4, 3]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_equal_with_gradients(name: str, split: Any) -> None:
    if split == 2 and "_mm" in name:
        pytest.skip("as in three parts")
    shown = joins.show_torch(name, MODELS[name], split)
    assert "equal, gradients too" in shown.outcome and not shown.outcome.endswith(
        "; 0 graphs split"
    )
    wanted = [text.format(name.split()[0]) for word, text in JOINED.items() if word in name]
    told = "\n".join(shown.joined)
    assert all(text in told for text in wanted), told
    assert wanted or not shown.joined, told
