"""Plans that are the original program: calls after the first run the original itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from round_robin import Mixed

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

from dynaflow_xla.frontends.torch.core import Core  # noqa: E402

pytestmark = pytest.mark.wide

SAYS = "all calls but the first run the original itself"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.drop(torch.relu(self.up(x))))


@pytest.fixture(autouse=True)
def plans_run() -> None:
    """Here the original runs in the place of such plans."""


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets the callable of each call that runs a plan, or captures one."""
    found: list[Any] = []
    invoke = Core._invoke

    def counted(core: Core, args: Any, kwargs: Any) -> Any:
        found.append(core.original)
        return invoke(core, args, kwargs)

    monkeypatch.setattr(Core, "_invoke", counted)
    return found


def test_the_second_call_runs_the_original(planned: list[Any]) -> None:
    model = Block().eval()
    fast = dfx.schedule(model, dfx.Sequential())
    with torch.no_grad():
        for rows in (3, 3, 5, 7):  # a plan of all regions on all cores is so at every size
            x = torch.randn(rows, 8)
            torch.testing.assert_close(fast(x), model(x))
    assert len(planned) == 1
    assert SAYS in dfx.explain(fast, x)


def test_another_way_to_call_is_planned_first(planned: list[Any]) -> None:
    model = Block().eval()
    fast = dfx.schedule(model, dfx.Sequential())
    x = torch.randn(3, 8)
    with torch.no_grad():
        fast(x), fast(x)
        fast(x.double().float()[None])  # another rank
        assert len(planned) == 2
        with pytest.raises(RuntimeError, match="dtype"):
            fast(x.double())  # the original's error


@pytest.mark.parametrize(
    ("strategy", "planned_calls"), [(dfx.Sequential(), 1), (dfx.Branches(), 2)]
)
def test_in_training(planned: list[Any], strategy: Any, planned_calls: int) -> None:
    """The second call finds the backward of the first; `Sequential` has none that is not the original's."""
    model = Block().train()
    fast = dfx.schedule(copy.deepcopy(model), strategy)
    for _ in range(4):
        x = torch.randn(3, 8)
        for module in (fast, model):
            torch.manual_seed(0)
            module.zero_grad()
            module(x).square().sum().backward()
        for got, want in zip(fast.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad)
    assert len(planned) == planned_calls


@pytest.mark.parametrize(
    ("strategy", "planned_calls"), [(dfx.Sequential(), 1), (dfx.Branches(), 3)]
)
def test_a_forward_without_a_backward(
    planned: list[Any], strategy: Any, planned_calls: int
) -> None:
    model = Block().eval()
    fast = dfx.schedule(model, strategy)
    for _ in range(3):
        x = torch.randn(3, 8)
        torch.testing.assert_close(fast(x), model(x))
    assert len(planned) == planned_calls
    fast(x).square().sum().backward()
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for p, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_what_changes_between_calls_is_seen() -> None:
    model = Block().eval()
    fast = dfx.schedule(model, dfx.Sequential())
    x = torch.randn(3, 8)
    with torch.no_grad():
        fast(x), fast(x)
        model.up.weight.zero_()
        torch.testing.assert_close(fast(x), model(x))
        model.drop.train()  # not the flag of the module itself
        torch.manual_seed(0)
        want = model(x)
        torch.manual_seed(0)
        torch.testing.assert_close(fast(x), want)
        assert fast(x).unique().numel() < 24 or not torch.equal(fast(x), fast(x))


@pytest.mark.parametrize(
    "strategy", [Mixed(2), dfx.Branches(wide=False), dfx.Sequential(wide=False)]
)
def test_a_plan_with_lanes_runs_at_every_call(planned: list[Any], strategy: Any) -> None:
    model = Block().eval()
    fast = dfx.schedule(model, strategy, lanes=2)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 8)
            torch.testing.assert_close(fast(x), model(x))
    assert len(planned) == 3
    assert SAYS not in dfx.explain(fast, x)


def test_a_replacement_runs_at_every_call() -> None:
    class Doubled(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                by = (lambda x: x.sin() * 2) if ready[0].name == "sin" else None
                s.execute(ready[0], width="all", replace=by)

    fast = dfx.schedule(
        lambda x: torch.sin(x).cos(), Doubled(), backend="torch", rules=[dfx.Op("sin")]
    )
    x = torch.randn(5)
    for _ in range(3):
        torch.testing.assert_close(fast(x), (x.sin() * 2).cos())


def test_another_order_is_a_plan_of_its_own(planned: list[Any]) -> None:
    class LastFirst(dfx.Strategy):
        def schedule(self, s: Any) -> None:
            while ready := s.ready():
                s.execute(ready[-1], width="all")

    def both(x: Any) -> Any:
        return torch.sort(x).values, torch.cumsum(x, 0)

    rules = [dfx.Op("sort"), dfx.Op("cumsum")]
    fast = dfx.schedule(both, LastFirst(), backend="torch", rules=rules)
    for _ in range(3):
        x = torch.randn(5)
        torch.testing.assert_close(fast(x), both(x))
    assert len(planned) == 3


def test_who_looks_sees_the_plan(planned: list[Any]) -> None:
    model = Block().eval()
    fast = dfx.schedule(model, dfx.Sequential(), rules=[dfx.Module("up"), dfx.Module("down")])
    x = torch.randn(3, 8)
    with torch.no_grad():
        fast(x), fast(x)
        assert dfx.profile(fast, x).spans
        before = len(planned)
        dfx.verify(fast, x)
        assert len(planned) == before + 1
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            fast(x)
    assert any(event.key.startswith("dynaflow_xla ") for event in seen.key_averages())


def test_branches_that_gain_nothing(planned: list[Any]) -> None:
    """A chain: by the model all regions have all cores, at these sizes."""
    model = Block().eval()
    fast = dfx.schedule(model, dfx.Branches())
    x = torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x))
        assert len(planned) == 1
        fast(torch.randn(4096, 8))
        assert len(planned) == 2, "other sizes may have another plan"
