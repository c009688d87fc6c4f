"""Modules that count their calls, and numbers that change: no capture and no plan for each."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch")

CALLS = 8


class Counting(torch.nn.Module):
    """Counts its calls twice, and tells how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.calls = 0
        self.twice = {"calls": 5}

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.twice["calls"] += 2
        return self.layer(x).relu(), self.calls


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("strategy", ["branches", dfx.NanoBatch(2)], ids=str)
def test_a_module_that_counts(strategy: Any, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaflow_xla.frontends.torch.signature.batched import BatchedGraph

    planned = []
    make = BatchedGraph._make

    def counted(self: Any, values: Any) -> Any:
        planned.append(values)
        return make(self, values)

    monkeypatch.setattr(BatchedGraph, "_make", counted)
    model, plain = Counting(), Counting()
    plain.load_state_dict(model.state_dict())
    fast = dfx.schedule(model, strategy=strategy)
    with torch.set_grad_enabled(grad):
        for number in range(CALLS):
            x = torch.randn(4, 16)
            (got, count), (want, other) = fast(x), plain(x)
            torch.testing.assert_close(got, want)
            assert type(count) is int and count == other == number + 1
            assert (model.calls, model.twice) == (plain.calls, plain.twice)
            if grad:
                got.sum().backward()
                want.sum().backward()
                torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad)
    # The first call's integers are constants of its capture, those of the second are open.
    assert len(planned) <= 2 * (1 + grad)


def test_a_counter_that_is_read() -> None:
    class Warming(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def forward(self, x: Any) -> Any:
            self.step += 1
            return x * min(1.0, self.step / 4) + self.step

    for strategy in ("branches", dfx.NanoBatch(2)):
        model, plain = Warming(), Warming()
        fast = dfx.schedule(model, strategy=strategy)
        for _ in range(CALLS):
            x = torch.randn(4, 16)
            torch.testing.assert_close(fast(x), plain(x))
            assert model.step == plain.step
