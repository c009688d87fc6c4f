"""Functions of several graphs, or of none: a first call under Auto changes things once, as one call does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
nn = torch.nn

pytestmark = [
    pytest.mark.usefixtures("timeless"),
    pytest.mark.filterwarnings("ignore:.*(captured in several graphs|could be captured)"),
]


turns = 0
heard: list[int] = []
total = torch.zeros(())


def of_a_global(x: Any) -> Any:
    global turns
    y = torch.sort(x).values
    torch._dynamo.graph_break()
    turns += 1
    return torch.sort(-y).values * turns, turns


def of_a_list(x: Any) -> Any:
    y = torch.sort(x).values
    torch._dynamo.graph_break()
    heard.append(1)
    return torch.sort(-y).values, len(heard)


def of_a_tensor(x: Any) -> Any:
    y = torch.sort(x).values
    torch._dynamo.graph_break()
    total.add_(1)
    return torch.sort(-y).values * total, total.item()


def of_python(x: Any) -> Any:
    y = torch.sort(x).values
    torch._dynamo.graph_break()
    z = torch.sort(-y).values
    print("", end="")
    heard.append(1)
    return z.cos(), len(heard)


def closed_over() -> Callable[[Any], Any]:
    count = 0

    def f(x: Any) -> Any:
        nonlocal count
        y = torch.sort(x).values
        torch._dynamo.graph_break()
        count += 1
        return torch.sort(-y).values * count, count

    return f


AFTER_A_BREAK = [of_a_global, of_a_list, of_a_tensor, of_python, closed_over]


@pytest.mark.parametrize("auto", [True, False], ids=["auto", "one strategy"])
@pytest.mark.parametrize("f", AFTER_A_BREAK, ids=lambda f: f.__name__)
def test_what_a_later_graph_changes(f: Any, auto: bool) -> None:
    """It is known when that graph is captured. A cell that a frame behind a break changes has no name."""
    global turns
    x, results = torch.randn(8), []
    for scheduled in (False, True):
        turns = 0
        heard.clear()
        total.zero_()
        call = f() if f is closed_over else f
        if scheduled:
            strategy = dfx.Auto(min_cost_ns=0.0) if auto else dfx.Branches(wide=False)
            call = dfx.schedule(call, strategy, lanes=2)
        results.append([call(x) for _ in range(3)])
        if scheduled:
            dfx.explain(call, x)
        results[-1].append(call(x))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert [n for _, n in results[1]] == [1, 2, 3, 4]


def test_a_variable_of_an_inner_function_behind_a_break() -> None:
    def f(x: Any) -> Any:
        seen = 0

        def noted(y: Any) -> Any:
            nonlocal seen
            seen += y.shape[0]
            return y.sin()

        torch._dynamo.graph_break()
        a = noted(x)
        return a, noted(a), seen

    x = torch.randn(4)
    fast = dfx.schedule(f, dfx.Branches(wide=False), lanes=2)
    for _ in range(2):
        torch.testing.assert_close(fast(x), f(x), rtol=0, atol=0)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Any, noted: Any) -> Any:
        self.count += 1
        noted.append(self.count)
        return x, len(noted)


def without_a_graph(x: Any, noted: Any) -> Any:
    noted.append(len(noted))
    return x, len(noted)


@torch._dynamo.disable
def not_followed(x: Any, noted: Any) -> Any:
    x.add_(1)
    noted.append(len(noted))
    return x.cos(), len(noted)


def behind_a_print(x: Any, noted: Any) -> Any:
    noted.append(len(noted))
    print("", end="")
    return x.cos(), len(noted)


@pytest.mark.parametrize("make", [Counting, *(lambda f=f: f for f in (
    without_a_graph, not_followed, behind_a_print,
))], ids=["module", "without a graph", "not followed", "behind a print"])  # fmt: skip
def test_arguments_that_change_before_the_first_graph(make: Any) -> None:
    results: list[Any] = []
    for scheduled in (False, True):
        f, x, noted = make(), torch.zeros(4), []
        call = dfx.schedule(f, dfx.Auto(min_cost_ns=0.0), lanes=2) if scheduled else f
        results.append([(*call(x, noted), x.clone(), list(noted)) for _ in range(3)])
        results[-1].append(getattr(f, "count", 0))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


class Strided(torch.nn.Module):
    """A number is read in a method that a comprehension goes through, as detectors make their anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.stride, self.conv = torch.tensor([8.0, 4.0]), torch.nn.Conv2d(3, 4, 1)

    def make(self, x: Any) -> Any:
        return torch.full((x.shape[3], 1), float(self.stride[0])), torch.ones(8)

    def forward(self, x: Any) -> Any:
        x = self.conv(x)
        a, b = [t * 2 for t in self.make(x)]
        return x * a + b


@pytest.mark.parametrize("strategy", ["branches", "auto"])
def test_a_break_in_what_a_comprehension_goes_through(strategy: str) -> None:
    model, x = Strided().eval(), torch.randn(4, 3, 8, 8)
    fast = dfx.schedule(model, strategy=strategy, lanes=2)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        assert "conv" in dfx.explain(fast, x)
