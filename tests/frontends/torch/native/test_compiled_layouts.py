"""Regions compiled by Inductor, where inputs lie otherwise in memory from call to call."""

from __future__ import annotations

from typing import Any

import pytest
from round_robin import RoundRobin

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def test_strides_that_change_where_sizes_do_not() -> None:
    def f(x: Any) -> Any:
        return x.mT * 2 + 1, x.contiguous().sin() + 1

    options = {"cpp_wrapper": False}
    fast = dfx.schedule(f, RoundRobin(), compiler="inductor", compiler_options=options)
    inputs = [
        torch.randn(4, 8, 6).mT, torch.randn(4, 6, 8), torch.randn(8, 6, 8)[::2],
        torch.randn(16, 6, 8)[::4], torch.randn(4, 6, 24)[..., ::3], torch.randn(9, 7, 9)[:4, :6, :8],
    ]  # fmt: skip
    for x in (*inputs, *inputs):
        for mine, theirs in zip(fast(x), f(x), strict=True):
            torch.testing.assert_close(mine, theirs)
            assert mine.stride() == theirs.stride()
