"""Code in front of the first graph, which no capture holds: it runs as often as in the original."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

STRATEGIES = ["auto", dfx.Auto(min_cost_ns=0.0, budget_s=1.0), "branches", "sequential"]
NAMES = ["auto", "measured", "branches", "sequential"]
CALLS: list[str] = []


class Counting(nn.Module):
    """Writes a tensor, or a list of the user's, before anything is captured."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.register_buffer("seen", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(4))
        self.held = {"by name": [torch.zeros(())]}
        self.plain = torch.zeros(())

    @torch.compiler.disable
    def count(self) -> None:
        with torch.no_grad():
            if self.where == "global":
                CALLS.append(self.where)
            else:
                places = {"buffer": self.seen, "parameter": self.weight, "attribute": self.plain}
                places.get(self.where, self.held["by name"][0]).add_(1)

    def forward(self, x: Any) -> Any:
        self.count()
        held = self.held["by name"][0]
        return (x * self.weight).sort(0)[0] + (x + self.seen + held + self.plain).sort(1)[0]


def state(model: Any) -> list[Any]:
    return [*model.state_dict().values(), model.held["by name"][0], model.plain]


@pytest.mark.parametrize("where", ["buffer", "parameter", "container", "attribute"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
def test_tensors_are_written_once_a_call(strategy: Any, where: str) -> None:
    model, original = Counting(where), Counting(where)
    fast = dfx.schedule(model, strategy)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(6, 4)
            torch.testing.assert_close(fast(x), original(x), rtol=0, atol=0)
            torch.testing.assert_close(state(model), state(original), rtol=0, atol=0)
            dfx.explain(fast, x)
            torch.testing.assert_close(state(model), state(original), rtol=0, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
def test_what_cannot_be_put_back_happens_once(strategy: Any) -> None:
    fast = dfx.schedule(Counting("global"), strategy)
    CALLS.clear()
    for calls in (1, 2, 3):
        fast(torch.randn(6, 4))
        assert len(CALLS) == calls


@pytest.mark.parametrize(
    "of",
    [
        lambda m: m.forward,
        lambda m: lambda x: m(x),
        lambda m: functools.partial(torch.func.functional_call, m, {}),
    ],
    ids=["method", "closure", "partial"],
)
def test_explain_puts_back_modules_that_a_function_holds(of: Any) -> None:
    model = Counting("buffer")
    call = of(model)
    fast = dfx.schedule(call, "branches")
    x = torch.randn(6, 4)
    given = ((x,),) if isinstance(call, functools.partial) else (x,)
    with torch.no_grad():
        for calls in (1, 2):
            fast(*given)
            dfx.explain(fast, *given)
            assert model.seen == calls


def test_auto_says_why_it_measures_nothing() -> None:
    fast, x = dfx.schedule(Counting("buffer"), STRATEGIES[1]), torch.randn(6, 4)
    fast(x)
    text = dfx.explain(fast, x)
    assert "whatever the code in front of its first graph does, see" in text and __file__ in text


@pytest.mark.filterwarnings("ignore:no graph of 'BatchNorm1d' could be captured")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_statistics_of_a_layer_that_is_not_captured(strategy: Any, grad: bool) -> None:
    model = nn.BatchNorm1d(4, momentum=None)  # reads a number out of its count of batches
    original = copy.deepcopy(model)
    fast = dfx.schedule(model, strategy)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            x = torch.randn(6, 4)
            torch.testing.assert_close(fast(x), original(x))
            dfx.explain(fast, x)
            torch.testing.assert_close(model.state_dict(), original.state_dict())


def test_swa_statistics() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    averaged = torch.optim.swa_utils.AveragedModel(net)
    original = copy.deepcopy(averaged)
    data = [torch.randn(6, 8) for _ in range(4)]
    torch.optim.swa_utils.update_bn(data, dfx.schedule(averaged))
    torch.optim.swa_utils.update_bn(data, original)
    torch.testing.assert_close(averaged.state_dict(), original.state_dict())


def test_what_is_told_of_a_capture_is_no_code_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler of warnings of the user's runs in the midst of it."""
    told: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: told.append(str(message)))
    x = torch.nested.nested_tensor([torch.randn(n, 4) for n in (3, 5)], layout=torch.jagged)
    fast = dfx.schedule(nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        fast(x)
    assert [text for text in told if "nested tensor" in text]
    assert "in front" not in dfx.explain(fast, x)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
def test_what_the_original_refuses_is_told_by_it_alone(strategy: Any) -> None:
    """In calls and in ``explain``; the next call is right."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    fast, x = dfx.schedule(model, strategy), torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for asked in (fast, lambda y: dfx.explain(fast, y), fast):
            with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
                asked(torch.randn(4, 7))
        torch.testing.assert_close(fast(x), model(x))


class Renamed:
    """As the configurations of transformers: every attribute is looked up under its other name first."""

    other_names: dict[str, str] = {}

    def __init__(self) -> None:
        self.turns = 3

    def __getattribute__(self, key: str) -> Any:
        if key != "other_names" and key in super().__getattribute__("other_names"):
            key = self.other_names[key]
        return super().__getattribute__(key)


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.layer = Renamed(), nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        for _ in range(self.config.turns):
            x = self.layer(x).sort(0)[0] + x.sort(1)[0]
        return x


def test_what_guards_look_up_is_not_in_front() -> None:
    """From the second call on Dynamo reads the configuration before the function begins."""
    fast, x = dfx.schedule(Configured(), dfx.Auto(min_cost_ns=0.0)), torch.randn(512, 64)
    with torch.no_grad():
        fast(x)
        for _ in range(2):
            assert dfx.tune(fast, x, budget_s=60.0).medians_ms
            assert "in front of its first graph" not in dfx.explain(fast, x)


def test_tune_that_measures_nothing_leaves_what_was_measured() -> None:
    model, x = Configured(), torch.randn(512, 64)
    fast = dfx.schedule(model, dfx.Auto(min_cost_ns=0.0))
    with torch.no_grad():
        before = dfx.tune(fast, x, budget_s=60.0)
        handle = model.register_forward_hook(lambda *_: None)
        with pytest.warns(dfx.FallbackWarning, match="tune measured nothing of .* has hooks"):
            assert dfx.tune(fast, x, budget_s=60.0) == before
        handle.remove()
        assert str(before.reason) in dfx.explain(fast, x)
