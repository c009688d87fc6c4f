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
from dynaflow_xla.frontends.torch.tuning import auto, call_signature, size_decisions
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
    made = size_decisions.Decisions()
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


def named(x: Any, name: str) -> Any:
    return scaled(x, float(len(name)))


def test_strings_that_are_new_at_every_call_are_decided_for_a_few_times(
    measured: list[Any],
) -> None:
    fast, x = (
        dfx.schedule(named, Lanes(min_cost_ns=0.0), lanes=2, backend="torch"),
        torch.randn(8, 64),
    )
    decisions = fast._dfx_core.decisions
    decisions._unused = Recent(2)
    with torch.no_grad():
        for name in "ab":
            torch.testing.assert_close(fast(x, name), named(x, name))
        assert len(measured) == 2
        with pytest.warns(dfx.errors.FallbackWarning, match="new signatures keep coming") as told:
            for name in "cdefg":
                torch.testing.assert_close(fast(x, name), named(x, name))
        assert len(told) == 1 and len(measured) == 2
        assert "the second call with one decides" in dfx.explain(fast, x, "g")
        torch.testing.assert_close(fast(x, "g"), named(x, "g"))
        assert len(measured) == 3 and fast._dfx_core.decision((x, "g"), {}).planned
        fast(x, "g")
        fast(x, "b")  # what came again counts no more: new ones are decided for at once
        fast(x, "h")
        assert len(measured) == 4


def test_sizes_that_come_again_and_again_are_decided_for_a_few_times(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_decisions, "_MOST_ALIKE", 2)
    monkeypatch.setattr(size_decisions, "_MOST_SIZES", 3)
    fast, x = (
        dfx.schedule(scaled, Lanes(min_cost_ns=0.0), lanes=2, backend="torch"),
        torch.randn(8, 64),
    )
    decisions = fast._dfx_core.decisions
    with torch.no_grad():
        for numbers, decided in ((range(32, 38), 2), (range(64, 68), 3), (range(128, 131), 3)):
            for _ in range(3):
                for number in numbers:
                    torch.testing.assert_close(fast(x, number), scaled(x, number))
            assert decisions.changes == decided
        assert "enough sizes like these were decided for" in dfx.explain(fast, x, 37)
        assert fast._dfx_core.decision((x, 130), {}).planned
        for number in (37, 130):
            dfx.tune(fast, x, number, budget_s=5.0)
        assert decisions.changes == 5 and "enough sizes" not in dfx.explain(fast, x, 37)


def test_the_same_tensors_again_run_the_original_until_another_decision(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def f(given: Any) -> Any:
        return scaled(given["3"], 2.0) + given["39"]

    fast = dfx.schedule(f, Lanes(min_cost_ns=1e9), lanes=2, backend="torch")
    given = {str(n): torch.randn(8, 64) for n in range(40)}
    core = fast._dfx_core
    with torch.no_grad():
        for _ in range(4):
            given["39"].add_(1.0)
            assert torch.equal(fast(given), f(given))
        assert core._known is not None
        given["3"] = torch.randn(2, 64, dtype=torch.float64)
        given["39"].resize_(1, 64)
        torch.testing.assert_close(fast(given), f(given))
        made = auto.Choice(core.with_strategy(dfx.Branches(lanes=2)), "told", candidate="lanes")
        core.decide(call_signature.of(f, (given,), {}), made)
        monkeypatch.setattr(core, "as_written", None)
        torch.testing.assert_close(fast(given), f(given))
