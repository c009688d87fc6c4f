"""What a call leaves behind that is no argument happens once under ``Auto``, however often it is tried."""

from __future__ import annotations

import queue
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch import nn  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*:dynaflow_xla.errors.FallbackWarning")

ALL = {"min_cost_ns": 0.0}


class Meter:
    def __init__(self) -> None:
        self.n = 0

    def update(self, value: float) -> None:
        self.n += 1


meter, noted, waiting = Meter(), [], queue.Queue()
array = np.zeros(4)


def some_graph(x: Any) -> Any:
    return x.sort(-1).values + (-x).sort(-1).values.cos()


def calls_a_method(x: Any) -> Any:
    y = some_graph(x)
    meter.update(y.sum().item())
    return y


def appends(x: Any) -> Any:
    y = some_graph(x)
    noted.append(y.sum().item())
    return y


def puts(x: Any) -> Any:
    y = some_graph(x)
    waiting.put(y.sum().item())
    return y


def branches(x: Any) -> Any:
    y = some_graph(x)
    if y.sum() > -1e9:
        meter.n += 1
    return y


def _update_each(y: Any) -> None:
    for row in y[:1]:
        meter.n += row.sum().item() > -1e9


def calls_a_loop(x: Any) -> Any:
    y = some_graph(x)
    _update_each(y)
    return y


def writes_an_array(x: Any) -> Any:
    array[0] = array[0] + 1
    return some_graph(x)


def handles(x: Any) -> Any:
    y = some_graph(x)
    if y.sum() > -1e9:
        try:
            {}["missing"]
        except KeyError:
            meter.n = meter.n + 1
    return y


class Counts:
    def __iter__(self) -> Any:
        meter.n = meter.n + 1
        yield meter.n


counts = Counts()


def takes_from_a_generator(x: Any) -> Any:
    y = some_graph(x)
    if y.sum() > -1e9:
        (_,) = counts
    return y


BEHIND = [
    calls_a_method, appends, puts, branches, calls_a_loop, handles, takes_from_a_generator,
]  # fmt: skip


@pytest.mark.parametrize("again", [False, True], ids=["first", "known to Dynamo"])
@pytest.mark.parametrize("f", BEHIND, ids=lambda f: f.__name__)
def test_code_behind_the_last_graph_runs_once(f: Any, again: bool) -> None:
    """Dynamo remembers for good which code it leaves to Python, and does not say it a second time."""
    for _ in range(1 + again):
        fast, x = dfx.schedule(f, dfx.Auto(**ALL)), torch.randn(8, 16)
        for _ in range(3):
            before = meter.n + len(noted) + waiting.qsize()
            fast(x)
            assert meter.n + len(noted) + waiting.qsize() == before + 1
        assert "whatever the code between its graphs does" in dfx.explain(fast, x)


def test_sizes_computed_between_graphs_are_no_effect() -> None:
    def f(x: Any) -> Any:
        y = some_graph(x)
        torch._dynamo.graph_break()
        return y.sin()

    fast = dfx.schedule(f, dfx.Auto(**ALL), compiler_options={"dynamic": True})
    for rows in (8, 6):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(fast(x), f(x))
        assert "between its graphs" not in dfx.explain(fast, x)


def test_a_value_that_is_only_returned_is_no_effect() -> None:
    def total(x: Any) -> Any:
        y = some_graph(x)
        return y, y.sum().item()

    fast, x = dfx.schedule(total, dfx.Auto(**ALL)), torch.randn(8, 16)
    fast(x)
    assert "whatever the code between" not in dfx.explain(fast, x)


def test_an_array_of_numpys_that_a_graph_changes() -> None:
    fast = dfx.schedule(writes_an_array, dfx.Auto(**ALL))
    for _ in range(3):
        before = array[0]
        fast(torch.randn(8, 16))
        assert array[0] == before + 1


OWN = {
    "Random": lambda: random.Random(3),
    "default_rng": lambda: np.random.default_rng(3),
    "RandomState": lambda: np.random.RandomState(3),
}


class Drawing(nn.Module):
    """Draws from a generator of its own, in a list, before the first graph."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.own = [generator]

    def forward(self, x: Any) -> Any:
        return x * torch.as_tensor([self.own[0].uniform(0, 1) < 0.5, True]).float()


def closing_over(generator: Any) -> Any:
    return lambda x: x * generator.uniform(0, 1)


@pytest.mark.parametrize("make", [Drawing, closing_over], ids=["attribute", "closure"])
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("strategy", ["auto", dfx.Auto(**ALL)], ids=["auto", "measured"])
def test_generators_of_its_own(strategy: Any, kind: str, make: Any) -> None:
    original, fast = make(OWN[kind]()), dfx.schedule(make(OWN[kind]()), strategy)
    x = torch.ones(4, 2)
    for _ in range(6):
        torch.testing.assert_close(fast(x), original(x), rtol=0, atol=0)


class Recurrent(nn.Module):
    """Keeps a state with its graph, which one backward uses up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.h = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 4), None

    def forward(self, x: Any) -> Any:
        out, self.h = self.layer(x, self.h)
        return self.last(out)


def test_a_state_is_put_back_between_two_timed_runs() -> None:
    module = Recurrent()
    fast = dfx.schedule(module, dfx.Auto(**ALL))
    for _ in range(3):
        module.h = None
        loss = sum(fast(torch.randn(3, 4, 4)).square().mean() for _ in range(3))
        loss.backward()


def test_an_error_of_a_candidate_is_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynaflow_xla.frontends.torch.dynamo import running

    fast = dfx.schedule(nn.Sequential(*[nn.Linear(16, 16) for _ in range(20)]), dfx.Auto(**ALL))
    run = running.Runner.__call__
    calls = 0

    def fails(self: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise RuntimeError("no more")
        return run(self, inputs)

    monkeypatch.setattr(running.Runner, "__call__", fails)
    x = torch.randn(8, 16)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), fast.original(x))


counted = 0


@torch.library.custom_op("dfx_left_as_it_was::count", mutates_args=())
def count(x: torch.Tensor) -> torch.Tensor:
    """An operator with a state that PyTorch is not told of."""
    global counted
    counted += 1
    return x.sort(-1).values * 2


@count.register_fake
def _(x: Any) -> Any:
    return torch.empty_like(x)


def test_an_operator_with_a_state() -> None:
    fast, x = dfx.schedule(lambda x: count(x) + count(-x), dfx.Auto(**ALL)), torch.randn(8, 16)
    for _ in range(3):
        before = counted
        fast(x)
        assert counted == before + 2
    assert "operators of your own may keep state (dfx_left_as_it_was::count)" in dfx.explain(
        fast, x
    )


def test_nothing_is_decided_inside_of_the_users_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring waits for the device, which ends a capture; a later call outside decides."""
    from dynaflow_xla.frontends.torch._compat import modes

    class Sorted(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.sin(x) + torch.sort(x)[0]

    fn = Sorted()
    fast = dfx.schedule(fn, dfx.Auto(**ALL))
    x = torch.randn(64)
    with torch.no_grad():
        monkeypatch.setattr(modes, "captured_by_user", lambda: True)
        assert torch.equal(fast(x), fn(x))
        signatures = len(fast._dfx_core.decisions._made)
        monkeypatch.setattr(modes, "captured_by_user", lambda: False)
        assert torch.equal(fast(x), fn(x))
        assert len(fast._dfx_core.decisions._made) > signatures
