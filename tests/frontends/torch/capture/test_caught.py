"""Errors that the function itself handles: no captured graph does, so the original runs for such calls."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import dynaflow_xla as dfx  # noqa: E402

GOOD = torch.eye(4).repeat(4, 1, 1)
STRATEGIES = ["branches", "auto", dfx.Sequential(), dfx.NanoBatch(2)]
ORDERS = [(GOOD, -GOOD, GOOD), (-GOOD, GOOD, -GOOD)]


def factor(x: Any) -> Any:
    try:
        return torch.linalg.cholesky(x)
    except torch.linalg.LinAlgError:
        return x * 2


def noisy(x: Any) -> Any:
    noise = torch.rand_like(x)
    try:
        return torch.linalg.cholesky(x) + noise
    except torch.linalg.LinAlgError:
        return x + noise + torch.rand_like(x)


def writes(x: Any) -> Any:
    x.add_(1.0)
    x.sub_(1.0)
    with contextlib.suppress(torch.linalg.LinAlgError):
        return torch.linalg.cholesky(x).sum((1, 2))
    return x.mul_(3).sum((1, 2))


def handles_others(x: Any) -> Any:
    try:
        return torch.linalg.cholesky(x)
    except KeyError:
        return x


@pytest.mark.filterwarnings("ignore::dynaflow_xla.FallbackWarning")
@pytest.mark.parametrize("order", ORDERS, ids=["good first", "bad first"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("fn", [factor, noisy, writes], ids=lambda fn: fn.__name__)
def test_the_fallback_is_taken(fn: Any, strategy: Any, order: Any) -> None:
    fast = dfx.schedule(fn, strategy)
    for seed, x in enumerate(order):
        given, wanted = x.clone(), x.clone()
        torch.manual_seed(seed)
        want, state = fn(wanted), torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(fast(given), want)
        assert torch.equal(given, wanted) and torch.equal(torch.get_rng_state(), state)


def test_the_reason_is_told_once() -> None:
    fast = dfx.schedule(factor, dfx.Sequential())
    with pytest.warns(
        dfx.FallbackWarning, match="raised .*LinAlgError, which the function itself handles"
    ):
        fast(-GOOD)
    fast(-GOOD)


def test_what_the_original_raises_tells_the_region() -> None:
    fast = dfx.schedule(handles_others, dfx.NanoBatch(2))
    fast(GOOD)
    with pytest.raises(torch.linalg.LinAlgError, match="region .* failed") as caught:
        fast(-GOOD)
    assert type(caught.value.__cause__) is torch.linalg.LinAlgError


def test_what_cannot_run_again_says_so() -> None:
    def broken(x: Any) -> Any:
        y = x.sin()
        torch._dynamo.graph_break()
        try:
            return torch.linalg.cholesky(x) + y
        except torch.linalg.LinAlgError:
            return y

    fast = dfx.schedule(broken, LANES)
    with pytest.warns(dfx.FallbackWarning):
        assert torch.equal(fast(GOOD), broken(GOOD))
    try:
        assert torch.equal(fast(-GOOD), broken(-GOOD))
    except torch.linalg.LinAlgError as error:
        assert "call the original" in error.__notes__[0]


LANES = dfx.Branches(lanes=2)
