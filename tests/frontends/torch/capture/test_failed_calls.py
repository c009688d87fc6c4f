"""A call that raises leaves the next one scheduled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from round_robin import RoundRobin
from torch import nn

import dynaflow_xla as dfx


class Checks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def checked(self, x: Any) -> None:
        if x.dim() != 2:
            raise ValueError("two dimensions, please")

    def forward(self, x: Any) -> Any:
        self.checked(x)
        return self.one(x).tanh() + self.two(x).sin()


class Asserts(Checks):
    def checked(self, x: Any) -> None:
        assert x.dim() == 2, "two dimensions, please"


@pytest.mark.parametrize("strategy", [RoundRobin(), dfx.NanoBatch(2)], ids=str)
@pytest.mark.parametrize("kind", [Checks, Asserts])
def test_the_models_own_error_at_the_first_call(kind: Any, strategy: Any) -> None:
    """Dynamo leaves a function that raised while it traced it as it is, for good."""
    model = kind()
    fast = dfx.schedule(model, strategy, lanes=2)
    for make_other in (lambda: None, model.eval, model.double):
        make_other()
        dtype = model.one.weight.dtype
        with warnings.catch_warnings(), pytest.raises((ValueError, AssertionError), match="please"):
            warnings.simplefilter("ignore")  # the failing call may be captured in parts
            fast(torch.randn(2, 3, 8, dtype=dtype))
        for rows in (4, 6):
            x = torch.randn(rows, 8, dtype=dtype)
            torch.testing.assert_close(fast(x), model(x))
            assert "strategy" in dfx.explain(fast, x).splitlines()[0]


def test_captures_do_not_begin_anew_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Checks()
    fast = dfx.schedule(model, RoundRobin(), lanes=2)
    begun = 0
    core = fast._dfx_core
    begin = type(core)._begin_captures

    def counted(self: Any) -> None:
        nonlocal begun
        begun += 1
        begin(self)

    monkeypatch.setattr(type(core), "_begin_captures", counted)
    for size in range(3, 20):
        with pytest.raises(ValueError, match="please"):
            fast(torch.randn(2, size, 8))
    assert 1 <= begun < 8
    with pytest.raises(ValueError, match="please"):
        fast(torch.randn(3))


def test_a_window_that_moves_over_a_buffer() -> None:
    """Each place is another way to share memory; what is captured for them is bounded."""

    def step(ring: Any, row: Any) -> Any:
        ring.mul_(0.5)
        return ring.sum(0).sin() + row.cos()

    fast = dfx.schedule(step, RoundRobin(), lanes=2)
    ring, other = torch.randn(14, 5), torch.zeros(14, 5)
    other.copy_(ring)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for place in range(13):
            torch.testing.assert_close(fast(ring, ring[place]), step(other, other[place]))
            torch.testing.assert_close(ring, other)
    (said,) = [w for w in told if "in a way that 9 earlier calls did not" in str(w.message)]
    assert issubclass(said.category, dfx.FallbackWarning)
    assert "in a way that 9 earlier calls did not" in dfx.explain(fast, ring, ring[12])


def test_a_failed_capture_says_what_and_where() -> None:
    """PyTorch draws no open sizes where a generator is named, if only as None."""

    def draws(x: Any) -> Any:
        return x + torch.randn(x.shape[0], 3, generator=None)

    fast = dfx.schedule(draws, dfx.NanoBatch(2), in_axes=0)
    with pytest.warns(dfx.FallbackWarning) as caught:
        assert fast(torch.randn(12, 3)).shape == (12, 3)
    (told,) = [str(one.message) for one in caught if "cannot be captured" in str(one.message)]
    line = draws.__code__.co_firstlineno + 1
    assert f"at {__file__}:{line} (" in told and told.endswith(", so the original runs")
    assert "leave these out" in told  # what to do
    assert "SymInt" in told and ".cpp" not in told
