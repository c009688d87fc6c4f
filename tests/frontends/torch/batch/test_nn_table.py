"""Modules of ``torch.nn`` in nano-batches: each is proved, or refused for a reason that is known."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import nn_table  # noqa: E402  (needs torch)


def test_every_class_is_in_the_table() -> None:
    assert nn_table.uncovered() == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", nn_table.MODULES)
def test_training(name: str) -> None:
    """Values and gradients are the original's, without a comparison on the first call."""
    told = nn_table.outcome(nn_table.MODULES[name], training=True)
    wanted = nn_table.REFUSED.get(("training", name))
    assert told == "proved" if wanted is None else wanted in told, told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["RReLU", "MaxPool1d", "InstanceNorm2d", "BatchNorm2d", "LogSigmoid", "PReLU", "Bilinear"],
)
def test_inference(name: str) -> None:
    assert nn_table.outcome(nn_table.MODULES[name], training=False) == "proved"
