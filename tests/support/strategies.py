"""The strategies that tests run every function under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from function_table import ROWS

import dynaflow_xla as dfx


class Together(dfx.Strategy):
    """A user's strategy: two nano-batches; every other region that is ready in both runs as one batch."""

    def __init__(self, joins: bool = True) -> None:
        self.joins = joins

    def split(self, ctx: Any) -> Any:
        return dfx.Split.even(2).joining(joins=self.joins)

    def schedule(self, s: Any) -> None:
        turn = 0
        while ready := s.ready():
            pair = [op for op in ready if op.name == ready[0].name and not op.outer]
            turn += 1
            if len(pair) == 2 and turn % 2:
                s.execute(tuple(pair), lane=turn % s.lanes)
            else:
                s.execute(ready[0], lane=turn % s.lanes)

    def __repr__(self) -> str:
        return "Together()"


STRATEGIES: dict[str, Callable[[], Any]] = {
    "sequential": dfx.Sequential,
    "nano_2": lambda: dfx.NanoBatch(2),
    "branches": dfx.Branches,
    "nano_uneven": lambda: dfx.NanoBatch([4, 2]),
    "together": Together,
    "nano_rows": lambda: dfx.NanoBatch([1, ROWS - 1], assume_separable=True),
    "dual_batch": dfx.DualBatch,
    "auto": lambda: dfx.Auto(budget_s=0.02, min_cost_ns=0.0),
}

SPLITS = {"nano_2", "nano_uneven", "together", "nano_rows", "dual_batch"}
PROVED = SPLITS - {"nano_rows"}

REFUSING: dict[str, Callable[[], Any]] = {
    "nano_2": lambda: dfx.NanoBatch(2, joins=False),
    "nano_uneven": lambda: dfx.NanoBatch([4, 2], joins=False),
    "together": lambda: Together(joins=False),
    "dual_batch": lambda: dfx.DualBatch(joins=False),
}
