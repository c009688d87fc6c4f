"""Many signatures: no decision or capture for each number, and no more is kept than a bound says."""

from __future__ import annotations

import enum
import gc
import weakref
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.frontends.torch.dynamo import graphs
from dynaflow_xla.frontends.torch.tuning import auto, call_signature
from dynaflow_xla.tuning import autotune

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.usefixtures("timeless")


class Lanes(dfx.Auto):
    """With one candidate."""

    def candidates(self, lanes: int, *, batched: bool = False) -> list[dfx.Strategy]:
        return [dfx.Branches(lanes=lanes)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def measure(runs: Any, **_: Any) -> autotune.Medians:
        found.append(list(runs))
        for run in runs.values():
            run()
        return autotune.Medians({name: [2.0 if name == "original" else 1.0] for name in runs})

    monkeypatch.setattr(autotune, "measure", measure)
    return found


def scaled(x: Any, scale: Any) -> Any:
    with dfx.mark("left"):
        a = torch.sort(x).values * scale
    with dfx.mark("right"):
        b = torch.sort(-x).values + scale
    return a + b


@pytest.mark.parametrize("numbers", [[0.1 + n for n in range(12)], list(range(2, 14))])
def test_numbers_that_change_decide_and_capture_nothing_new(
    numbers: list[Any], measured: list[Any]
) -> None:
    fast, x = (
        dfx.schedule(scaled, Lanes(min_cost_ns=0.0), lanes=2, backend="torch"),
        torch.randn(8, 64),
    )
    kept = fast._dfx_core
    with torch.no_grad():
        for number in numbers:
            torch.testing.assert_close(fast(x, number), scaled(x, number))
        child = kept.decision((x, numbers[0]), {}).child
        assert len(measured) == 1 and len(kept.decisions) == 1
        assert len(child.entries) == 2  # of the first number, and of any
        assert kept.decision((x, numbers[-1]), {}).child is child


class Kind(enum.IntEnum):
    A = 1
    B = 2


def test_what_a_decision_is_made_for() -> None:
    x = torch.randn(2)

    def of(value: Any) -> Any:
        return call_signature.of(None, (x, value), {})

    assert of(0.5) == of(0.7) and of(1j) == of(2j)
    different = [0.5, 1, 2, True, False, "a", "b", None, Kind.A, Kind.B, torch.float32, x]
    assert len({of(value) for value in different}) == len(different)


def test_decisions_are_bounded() -> None:
    made = auto.Decisions()
    made._made, made._once, made._kinds = Recent(5), Recent(5), Recent(5)
    for n in range(40):
        signature = call_signature.of(None, (torch.zeros(n), str(n % 20)), {})
        if made.of_other_sizes(signature) is None:
            made.put(signature, auto.Choice(None, "why"))
    assert len(made) <= 5 and len(made._once) <= 5 and len(made._kinds) <= 5


def test_captures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that forgets its compiled code, as ``torch.compiler.reset`` makes it do."""
    monkeypatch.setattr(graphs, "_MAX_ENTRIES", 2)
    fast, x = dfx.schedule(scaled, dfx.Branches(), lanes=2, backend="torch"), torch.randn(4, 8)
    with torch.no_grad():
        for turn in range(4):
            torch.testing.assert_close(fast(x, 0.5), scaled(x, 0.5))
            assert len(fast._dfx_core.entries) == min(turn + 1, 2)
            torch.compiler.reset()


class Net(torch.nn.Module):
    """Two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.a(x)) + torch.sin(self.b(x))


OPTIONS: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch"},
    "ffi": {"backend": "ffi"},
    "nano-batches": {"backend": "torch", "strategy": dfx.NanoBatch(2), "in_axes": 0},
}


@pytest.mark.parametrize("trains", [False, True], ids=["called", "trained"])
@pytest.mark.parametrize("way", OPTIONS)
def test_a_model_goes_with_its_schedule(way: str, trains: bool) -> None:
    if way == "ffi":
        pytest.importorskip("jax")
    model, x = Net(), torch.randn(4, 6)
    alive = weakref.ref(model)
    fast = dfx.schedule(model, **{"strategy": "branches", "lanes": 2} | OPTIONS[way])
    with torch.set_grad_enabled(trains):
        result = fast(x)
    if trains:
        result.sum().backward()
    del model, fast, result
    gc.collect()
    assert alive() is None


def test_a_backward_outlives_its_schedule() -> None:
    model = Net()
    for rows in (3, 4, 5):  # the second is captured for any number of rows
        x = torch.randn(rows, 6)
        fast = dfx.schedule(model.forward, "branches", lanes=2, backend="torch")
        for part in (x[:2], x):
            loss = fast(part).square().sum()
        del fast
        gc.collect()
        got = torch.autograd.grad(loss, list(model.parameters()))
        want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        torch.testing.assert_close(got, want)
