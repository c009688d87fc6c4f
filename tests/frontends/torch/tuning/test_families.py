"""``Auto`` measures models of transformers, whatever these change while they run."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from model_families import FAMILIES, decided  # noqa: E402

BRIEF = {"BERT", "ViT"}


@pytest.mark.filterwarnings("default::UserWarning")  # of Dynamo, about caches of functions
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in BRIEF else pytest.mark.slow) for n in FAMILIES]
)
def test_measured_with_the_same_results(name: str) -> None:
    choice = decided(name)
    assert "original" in choice.medians_ms and len(choice.medians_ms) > 1, choice.reason


def test_the_documents_list_all_families() -> None:
    page = Path(__file__).parents[4] / "docs" / "torch.md"
    rows = [line.split("|") for line in page.read_text().splitlines() if line.startswith("| ")]
    told = {row[1].strip(): row[3].strip() for row in rows if len(row) == 6}
    assert set(FAMILIES) <= set(told)
    assert not [name for name in FAMILIES if told[name] == "no"]
