"""How far this process's two cores are from each other, which may change while it runs.

The cores of a virtual machine are threads of its host's, which the host moves. Within one core complex a
cache line goes to the other core and back in 50 to 150 ns, between two of them in 300 or more; on a
processor whose cores lie in one mesh it takes 130 to 260, which are one distance. What
programs share between threads takes longer then: seen for 10 to 15 seconds at a time, in an eighth of the
time, a decoder of 10 ms took 14 under plain ``jit``, 12 on two lanes and the same as before on one thread.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from dynaflow_xla import machine

FAR_NS, _MESH_FAR_NS = 200.0, 280.0
"""Round trips that take longer leave a core complex; in a mesh, a processor."""

_VARIES = 2.0
"""By so much do round trips over one distance vary: twice the shortest one is no other distance."""

FOR_GOOD_S = 60.0
"""Cores that were never seen near for so long stay far: the process may be held to them."""

_shortest_ns = math.inf
_near_seen = False
_far_since: float | None = None


def round_trip_ns() -> float:
    """Nanoseconds to the other core and back; takes 0.1 to 1 ms, 10 on a busy machine.

    Returns:
        0.0 where that is not known: without the engine, on a machine too busy to tell, and where there are
        more cores than two, some of which are near and some are far.
    """
    engine: Any = sys.modules.get("dynaflow_xla.ffi._engine")
    if engine is None or machine.cores() != 2:
        return 0.0
    return float(engine.round_trip_ns())


def is_far(took_ns: float) -> bool:
    """Whether so long a round trip is one between cores that are far, by the shortest of this process."""
    global _shortest_ns
    if took_ns > 0:
        _shortest_ns = min(_shortest_ns, took_ns)
    return took_ns > min(max(FAR_NS, _VARIES * _shortest_ns), _MESH_FAR_NS)


def are_far() -> bool:
    """Whether the two cores are far from each other now."""
    global _near_seen, _far_since
    took = round_trip_ns()
    far = is_far(took)
    if far:
        _far_since = time.monotonic() if _far_since is None else _far_since
    elif took > 0:
        _near_seen = True
    return far


def may_come_near() -> bool:
    """Whether cores that are far now are so for a while only, as far as this process has seen."""
    return _near_seen or _far_since is None or time.monotonic() - _far_since < FOR_GOOD_S
