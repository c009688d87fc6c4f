"""IOS: the best division of a network into stages, by dynamic programming.

Paper: Ding et al., "IOS: Inter-Operator Scheduler for CNN Acceleration", MLSys 2021, arXiv:2011.01302.

Taken: dynamic programming over what is done so far: a stage is a set of operators that may run now, each on
a lane of its own, and takes as long as its longest; what remains is divided in the best way. Not taken:
merging of operators with one input (a rewrite of the model), measured costs of stages (estimates stand for
them; ``dfx.tune`` measures whole plans), and groups of several operators, since regions are chains already.
Stages are made of the ready operators with the longest paths behind them, four for each lane, and after
``most`` of these stages the rest is divided greedily.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, combinations, count, islice
from typing import Any

import dynaflow_xla as dfx


@dataclass(frozen=True)
class IOS(dfx.Strategy):
    """Stages by dynamic programming (Ding et al., MLSys 2021).

    Args:
        most: Stages to look at before the rest is divided greedily.
    """

    most: int = 32768

    def schedule(self, s: dfx.Recorder) -> None:
        """Finds the stages, the cheapest division first, then executes one after the other."""
        heap, seen, number = list[Any]([(0.0, 0, frozenset(), ())]), set[Any](), count(1)
        while len((best := heappop(heap))[2]) < len(s.handles):
            cost, _, done, stages = best
            if done not in seen:
                seen.add(done)
                waiting = [h for h in s.handles if h.id not in done and h.needs <= done]
                ready = sorted(waiting, key=lambda h: -h.priority)[: 4 * s.lanes]
                least, most = 1, min(s.lanes, len(ready))
                if next(number) > self.most:
                    heap, ready, least = [], ready[:most], most
                stages_now = chain(*(combinations(ready, n) for n in range(least, most + 1)))
                for stage in islice(stages_now, max(1, self.most)):
                    after = cost + max(h.cost_ns for h in stage), next(number)
                    heappush(heap, (*after, done | {h.id for h in stage}, (*stages, stage)))
        for lane, h in chain(*map(enumerate, best[3])):
            s.execute(h, lane=lane)
