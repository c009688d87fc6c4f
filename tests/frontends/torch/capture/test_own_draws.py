"""Operators of the user's that draw random numbers: in the original's order, whichever lanes they are on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import dynaflow_xla as dfx  # noqa: E402


class LastFirst(dfx.Strategy):
    """What is last in the program comes first, each on another lane than the one before."""

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("*")]

    def schedule(self, s: Any) -> None:
        lane = 0
        while ready := s.ready():
            lane = (lane + 1) % s.lanes
            s.execute(ready[-1], lane=lane)


def noisy(name: str, *tags: Any) -> Any:
    @torch.library.custom_op(f"dfx_test_own_draws::{name}", mutates_args=(), tags=tags)
    def add_noise(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + torch.randn_like(x) * scale if scale else x.clone()

    @add_noise.register_fake
    def _(x: Any, scale: Any) -> Any:
        return torch.empty_like(x)

    return add_noise


tagged = noisy("tagged", torch.Tag.nondeterministic_seeded)
untagged = noisy("untagged")
pure = noisy("pure")


def check(fast: Any, fn: Any, x: Any) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        want, state = fn(x), torch.get_rng_state()
        torch.manual_seed(seed)
        for a, b in zip(fast(x), want, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("op", [tagged, untagged], ids=["tagged", "untagged"])
@pytest.mark.parametrize("beside", ["itself", "torch"])
def test_the_order_is_the_originals(op: Any, beside: str) -> None:
    def draws(x: Any) -> Any:
        second = op(x * 2, 0.5) if beside == "itself" else torch.rand_like(x)
        return op(x, 2.0), second, op(x, 0.0)

    x = torch.randn(50)
    check(dfx.schedule(draws, LastFirst(), lanes=2), draws, x)


def test_sizes_that_change() -> None:
    def draws(x: Any) -> Any:
        return untagged(x, 2.0), untagged(x.sin(), 1.0), torch.rand_like(x)

    fast = dfx.schedule(draws, LastFirst(), lanes=2)
    for rows in (3, 50, 51, 7, 200):
        check(fast, draws, torch.randn(rows))


def test_exported() -> None:
    class Draws(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return untagged(x, 2.0), untagged(x.sin(), 1.0)

    x = torch.randn(50)
    program = torch.export.export(Draws(), (x,))
    check(dfx.schedule(program, LastFirst(), lanes=2), Draws(), x)


def test_others_are_free() -> None:
    def calls(x: Any) -> Any:
        return pure(x, 0.0), pure(x.sin(), 0.0)

    x = torch.randn(50)
    fast = dfx.schedule(calls, LastFirst(), lanes=2, backend="torch")
    check(fast, calls, x)
    (entry,) = fast._dfx_core.entries
    assert entry.watched_first is None
    assert not any(value.dtype == "token" for value in entry.captured.graph.values)


def test_what_it_raises_is_told() -> None:
    @torch.library.custom_op("dfx_test_own_draws::fails", mutates_args=())
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not these")

    @fails.register_fake
    def _(x: Any) -> Any:
        return torch.empty_like(x)

    fast = dfx.schedule(lambda x: (pure(x, 0.0), fails(x)), LastFirst(), lanes=2)
    with pytest.raises(ValueError, match="fails.*failed: ValueError: not these") as caught:
        fast(torch.randn(5))
    assert isinstance(caught.value, dfx.DynaflowError)


def test_nano_batches() -> None:
    def draws(x: Any) -> Any:
        return untagged(x, 2.0) + torch.nn.functional.dropout(x, 0.5)

    x = torch.randn(50, 3)
    fast = dfx.schedule(draws, dfx.NanoBatch(2), in_axes=0)
    torch.manual_seed(0)
    want = draws(x)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = fast(x)
        except dfx.SeparabilityError:
            return
    assert torch.equal(got, want)
