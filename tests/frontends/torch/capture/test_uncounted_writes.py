"""Buffers that calls write: statistics of batch norm, whose writes autograd does not count, and others."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

STRATEGIES = ["sequential", "branches", dfx.NanoBatch(2)]


class Counting(nn.Module):
    """Counts its calls and keeps a running mean, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Any) -> Any:
        y = self.lin(x).tanh()
        with torch.no_grad():
            self.calls += 1
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return y * y


class Last(Counting):
    """Writes behind all that a backward needs, so what recomputes does not come there."""

    def forward(self, x: Any) -> Any:
        y = self.lin(x).tanh()
        y = y * y
        self.calls += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y


def made(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    if kind is not nn.BatchNorm1d:
        return kind()
    twice = nn.BatchNorm1d(8)
    return nn.Sequential(nn.Linear(6, 8), twice, nn.Tanh(), twice, nn.Linear(8, 6))


def rows(n: int = 8) -> Any:
    return torch.randn(n, 6)


def one(f: Any) -> None:
    f(rows()).square().mean().backward()


def two(f: Any) -> None:
    (f(rows()).sum() + f(rows(4)).sum()).backward()


def chained(f: Any) -> None:
    once = f(rows())
    f(torch.cat([once, once])).sum().backward()


def state(module: Any) -> list[Any]:
    return [*module.state_dict().values(), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(
    "steps", [(chained, chained), (one, chained), (one, chained, two, chained)]
)
def test_calls_between_a_forward_and_its_backward(strategy: Any, steps: Any) -> None:
    """The original runs some of them, and saves statistics that plans of the others write."""
    models = made(nn.BatchNorm1d), dfx.schedule(made(nn.BatchNorm1d), strategy)
    for model in models:
        torch.manual_seed(1)
        for step in steps:
            step(model)
    for want, got in zip(*map(state, models), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_looking_at_a_plan_between_a_forward_and_its_backward() -> None:
    model = made(nn.BatchNorm1d)
    fast = dfx.schedule(model, "branches")
    fast(rows()).sum().backward()
    before = [x.clone() for x in model.state_dict().values()]
    loss = model(rows()).sum()
    after = [x.clone() for x in model.state_dict().values()]
    dfx.verify(fast, rows(4))
    dfx.profile(fast, rows(4))
    loss.backward()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, model.state_dict().values(), strict=True))


def test_what_the_user_writes_is_counted() -> None:
    """A backward that reads what was written is refused, as the original's is."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x: Any) -> Any:
            self.scale.add_(1.0)
            return x

    scaled, w = Scaled(), torch.ones(6, requires_grad=True)
    fast = dfx.schedule(scaled, "branches", lanes=2)
    product = w * scaled.scale
    fast(rows())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, Counting, Last])
def test_a_checkpoint_around_writes_as_often(kind: Any, strategy: Any, reentrant: bool) -> None:
    """What recomputes ends as soon as all is there that the backward needs."""
    models = made(kind), dfx.schedule(made(kind), strategy)
    for model in models:
        torch.manual_seed(1)
        for _ in range(2):
            x = rows().requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    for want, got in zip(*map(state, models), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["branches", dfx.NanoBatch(2)], ids=str)
def test_statistics_as_an_argument_after_another_tensor(strategy: Any) -> None:
    """No guard of PyTorch's tells the two apart, and the function reads what batch norm wrote."""

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Any, scale: Any) -> Any:
            return self.norm(x) * scale.mean()

    one, two, x = Read(), Read(), rows()
    fast = dfx.schedule(one, strategy, in_axes=(0, None))
    for given in "other", "mean", "mean", "other", "mean":
        a, b = (
            (torch.ones(6),) * 2
            if given == "other"
            else (one.norm.running_mean, two.norm.running_mean)
        )
        torch.testing.assert_close(fast(x, a), two(x, b))
        torch.testing.assert_close(one.norm.running_mean, two.norm.running_mean)
