"""Random multi-branch functions: any legal schedule gives the original's bits and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import dynaflow_xla as dfx

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def _orthogonal(v: Any) -> Any:
    """Q of a matrix of full rank: at others its derivative is whatever rounding makes of it."""
    return torch.linalg.qr(torch.tanh(v) + 9.0 * torch.eye(4, dtype=v.dtype))[0]


UNARY = [
    torch.sin, torch.tanh, lambda v: torch.sort(v, -1).values, lambda v: torch.cumsum(v, 0),
    lambda v: v.t(), lambda v: v[::2].repeat(2, 1), lambda v: _orthogonal(v),
    lambda v: torch.nn.functional.dropout(v, 0.3, True), lambda v: v + torch.rand_like(v),
    lambda v: torch.stack(v.chunk(2, -1)).sum(0).repeat(1, 2), lambda v: v.clone().mul_(0.5),
]  # fmt: skip
BINARY = [torch.add, torch.mul, torch.matmul, torch.maximum, lambda a, b: torch.where(a > b, a, -b)]

programs = st.lists(
    st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 99), st.integers(0, 99)),
    min_size=2,
    max_size=14,
)


def _function(program: list[tuple[int, int, int]]) -> Any:
    def run(x: Any, y: Any) -> Any:
        values = [x, y]
        for kind, first, second in program:
            a, b = values[first % len(values)], values[second % len(values)]
            if kind < len(UNARY):
                values.append(UNARY[kind](a))
            else:
                values.append(BINARY[kind - len(UNARY)](a, b))
        return values[-1], values[2:][len(values) // 3] * 2

    return run


class _Random(dfx.Strategy):
    """Any order, any lanes, as the drawn numbers say."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("*")] if self.choices[0] % 2 and graph.ops else None

    def schedule(self, s: Any) -> None:
        turn = 0
        while ready := s.ready():
            choice = self.choices[turn % len(self.choices)]
            s.execute(ready[choice % len(ready)], lane=choice // 7 % s.lanes)
            turn += 1


# An example takes a second: nothing is made smaller.
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    report_multiple_bugs=False,
)
@given(program=programs, choices=st.lists(st.integers(0, 1000), min_size=1, max_size=12))
def test_any_schedule_gives_the_same_bits(
    program: list[tuple[int, int, int]], choices: list[int]
) -> None:
    torch._dynamo.reset()
    fn = _function(program)
    fast = dfx.schedule(fn, strategy=_Random(choices), backend="torch")
    results = []
    for call in (fn, fast):
        torch.manual_seed(7)
        x, y = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
        outs = call(x, y)
        after = torch.rand(2)
        total = sum(o.sum() for o in outs if o.requires_grad)
        if isinstance(total, torch.Tensor):
            total.backward()
        results.append(([o.detach() for o in outs], after, x.grad, y.grad))
    (want, want_after, *want_grads), (got, got_after, *got_grads) = results
    for w, g in zip(want, got, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(want_after, got_after), "the random state went another way"
    for w, g in zip(want_grads, got_grads, strict=True):
        if w is None:
            assert g is None or not g.any()
        else:
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_numbers_of_numpy_are_its_own() -> None:
    """Dynamo would draw them from PyTorch's generator."""

    def f(x: Any) -> Any:
        noise = torch.from_numpy(np.random.rand(4))
        return torch.sort(x).values + noise, torch.sort(-x).values, torch.rand(2)

    x, got = torch.randn(4), []
    fast = dfx.schedule(f, dfx.Branches(wide=False), lanes=2)
    for call in (f, fast):
        np.random.seed(3)
        torch.manual_seed(3)
        got.append([*call(x), *call(x), torch.rand(1), np.random.rand()])
    torch.testing.assert_close(got[1], got[0], rtol=0, atol=0)
