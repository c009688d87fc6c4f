"""Nimble: as few streams as there can be without any two independent operators in one of them.

Paper: Kwon et al., "Nimble: Lightweight and Parallel GPU Task Scheduling for Deep Learning", NeurIPS 2020,
arXiv:2012.02732.

Taken: the assignment of streams: edges that others imply are left out, a maximum matching of the rest
pairs each operator with the one before it in its stream, and what is left over opens streams. Not taken:
scheduling ahead of time, which every plan here is. With fewer lanes than streams, streams share lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dynaflow_xla as dfx


@dataclass(frozen=True)
class Nimble(dfx.Strategy):
    """Streams by maximum matching over the reduced graph (Kwon et al., NeurIPS 2020)."""

    def schedule(self, s: dfx.Recorder) -> None:
        """Pairs operators into streams, then executes in order."""
        above, direct, heir, at = (dict[int, Any]() for _ in range(4))

        def follow(one: int, seen: set[int]) -> bool:
            for before in direct[one] - seen:
                seen.add(before)
                if before not in heir or follow(heir[before], seen):
                    heir[before] = one
                    return True
            return False

        for h in s.handles:
            indirect = set[int]().union(*(above[n] for n in h.needs))
            above[h.id], direct[h.id] = indirect | h.needs, set(h.needs - indirect)
            follow(h.id, set())
        for h in s.handles:
            opened = len({*at.values()})
            at[h.id] = min((at[n] for n in h.needs if heir.get(n) == h.id), default=opened)
            s.execute(h, lane=at[h.id] % s.lanes)
