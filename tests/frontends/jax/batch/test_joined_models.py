"""Experts and contrastive losses, split in parts, from ``benchmarks/studies/joins.py``; gradients, too."""

from __future__ import annotations

from typing import Any

import pytest
from studies import joins

pytestmark = pytest.mark.usefixtures("quick_to_compile")

MODELS = dict(joins.jax_models())
JOINED = {"one_hot().sum": "", "capacity": "cumsum at", "contrastive": "dot_general at"}
"""What is joined of models with this in their name; nothing of the others."""


@pytest.mark.parametrize("split", [2, [5, 4, 3]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_equal_with_gradients(name: str, split: Any) -> None:
    shown = joins.show_jax(name, MODELS[name], split)
    wanted = [text for word, text in JOINED.items() if word in name]
    told = "\n".join(shown.joined)
    assert all(text in told for text in wanted), told
    assert wanted or not shown.joined, told
