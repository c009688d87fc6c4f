"""Captures while another thread's backward is planned: Dynamo's settings are each thread's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from round_robin import RoundRobin
from torch import nn

import dynaflow_xla as dfx

LIMIT_S = 60.0


class Waits(RoundRobin):
    """Graphs that a part of their name tells are planned once somebody says so."""

    def __init__(self, part: str) -> None:
        self.part, self.begun, self.go_on = part, threading.Event(), threading.Event()

    def rules(self, graph: Any) -> Any:
        if self.part in graph.name:
            self.begun.set()
            assert self.go_on.wait(LIMIT_S)
        return super().rules(graph)


class Other:
    """What another thread does; its error is raised at the end."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


def layers() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


@pytest.fixture
def planning_a_backward() -> Any:
    """Another thread plans a backward until the test is over."""
    strategy = Waits("backward")
    fast = dfx.schedule(layers(), strategy, lanes=2)
    other = Other(lambda: fast(torch.randn(4, 8)).sum().backward())
    assert strategy.begun.wait(LIMIT_S)
    yield
    strategy.go_on.set()
    other.end()


@pytest.mark.usefixtures("planning_a_backward")
def test_a_recurrent_layer_is_captured() -> None:
    lstm, x = nn.LSTM(8, 8), torch.randn(5, 2, 8)
    fast = dfx.schedule(lstm, RoundRobin(), lanes=2)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), lstm(x))
        assert "strategy RoundRobin" in dfx.explain(fast, x)


@pytest.mark.usefixtures("planning_a_backward")
def test_a_batch_is_split() -> None:
    model, x = layers(), torch.randn(4, 8)
    fast = dfx.schedule(model, dfx.NanoBatch(2), lanes=2)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        assert "is split into nano-batches of [2, 2]" in dfx.explain(fast, x)


def test_nothing_stays_open() -> None:
    """This thread's capture begins before the other's backward, and ends before it."""
    mine, theirs = Waits("mine"), Waits("backward")
    scheduled = dfx.schedule(layers(), theirs, lanes=2)
    loss = scheduled(torch.randn(4, 8)).sum()

    def backward() -> None:
        assert mine.begun.wait(LIMIT_S)
        loss.backward()

    def let_go() -> None:
        assert theirs.begun.wait(LIMIT_S)
        mine.go_on.set()

    others = Other(backward), Other(let_go)

    def named_mine(x: Any) -> Any:
        return x.sin() + x.cos()

    before = torch._dynamo.config.allow_rnn
    x = torch.randn(4, 8)
    torch.testing.assert_close(dfx.schedule(named_mine, mine, lanes=2)(x), named_mine(x))
    assert torch._dynamo.config.allow_rnn is before is False
    theirs.go_on.set()
    for other in others:
        other.end()
    assert torch._dynamo.config.allow_rnn is False
