"""The core asks a backend's object for everything that differs between ways to run a graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import dynaflow_xla as dfx
from dynaflow_xla import backends

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from dynaflow_xla.frontends.torch.native.backend import NativeBackend  # noqa: E402


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the backend "torch", another one for the test, is asked for what."""
    counts: Counter[str] = Counter()

    class Another(NativeBackend):
        def told(self, entry: Any) -> str:
            return "another"

    def counted(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return getattr(NativeBackend, name)(self, *args, **kwargs)

        return call

    for name in ("capture_options", "lower", "whole", "by_size", "fixed", "split"):
        setattr(Another, name, counted(name))
    monkeypatch.setitem(backends.BACKENDS, "torch", backends.BackendRow(torch=Another))
    return counts


def two(x: Any) -> Any:
    return torch.sort(x)[0] + torch.sort(-x)[0]


def test_a_whole_graph(asked: Counter[str]) -> None:
    fast = dfx.schedule(two, "branches", lanes=2)
    x = torch.randn(7, 5)
    torch.testing.assert_close(fast(x), two(x))
    assert asked == Counter(capture_options=1, lower=1, by_size=1)
    assert "backend another" in dfx.explain(fast, x)


def test_forward_and_backward(asked: Counter[str]) -> None:
    fast = dfx.schedule(two, "branches", lanes=2)
    x = torch.randn(7, 5, requires_grad=True)
    (got,) = torch.autograd.grad(fast(x).sum(), x)
    (want,) = torch.autograd.grad(two(x).sum(), x)
    torch.testing.assert_close(got, want)
    assert asked == Counter(capture_options=1, lower=2, by_size=2)


def test_nano_batches(asked: Counter[str]) -> None:
    fast = dfx.schedule(two, dfx.NanoBatch(2), in_axes=0, lanes=2)
    for rows in (6, 4):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(fast(x), two(x))
    assert asked == Counter(capture_options=1, lower=1, split=2)


def test_a_batch_that_the_strategy_leaves_whole(asked: Counter[str]) -> None:
    class Whole(dfx.Branches):
        def split(self, ctx: Any) -> Any:
            return super().split(ctx)

    fast = dfx.schedule(two, Whole(), in_axes=0, lanes=2)
    x = torch.randn(6, 5)
    torch.testing.assert_close(fast(x), two(x))
    assert asked == Counter(capture_options=1, lower=1, fixed=1)


def test_one_row_is_no_batch(asked: Counter[str]) -> None:
    fast = dfx.schedule(two, dfx.NanoBatch(2), in_axes=0, lanes=2)
    x = torch.randn(1, 5)
    torch.testing.assert_close(fast(x), two(x))
    assert asked == Counter(capture_options=1, lower=1, by_size=1)


def test_an_exported_program(asked: Counter[str]) -> None:
    class Two(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return two(x)

    x = torch.randn(7, 5)
    fast = dfx.schedule(torch.export.export(Two(), (x,)), "branches", lanes=2)
    torch.testing.assert_close(fast(x), two(x))
    assert asked == Counter(capture_options=1, whole=1)
