"""Hooks on saved tensors, those of checkpoints, too: at every call they see what the user's graph keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dynaflow_xla as dfx

CALLS = 12
"""A recurrent layer runs now on the caller's thread, now on a lane: the first two calls might be alike."""


STEPS = 30


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.GRU(32, 32), nn.GRU(32, 32)

    def forward(self, x: Any) -> Any:
        return self.a(x)[0] + self.b(x.flip(0))[0]


class Experts(nn.Module):
    """Called as it is inside of a split: which rows an expert gets is known when it runs."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.writes = writes
        self.gate, self.up = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Any) -> Any:
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.up):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows) > 0:
                made = expert(x[rows])
                for _ in range(STEPS):
                    made = made.sin()
                if self.writes:
                    made = made.exp()
                    made.mul_(0.5)
                out = out.index_add(0, rows, made)
        return out


class Mixed(nn.Module):
    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.before, self.experts = nn.Linear(8, 8), Experts(writes)

    def forward(self, x: Any) -> Any:
        return self.experts(self.before(x).relu()).cos()


def kept(fast: Any, x: Any) -> int:
    """How many tensors a call gives to the hooks."""
    seen: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        fast(x).sum().backward()
    return len(seen)


GIVEN = [
    pytest.param("sequential", {"rules": [dfx.Module(nn.GRU)]}, id="sequential"),
    pytest.param(dfx.Branches(), {"lanes": 2, "rules": [dfx.Module(nn.GRU)]}, id="branches"),
    pytest.param(dfx.NanoBatch(2), {"in_axes": 1, "out_axes": 1}, id="nano"),
]


@pytest.mark.parametrize(("strategy", "options"), GIVEN)
def test_recurrent_layers(strategy: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = TwoLayers()
    fast = dfx.schedule(model, strategy, **options)
    x = torch.randn(30, 4, 32, requires_grad=True)
    steps = kept(model, x)
    found = {kept(fast, x) for _ in range(CALLS)}
    assert (
        len(found) == 1 and found.pop() < steps / 10
    )  # a layer keeps what it is given, no time steps
    want = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    for _ in range(CALLS):
        y = checkpoint(fast, x, use_reentrant=False)
        got = torch.autograd.grad(y.sum(), [x, *model.parameters()])
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore:.*called as it is:dynaflow_xla.FallbackWarning")
def test_calls_that_are_made_as_they_are() -> None:
    torch.manual_seed(0)
    model = Mixed()
    fast = dfx.schedule(model, dfx.NanoBatch(2), in_axes=0)
    x = torch.randn(12, 8, requires_grad=True)
    assert "calls Experts.forward" in dfx.explain(fast, x)
    found = {kept(fast, x) for _ in range(CALLS)}
    assert len(found) == 1 and found.pop() < STEPS < kept(model, x)
    want = torch.autograd.grad(model(x).sum(), [x, *model.experts.up.parameters()])
    for _ in range(CALLS):
        y = checkpoint(fast, x, use_reentrant=False)
        got = torch.autograd.grad(y.sum(), [x, *model.experts.up.parameters()])
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore:.*called as it is:dynaflow_xla.FallbackWarning")
def test_what_is_kept_inside_is_looked_at_whether_it_was_written() -> None:
    # Of what goes through hooks autograd does not look: gradients would be wrong without a word.
    fast = dfx.schedule(Mixed(writes=True), dfx.NanoBatch(2), in_axes=0)
    x = torch.randn(12, 8, requires_grad=True)
    assert "calls Experts.forward" in dfx.explain(fast, x)
    for hook in (lambda t: t, lambda t: t.clone() if t.is_floating_point() else t):
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(hook, lambda t: t):
                y = fast(x)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
