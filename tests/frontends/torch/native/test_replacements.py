"""Replacements that cannot be right: told with their line, never taken for what the function handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


class Replaced(dfx.Strategy):
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def schedule(self, s: Any) -> None:
        while ready := s.ready():
            for op in ready:
                s.execute(op, replace=self.fn if "replaced" in op.tags else None)


class Marked(torch.nn.Module):
    """Has code that handles exceptions, as each ``with`` is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: Any) -> Any:
        with dfx.mark("act", tags={"replaced"}):
            h = torch.relu(x)
        return torch.sin(x) * self.weight + h


def raises(v: Any) -> Any:
    return v.clip(0) + v.no_such_attribute


@pytest.mark.parametrize("look", [dfx.verify, lambda f, x: f(x), dfx.plan])
@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (raises, r"raised AttributeError: .*; it gets 1 inputs \['float32\[4, 5\]'\]"),
        (lambda v, w: v, r"must take its 1 inputs \['float32\[4, 5\]'\]: missing"),
        (lambda v: v[:2], r"must return float32\[4, 5\]; it returned float32\[2, 5\]"),
        (lambda v: (v, v), "must return 1 values; it returned 2"),
        (lambda v: v.numpy(), "must return float32 tensors; it returned ndarray"),
    ],
)
def test_what_a_replacement_raises_reaches_the_caller(look: Any, fn: Any, says: str) -> None:
    fast = dfx.schedule(Marked(), Replaced(fn))
    if look is dfx.plan and "take" not in says:
        return  # it is called first by a call
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(
                dfx.DynaflowError, match=rf"replacement of region 'act' \(at .*:\d+\) {says}"
            ):
                look(fast, torch.randn(4, 5))


def test_a_right_one_runs_after_a_wrong_call() -> None:
    seen: list[int] = []

    def relu(v: Any) -> Any:
        seen.append(len(seen))
        if len(seen) == 1:
            raise ValueError("once")
        return v.clamp(min=0)

    model, x = Marked(), torch.randn(4, 5)
    fast = dfx.schedule(model, Replaced(relu))
    with torch.no_grad():
        with pytest.raises(dfx.DynaflowError, match="raised ValueError: once"):
            fast(x)
        assert torch.equal(fast(x), model(x)) and len(seen) == 2


def test_verify_says_what_it_did_not_compare() -> None:
    fast, x = dfx.schedule(Marked(), Replaced(lambda v: v.abs())), torch.randn(4, 5)
    report = dfx.verify(fast, x)
    assert report.bit_equal and len(report.notes) == 1
    assert "note: region 'act' runs as it was written" in str(report)
    assert "torch.no_grad()" in str(report)
    with torch.no_grad(), pytest.raises(dfx.VerificationError):
        dfx.verify(fast, x)
    right = dfx.schedule(Marked(), Replaced(lambda v: v.clamp(min=0)))
    with torch.no_grad():
        assert dfx.verify(right, x).notes == ()
