"""``stats``: what this process did so far."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from dynaflow_xla.watching import telling


@dataclass(frozen=True)
class Stats:
    """Counts of this process, since it began or since they were reset.

    Attributes:
        lane_calls: Runs on the engine's lanes: one for each part of a call between two outer regions.
            Calls that are one XLA program, the original, or one lane of PyTorch's do not come here.
        lane_failures: Of these, how many ended with an error.
        slow_calls: Of these, how many the watchdog reported.
        copied_bytes: Copied by lane programs from lane to lane and to results.
        lane_threads: Threads of lanes now.
        live_calls: Runs on lanes now.
        scratch_bytes: Memory of values that cross lanes, shared by all plans: what calls have now, and what
            is kept for the next one.
        plans: Plans made (of Auto's candidates, too).
        compiles: Lane programs, XLA programs of plans under Auto, and regions compiled.
        compile_ns: What compiling took.
        decisions: Decisions of Auto.
        decisions_from_disk: Of these, how many an earlier process had made.
        fallbacks: Warnings that something runs in a plainer way than asked for.
        refused_caches: Folders and files of the cache that were not trusted.
        selected: Calls for which a ``select`` chose, and programs that it was traced into.
        switches: Of these, how many chose another plan than the one before, of the same function.
    """

    lane_calls: int = 0
    lane_failures: int = 0
    slow_calls: int = 0
    copied_bytes: int = 0
    lane_threads: int = 0
    live_calls: int = 0
    scratch_bytes: int = 0
    plans: int = 0
    compiles: int = 0
    compile_ns: int = 0
    decisions: int = 0
    decisions_from_disk: int = 0
    fallbacks: int = 0
    refused_caches: int = 0
    selected: int = 0
    switches: int = 0

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in dataclasses.asdict(self).items())


_NOW = ("lane_threads", "live_calls", "scratch_bytes")
"""What is, not what was counted: a reset leaves it."""

_before: dict[str, int] = {}


def stats(reset: bool = False) -> Stats:
    """What ``dynaflow_xla.stats`` returns."""
    engine: Any = sys.modules.get("dynaflow_xla.ffi._engine")
    found = telling.counts()
    if engine is not None:
        made = engine.stats()
        found |= {
            "lane_calls": made["calls"],
            "lane_failures": made["failures"],
            "slow_calls": made["reports"],
            "copied_bytes": made["copied_bytes"],
            "lane_threads": made["threads"],
            "live_calls": made["live"],
            "scratch_bytes": made.get("scratch_bytes", 0),
        }
    since = {name: found[name] - _before.get(name, 0) for name in found if name not in _NOW}
    if reset:
        _before.clear()
        _before.update(found)
    return Stats(**(found | since))
