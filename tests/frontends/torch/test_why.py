"""``why`` for PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch")


class _Towers(torch.nn.Module):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        with dfx.mark("left"):
            a = torch.sort(x, dim=0).values
        with dfx.mark("right"):
            b = torch.sort(x * 2, dim=0).values
        return self.drop(self.norm(a + b))


def test_a_model_keeps_its_state() -> None:
    torch.manual_seed(0)
    model = _Towers().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    fast = dfx.schedule(model, dfx.Branches(wide=False), lanes=2)
    found = dfx.why(fast, torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), rounds=2)
    assert found.measured and found.original_ns > 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    pair = next(p for p in found.pairs if {p.first, p.second} >= {"left"})
    assert pair.reason in str(found)


def test_reasons_by_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaflow_xla.machine.cores", lambda: 2)

    def sorts(x: Any, y: Any) -> Any:
        return torch.sort(x).values + torch.sort(y).values

    def chain(x: Any, y: Any) -> Any:
        with dfx.mark("first"):
            x = torch.sort(x).values
        with dfx.mark("second"):
            return torch.sort(torch.sin(x) + y).values

    args = torch.randn(1 << 17), torch.randn(1 << 17)
    strategy = dfx.Branches(wide=False)
    assert dfx.why(dfx.schedule(sorts, strategy, lanes=2), *args, measure=False).gains
    found = dfx.why(dfx.schedule(chain, strategy, lanes=2), *args, measure=False)
    assert found.reason == "dependency", found
