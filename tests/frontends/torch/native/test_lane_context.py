"""Context variables of the caller, as operators on lanes see them."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import pytest
from round_robin import RoundRobin

import dynaflow_xla as dfx

torch = pytest.importorskip("torch")

scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
ran_on: set[int] = set()


@torch.library.custom_op("test_lane_context::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    ran_on.add(threading.get_ident())
    return x.sort(-1).values * scale.get()


@scaled.register_fake
def _(x: Any) -> Any:
    return torch.empty_like(x)


def test_operators_on_lanes_see_the_callers_context() -> None:
    def f(x: Any) -> Any:
        return tuple(scaled(x + n) for n in range(8))

    fast = dfx.schedule(f, RoundRobin(), lanes=2, rules=[dfx.Op("*")])
    x = torch.randn(256, 512)
    fast(x)
    ran_on.clear()
    for value in (3.0, 5.0):
        token = scale.set(value)
        try:
            for _ in range(4):
                for mine, theirs in zip(fast(x), f(x), strict=True):
                    assert torch.equal(mine, theirs)
        finally:
            scale.reset(token)
    assert len(ran_on) > 1
