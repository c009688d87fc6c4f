"""Classes that change after a module was scheduled: another ``forward``, a parametrization."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from round_robin import RoundRobin

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

from torch.nn.utils import parametrize  # noqa: E402
from torch.nn.utils.parametrizations import weight_norm  # noqa: E402

X = torch.randn(6, 8)


@pytest.mark.parametrize("strategy", [RoundRobin(), dfx.NanoBatch(2), dfx.Auto(min_cost_ns=0.0)])
@pytest.mark.parametrize("patched", ["own", "of PyTorch"])
def test_another_forward_of_a_submodules_class(
    patched: str, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.sin() * 2

    module = nn.Sequential(nn.Linear(8, 8), Scaled(), nn.Linear(8, 8))
    cls = Scaled if patched == "own" else nn.Linear
    own = cls.forward
    fast = dfx.schedule(module, strategy, in_axes=0)
    for forward in (own, lambda self, x: own(self, x) * 5, lambda self, x: x + 1, own):
        monkeypatch.setattr(cls, "forward", forward)
        for _ in range(2):
            torch.testing.assert_close(fast(X), module(X))


def test_a_forward_that_a_class_inherits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        """Has its base's."""

    module = nn.Sequential(Own(8, 8), nn.Tanh())
    fast = dfx.schedule(module, RoundRobin())
    assert torch.equal(fast(X), module(X))
    monkeypatch.setattr(Own, "forward", lambda self, x: x * 3)
    assert torch.equal(fast(X), (X * 3).tanh())


def test_a_forward_of_a_class_that_a_lazy_module_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.LazyLinear(8), nn.Tanh())
    fast = dfx.schedule(module, RoundRobin())
    fast(X), fast(X)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x * 3)
    assert torch.equal(fast(X), (X * 3).tanh())


def test_another_forward_where_other_modules_came(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    fast = dfx.schedule(module, RoundRobin())
    fast(X)
    module[0] = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: x * 3)
    for _ in range(20):
        torch.testing.assert_close(fast(X), module(X))
    assert len(fast._dfx_core._renewed) == 1


@pytest.mark.parametrize("of", ["scheduled", "original"])
def test_a_parametrization_of_what_is_scheduled(of: str) -> None:
    module = nn.Linear(8, 8)
    fast = dfx.schedule(module, "branches")
    before = fast(X)
    weight_norm(fast if of == "scheduled" else module)
    assert torch.equal(fast.weight, module.weight) and fast.__class__ is type(module)
    assert isinstance(fast, nn.Linear) and parametrize.is_parametrized(module)
    torch.testing.assert_close(fast(X), before)
    fast.weight = torch.randn(8, 8)
    assert "weight" not in vars(module)
    assert torch.equal(fast(X), module(X)) and not torch.equal(fast(X), before)
    assert torch.equal(copy.deepcopy(fast)(X), module(X))
    parametrize.remove_parametrizations(fast if of == "scheduled" else module, "weight")
    assert fast.weight is module.weight and type(module) is nn.Linear
    assert torch.equal(fast(X), module(X))


def test_what_nobody_has_is_the_originals_error() -> None:
    fast = dfx.schedule(nn.Linear(8, 8), "branches")
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'foo'"):
        fast.foo  # noqa: B018
    fast.foo = 3
    assert fast.original.foo == 3
    del fast.foo
    assert not hasattr(fast.original, "foo")
