"""Decoding token by token: a cache that grows, one of fixed size, whole and in nano-batches."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.frontends.torch.native import entry, nano_batches
from dynaflow_xla.frontends.torch.signature import batched

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn, F = torch.nn, torch.nn.functional


class Attention(nn.Module):
    """Attention over a cache of keys and values, each ``[B, heads, T, width]``."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def parts(self, x: Any) -> Any:
        return (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))


class Growing(Attention):
    def forward(self, x: Any, k: Any, v: Any) -> Any:
        q, new_k, new_v = self.parts(x)
        k, v = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2)), k, v


class Static(Attention):
    def forward(self, x: Any, k: Any, v: Any, at: Any) -> Any:
        q, new_k, new_v = self.parts(x)
        k.index_copy_(2, at, new_k)
        v.index_copy_(2, at, new_v)
        mask = (torch.arange(k.shape[2]) <= at)[None, None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


def strategy_options(split: bool, axes: Any) -> dict[str, Any]:
    strategy = dfx.NanoBatch(2) if split else dfx.Branches(lanes=2)
    return {"strategy": strategy, "in_axes": axes if split else None, "lanes": 2}


def grow(call: Any, steps: int, rows: int = 4) -> list[Any]:
    x = torch.linspace(-1, 1, rows * 16).reshape(rows, 1, 16)
    k = v = torch.zeros(rows, 2, 0, 8)
    seen = []
    with torch.no_grad():
        for _ in range(steps):
            x, k, v = call(x, k, v)
            seen.append(x)
    return [*seen, k, v]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "nano"])
def test_a_growing_cache_is_captured_once(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Growing().eval()
    fast = dfx.schedule(model, backend="torch", **strategy_options(split, 0))
    want = grow(model, 9)
    for g, w in zip(grow(fast, 9), want, strict=True):
        torch.testing.assert_close(g, w)
    captures = len(fast._dfx_core.entries)
    assert captures <= 3  # an empty cache, one of one row, and all other sizes

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("planned again")

    monkeypatch.setattr(entry, "planned_entry", refuse)
    monkeypatch.setattr(nano_batches, "planned_entry", refuse)
    for g, w in zip(grow(fast, 9), want, strict=True):  # another sequence, the same sizes
        torch.testing.assert_close(g, w)
    if not split:  # one plan serves all sizes, seen or not
        grow(fast, 14)
    assert len(fast._dfx_core.entries) == captures


def test_plans_of_sizes_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "_MAX_PLANS", 3)
    fast = dfx.schedule(
        lambda x: torch.tanh(x), dfx.NanoBatch(2), in_axes=0, lanes=2, backend="torch"
    )
    for rows in (2, 3, 4, 2, 5, 6):
        x = torch.randn(rows, 5)
        assert torch.equal(fast(x), torch.tanh(x))
    (graph,) = fast._dfx_core.entries
    assert [key[0] for key in graph._plans] == [2, 5, 6]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "nano"])
def test_a_static_cache_is_planned_once(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Static().eval()
    options = strategy_options(split, (0, 0, 0, None))
    fast = dfx.schedule(model, backend="torch", **options)
    caches = [torch.zeros(4, 2, 8, 8) for _ in range(4)]
    x = y = torch.linspace(-1, 1, 64).reshape(4, 1, 16)
    with torch.no_grad():
        for step in range(8):
            if step == 1:
                monkeypatch.setattr(entry, "planned_entry", None)
                monkeypatch.setattr(nano_batches, "planned_entry", None)
            at = torch.tensor([step])
            x, y = fast(x, caches[0], caches[1], at), model(y, caches[2], caches[3], at)
            torch.testing.assert_close(x, y)
            torch.testing.assert_close(caches[:2], caches[2:])
    assert len(fast._dfx_core.entries) == 1


@pytest.mark.parametrize("strategy", ["auto", "branches"])
def test_generate(strategy: str) -> None:
    """A model of transformers, scheduled inside: its cache of keys and values is an argument that grows."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (2, 5))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options)
    chosen = dfx.Auto(budget_s=1.0, min_cost_ns=0.0) if strategy == "auto" else strategy
    model.model = dfx.schedule(model.model, chosen, lanes=2)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **options), want)
