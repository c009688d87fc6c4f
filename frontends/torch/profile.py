"""``profile``: the regions of a call with time stamps, as a timeline."""

from __future__ import annotations

import time
from typing import Any

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.frontends.torch.dynamo import running
from dynaflow_xla.frontends.torch.tuning import keeping
from dynaflow_xla.timelines.measured import Measured
from dynaflow_xla.timelines.timeline import Timeline

# What other processes take away is no property of the plan: of this many runs, or as many as fit,
# the fastest counts.
_RUNS = 7
_MAX_SECONDS = 1.0


def profile(fast: Core, args: Any, kwargs: Any) -> Timeline:
    """The timeline of ``dynaflow_xla.profile``: the regions run one by one, without fusing their steps."""
    target = fast.target(args, kwargs)
    entry = target.planned(args, kwargs)
    runnable = entry.stamped()
    timelines: list[Timeline] = []

    def run(inputs: list[Any]) -> list[Any]:
        prepare = getattr(entry, "prepare", None)
        inputs = inputs if prepare is None else prepare(inputs)
        measured = Measured(entry.plan, entry.pg)
        outputs = runnable.run(inputs, measured)
        timelines.append(measured.timeline(target.options.name))
        finish = getattr(entry, "finish", None)
        return outputs if finish is None else finish(outputs)  # type: ignore[no-any-return]

    kept = keeping.preserved(target.original, target.changes, args, kwargs)
    with kept as put_back, running.observing(entry, run):
        target.call(*keeping.copies((args, kwargs)))  # the first run warms up
        if not timelines:
            raise UnsupportedError(f"{target.options.name!r} did not run a captured graph")
        timelines.clear()
        until = time.monotonic() + _MAX_SECONDS
        while not timelines or (len(timelines) < _RUNS and time.monotonic() < until):
            put_back()
            target.call(*keeping.copies((args, kwargs)))
    return min(timelines, key=lambda timeline: timeline.total_ns)
