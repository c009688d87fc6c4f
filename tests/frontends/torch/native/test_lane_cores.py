"""Lanes with several cores: PyTorch's operators there have as many threads."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla import machine  # noqa: E402
from dynaflow_xla.planning.instructions import Launch  # noqa: E402


def _work(x: Any) -> Any:
    return torch.sort(x @ x).values + torch.sort(x.T @ x, dim=0).values


class Looking(dfx.Strategy):
    """Alternating lanes; products tell how many threads they have."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def rules(self, graph: Any) -> Any:
        return [dfx.Op("*")] if graph.ops else None

    def schedule(self, s: Any) -> None:
        def product(a: Any, b: Any) -> Any:
            self.seen.append(torch.get_num_threads())
            return a @ b

        turn = 0
        while ready := s.ready():
            op = ready[0]
            replace = product if "mm" in op.name and len(op.region.inputs) == 2 else None
            s.execute(op, lane=turn % s.lanes, replace=replace)
            turn += 1


@pytest.mark.parametrize("width", [1, 3])
def test_threads_of_a_lane(width: int) -> None:
    seen: list[int] = []
    lanes = dfx.Lanes(2, width=width)
    fast = dfx.schedule(_work, Looking(seen), lanes=lanes, backend="torch")
    x = torch.randn(32, 32)
    before = torch.get_num_threads()
    fast(x)  # while it is captured it runs on this thread
    seen.clear()
    for _ in range(2):
        torch.testing.assert_close(fast(x), _work(x))
    assert torch.get_num_threads() == before
    assert seen and set(seen) == {width}
    assert ("threads for" in dfx.explain(fast, x)) == (width > 1 and 2 * width > machine.cores())
    plan = dfx.plan(fast, x)
    assert {i.width for i in plan.instructions if isinstance(i, Launch)} == {width}
