"""Arguments that are views of what the function holds and writes: results and buffers are the original's."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from round_robin import RoundRobin  # noqa: E402
from torch import nn  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(12.0).reshape(6, 2))

    def forward(self, x: Any) -> Any:
        y = x + 1
        self.seen.mul_(2)
        y = y * self.seen.sum()
        self.seen[0].add_(1)
        return y * x


class Writes(Doubles):
    def forward(self, x: Any) -> Any:
        x.add_(1)
        return self.seen.sum() * 2 + x


GIVEN = {
    "p": lambda m: torch.ones(6, 2),
    "v": lambda m: m.seen[:],
    "s": lambda m: m.seen[2:],
    "t": lambda m: m.seen.view(2, 6).t(),
    "b": lambda m: m.seen,
    "r": lambda m: torch.ones(12, 2)[::2],  # a view of something else
}


@pytest.mark.filterwarnings("ignore::dynaflow_xla.FallbackWarning")
@pytest.mark.parametrize("calls", ["vv", "pvp", "vpv", "pspvbp", "prtpbvr"])
@pytest.mark.parametrize("strategy", [RoundRobin(), "branches", "auto"], ids=str)
@pytest.mark.parametrize("kind", [Doubles, Writes])
def test_results_and_buffers(kind: Any, strategy: Any, calls: str) -> None:
    one, two = kind(), kind()
    fast = dfx.schedule(one, strategy, lanes=2)
    for call in calls:
        given, wanted = GIVEN[call](one), GIVEN[call](two)
        assert torch.equal(fast(given), two(wanted)), call
        assert torch.equal(one.seen, two.seen) and torch.equal(given, wanted)


def test_what_a_function_closes_over() -> None:
    def make() -> Any:
        held = torch.arange(12.0).reshape(6, 2)

        def writes(x: Any) -> Any:
            held.mul_(2)
            return x * held.sum() + x.sin()

        return writes, held

    (fn, held), (other, kept) = make(), make()
    fast = dfx.schedule(fn, RoundRobin(), lanes=2)
    for view in (False, True, False, True):
        given, wanted = (x[1:] if view else x.clone()[1:] for x in (held, kept))
        assert torch.equal(fast(given), other(wanted)) and torch.equal(held, kept)


def test_several_graphs_are_refused() -> None:
    class Broken(Doubles):
        def forward(self, x: Any) -> Any:
            y = x.sin()
            torch._dynamo.graph_break()
            self.seen.mul_(2)
            return (y + x) * x

    one = Broken()
    fast = dfx.schedule(one, RoundRobin(), lanes=2)
    with pytest.warns(dfx.FallbackWarning):
        fast(torch.ones(6, 2))
    with pytest.raises(dfx.UnsupportedError, match="share memory .*several graphs"):
        fast(one.seen[:])
