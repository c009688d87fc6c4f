"""Batch axes by parameter name, and results with named fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import dynaflow_xla as dfx


@dataclasses.dataclass
class Output:
    logits: Any
    loss: Any


pytree.register_dataclass(Output)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(
        self, ids: torch.Tensor, scale: torch.Tensor, mask: torch.Tensor | None = None, **extra: Any
    ) -> Output:
        x = torch.tanh(self.layer(ids)) * scale.sum()
        if mask is not None:
            x = x * mask
        for value in extra.values():
            x = x + value
        return Output(x, (x**2).mean())


NAMED = {"ids": 0, "mask": 0}
OUT = {"loss": dfx.Mean()}


def data() -> dict[str, torch.Tensor]:
    return {"ids": torch.randn(6, 8), "scale": torch.randn(4), "mask": torch.randn(6, 8)}


def check(model: Any, fast: Any, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        want, got = model(*args, **kwargs), fast(*args, **kwargs)
        torch.testing.assert_close(got.logits, want.logits)
        torch.testing.assert_close(got.loss, want.loss)
        names = {r.name for r in dfx.graph(fast, *args, **kwargs).regions}
    assert any(name.endswith("@1") for name in names), "it is split"


def split(model: Any, in_axes: Any, out_axes: Any = OUT) -> Any:
    return dfx.schedule(model, dfx.NanoBatch([4, 2]), in_axes=in_axes, out_axes=out_axes)


def test_a_mapping_holds_for_both_ways_of_passing() -> None:
    model, given = Model(), data()
    fast = split(model, NAMED)
    check(model, fast, **given)
    check(model, fast, *given.values())
    check(model, fast, given["ids"], scale=given["scale"], mask=given["mask"])
    check(model, fast, given["ids"], given["scale"])


def test_a_pair_of_places_and_names() -> None:
    model, given = Model(), data()
    check(model, split(model, ((), {"ids": 0, "mask": 0})), **given)
    fast = split(model, ((0, None), {"mask": 0}))
    check(model, fast, given["ids"], given["scale"], mask=given["mask"])
    more = {"bias": torch.randn(6, 8), "offset": torch.randn(8)}
    check(model, split(model, {**NAMED, "bias": 0}), **given, **more)


def test_training_by_keyword() -> None:
    model, given = Model(), data()
    fast = split(model, NAMED)
    grads = []
    for call in (model, fast):
        model.zero_grad()
        call(**given).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


def test_wrong_names() -> None:
    model, given = Model(), data()

    def function(ids: torch.Tensor) -> torch.Tensor:
        return ids * 2

    with pytest.raises(
        dfx.PlanError, match="in_axes names 'idz'; the function has extra, ids, mask"
    ):
        split(model, {"idz": 0})(**given)
    with pytest.raises(
        dfx.PlanError, match="out_axes names 'los'; the result has 'logits', 'loss'"
    ):
        split(model, NAMED, {"los": dfx.Mean()})(**given)
    with pytest.raises(dfx.PlanError, match="the result is a Tensor, which has no names"):
        split(function, {"ids": 0}, {"a": 0})(given["ids"])


def test_a_transformers_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    model = transformers.BertForSequenceClassification(config).eval()
    ids = torch.randint(0, 50, (4, 5))
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    named = {"input_ids": 0, "attention_mask": 0}
    fast = dfx.schedule(model, dfx.NanoBatch(2), in_axes=named, out_axes={"logits": 0})
    with torch.no_grad():
        for call in (
            lambda f: f(input_ids=ids, attention_mask=mask),
            lambda f: f(ids, mask),
            lambda f: f(ids, attention_mask=mask, return_dict=True),
        ):
            want, got = call(model), call(fast)
            assert type(got) is type(want)
            torch.testing.assert_close(got.logits, want.logits)
