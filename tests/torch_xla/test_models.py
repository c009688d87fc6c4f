"""Models through torch_xla: scheduled and original agree, scopes arrive, devices are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla
from torch import nn
from torch.nn import functional as F

import dynaflow_xla as dfx


class Block(nn.Module):
    """A pre-norm transformer block with rotary-free attention and a gated MLP."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 32), nn.Linear(width, 32)
        self.down = nn.Linear(32, width)

    def forward(self, x: Any) -> Any:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.self_attn(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.right = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Any) -> Any:
        return {"y": torch.softmax(self.left(x) * self.right(x), -1), "order": torch.argsort(x, -1)}


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Any) -> Any:
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).mean((2, 3))


MODELS = {
    "block": (Block, (2, 5, 16)),
    "towers": (Towers, (5, 6)),
    "convolutional": (Convolutional, (2, 3, 8, 8)),
}
STRATEGIES = [dfx.Sequential(), dfx.Branches()]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_values(name: str, strategy: Any) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().eval()
    fast = dfx.schedule(model, strategy=strategy)
    for seed in range(2):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=2e-5)
    assert dfx.verify(fast, x).max_abs < 1e-4
    program = dfx.schedule(torch.export.export(model, (x,), strict=False), strategy=strategy)
    torch.testing.assert_close(program(x), model(x), rtol=2e-4, atol=2e-5)


@torch.no_grad()
def test_scopes_classes_and_lines_arrive() -> None:
    model, x = Towers().eval(), torch.randn(5, 6)
    for rules in (
        [dfx.Scope("left"), dfx.Scope("right")],
        [dfx.Module("left"), dfx.Module("right")],
    ):
        fast = dfx.schedule(model, strategy=dfx.Branches(), rules=rules)
        regions = {r.name: r for r in dfx.graph(fast, x).regions}
        assert {"left", "right"} <= set(regions)
        torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=2e-5)
    by_class = dfx.schedule(model, strategy=dfx.Branches(), rules=[dfx.Module(nn.Linear)])
    assert sum(r.rule.startswith("Module") for r in dfx.graph(by_class, x).regions) == 4
    text = dfx.explain(fast, x)
    assert "StableHLO made by torch_xla" in text
    assert any(op.source and op.source.file == __file__ for op in dfx.graph(fast, x).graph.ops)


@torch.no_grad()
def test_parameters_are_read_at_each_call() -> None:
    model, x = nn.Linear(6, 4), torch.randn(3, 6)
    fast = dfx.schedule(model, strategy=dfx.Branches())
    fast(x)
    model.weight.mul_(2)
    torch.testing.assert_close(fast(x), model(x))


@torch.no_grad()
def test_wide_types() -> None:
    def f(i: Any, d: Any) -> Any:
        return i * 3, d / 3, torch.sort(i).values

    i, d = torch.randint(-(2**60), 2**60, (50,)), torch.randn(50, dtype=torch.float64)
    fast = dfx.schedule(f, strategy=dfx.Branches(), backend="ffi")
    for want, got in zip(f(i, d), fast(i, d), strict=True):
        assert want.dtype == got.dtype
        torch.testing.assert_close(got, want, rtol=1e-15, atol=0)


@torch.no_grad()
def test_models_on_an_xla_device() -> None:
    device = torch_xla.device()
    model = Towers().eval()
    x = torch.randn(5, 6)
    want = model(x)
    model = model.to(device)
    fast = dfx.schedule(model, strategy=dfx.Branches())
    got = fast(x.to(device))
    assert got["y"].device.type == "xla"
    torch.testing.assert_close({k: v.cpu() for k, v in got.items()}, want, rtol=2e-4, atol=2e-5)


@torch.no_grad()
def test_keyword_arguments_and_functions() -> None:
    def f(a: Any, *, b: Any, scale: float) -> Any:
        return (a @ b) * scale

    a, b = torch.randn(3, 4), torch.randn(4, 5)
    fast = dfx.schedule(f, strategy=dfx.Branches(), backend="ffi")
    torch.testing.assert_close(fast(a, b=b, scale=2.0), f(a, b=b, scale=2.0))


@torch.no_grad()
def test_profile_and_auto() -> None:
    model, x = Towers().eval(), torch.randn(5, 6)
    fast = dfx.schedule(model, strategy=dfx.Branches())
    assert dfx.profile(fast, x).spans and dfx.simulate(fast, x).spans
    torch.testing.assert_close(dfx.schedule(model)(x), model(x), rtol=2e-4, atol=2e-5)


def test_refusals() -> None:
    model, x = Convolutional(), torch.randn(2, 3, 8, 8)
    fast = dfx.schedule(model, strategy=dfx.Branches())
    with pytest.raises(dfx.UnsupportedError, match="no backward.*torch.no_grad"):
        fast(x)
    with torch.no_grad(), pytest.raises(dfx.UnsupportedError, match="running_mean.*eval mode"):
        fast(x)
    with pytest.raises(dfx.UnsupportedError, match="torch >= 2.11"):
        dfx.schedule(model, backend="torch")

    class Marked(nn.Module):
        def forward(self, v: Any) -> Any:
            with dfx.mark("here"):
                return v + 1

    with torch.no_grad(), pytest.raises(dfx.UnsupportedError, match="'here' would be lost"):
        dfx.schedule(Marked(), strategy=dfx.Branches())(x)


def test_another_forward_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Towers().eval(), torch.randn(3, 6)
    fast = dfx.schedule(model, strategy=dfx.Branches())
    with torch.no_grad():
        for forward in (Towers.forward, lambda self, x: self.left(x), Towers.forward):
            monkeypatch.setattr(Towers, "forward", forward)
            for _ in range(2):
                torch.testing.assert_close(fast(x), model(x))
