"""``profile``: the regions of a call with time stamps, as a timeline."""

from __future__ import annotations

from typing import Any

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.frontends.torch.dynamo import running
from dynaflow_xla.frontends.torch.tuning import keeping
from dynaflow_xla.timelines.measured import Measured, fastest
from dynaflow_xla.timelines.timeline import Timeline


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

        def once() -> Timeline:
            put_back()
            timelines.clear()
            target.call(*keeping.copies((args, kwargs)))
            if not timelines:
                raise UnsupportedError(f"{target.options.name!r} did not run a captured graph")
            return min(timelines, key=_length)

        return fastest(once, _length)


def _length(timeline: Timeline) -> int:
    return timeline.total_ns
