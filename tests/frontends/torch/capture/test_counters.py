"""Modules that count their calls, and numbers that change: no capture and no plan for each."""

from __future__ import annotations

from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch")

CALLS = 8


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What nano-batches are planned for in a test."""
    from dynaflow_xla.frontends.torch.signature.batched import BatchedGraph

    made_for: list[Any] = []
    make = BatchedGraph._make

    def counted(self: Any, values: Any) -> Any:
        made_for.append(values)
        return make(self, values)

    monkeypatch.setattr(BatchedGraph, "_make", counted)
    return made_for


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
def test_a_module_that_counts(strategy: Any, grad: bool, planned: list[Any]) -> None:
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


class Scaled(torch.nn.Module):
    """Computes with the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.layer(x) * self.calls + 1 / (self.calls + 2)


def _own_module(x: Any, n: int) -> Any:
    raise NotImplementedError  # the number is the module's own


COMPUTED: dict[str, Any] = {
    "scalars": lambda x, n: x * n + torch.exp(-x / (n + 1)),
    "floats": lambda x, n: x * (0.5 / (n + 1)) + 0.9**n,
    "powers": lambda x, n: (x.abs() + 1) ** (1 / (n + 2)),
    "compared": lambda x, n: torch.where(x > n - 3, x, x * 2).clamp(min=-n),
    "a fill": lambda x, n: x + torch.full((16,), 2.0) * n,
    "integers": lambda x, n: (x * 10).int() % (n + 1) + x * (n // 2) * (n % 3),
    "in products": lambda x, n: torch.addcmul(x, x, x, value=n),
    "nothing": lambda x, n: torch.sin(x),
    "module": _own_module,
}
"""Where a number is an operand, and no more."""

OTHERWISE: dict[str, Any] = {
    "a part": lambda x, n: x[:, n % 4 :].sum(1) * n,
    "a position": lambda x, n: torch.roll(x, n, 1) + n,
    "a size": lambda x, n: torch.cat([x, x.new_zeros(x.shape[0], n + 1)], 1) * n,
    "a branch": lambda x, n: x * n if n < 3 else x - n,
    "with the rows": lambda x, n: x * (n + x.shape[0]),
    "another number": lambda x, n: torch.add(x, x, alpha=n),
    "a total": lambda x, n: (x - x.mean(0)) * n,
    "zero alone": lambda x, n: x.sum(0, keepdim=True) * n + x,
}
"""Where it is more, or what it is makes a difference."""


@pytest.mark.parametrize("grad", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("name", [*COMPUTED, *OTHERWISE])
def test_numbers_that_are_operands(name: str, grad: bool, planned: list[Any]) -> None:
    """A plan reads them at each call; where it cannot, each has its own."""
    if name == "module":
        model, plain = Scaled(), Scaled()
        plain.load_state_dict(model.state_dict())
        fast, fn = dfx.schedule(model, dfx.NanoBatch([5, 3]), in_axes=0), plain
    else:
        fn = (COMPUTED | OTHERWISE)[name]
        fast = dfx.schedule(fn, dfx.NanoBatch([5, 3]), in_axes=(0, None))
    before = 0
    for number in range(CALLS):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        mine, theirs = x.clone().requires_grad_(grad), x.clone().requires_grad_(grad)
        given = () if name == "module" else (number,)
        got, want = fast(mine, *given), fn(theirs, *given)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        if grad:
            got.square().sum().backward()
            want.square().sum().backward()
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)
        if number == 2:
            before = len(planned)
    if name in COMPUTED and (name, grad) != (
        "powers",
        True,
    ):  # PyTorch captures a power's for one exponent
        assert len(planned) == before


def test_a_plan_for_each_number_is_told() -> None:
    fast = dfx.schedule(OTHERWISE["another number"], dfx.NanoBatch(2), in_axes=(0, None))
    x = torch.randn(8, 16)
    with pytest.warns(dfx.FallbackWarning, match="16 values of n.*pass it as a tensor") as told:
        for number in range(24):
            fast(x, number)
    assert len(told) == 1
    assert "16 values of n" in dfx.explain(fast, x, 23)
    fast = dfx.schedule(COMPUTED["scalars"], dfx.NanoBatch(2), in_axes=(0, None))
    for number in range(24):
        fast(x, number)
