"""``profile``: the regions of a call with time stamps, as a timeline; and whole calls, timed in turns."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch.capture import marks
from dynaflow_xla.frontends.torch.commands import wait
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.frontends.torch.dynamo import running
from dynaflow_xla.frontends.torch.tuning import keeping
from dynaflow_xla.strategies.one_lane import OneLane
from dynaflow_xla.timelines.measured import Measured, fastest
from dynaflow_xla.timelines.timeline import Timeline


def profile(fast: Core, args: Any, kwargs: Any) -> Timeline:
    """The timeline of ``dynaflow_xla.profile``: the regions run one by one, without fusing their steps."""
    return _profile(fast.target(args, kwargs), args, kwargs)


def _profile(target: Core, args: Any, kwargs: Any) -> Timeline:
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


def alone(fast: Core, args: Any, kwargs: Any) -> Timeline:
    """As ``profile``, of the plan's regions one after another on one lane of one core."""
    target = fast.target(args, kwargs)
    options = replace(
        target.options, strategy=OneLane(target.options.strategy), lanes=1, lane_cores=1
    )
    return _profile(type(target)(target.original, options), args, kwargs)


def timed(fast: Core, args: Any, kwargs: Any, rounds: int) -> tuple[list[int], list[int]]:
    """Nanoseconds of calls on copies, in turns: of the original and of the plan.

    Raises:
        UnsupportedError: a call changes what cannot be put back.
    """
    target = fast.target(args, kwargs)
    target.planned(args, kwargs)
    if lasting := target.changes.lasting(target.original):
        raise UnsupportedError(
            f"a call of {target.options.name!r} changes what cannot be put back ({', '.join(lasting)})"
        )

    def original(*a: Any, **k: Any) -> Any:
        with marks.ignore():
            return target.original(*a, **k)

    def once(call: Any) -> int:
        with keeping.preserved(target.original, target.changes, args, kwargs):
            a, k = keeping.copies((args, kwargs))
            start = time.perf_counter_ns()
            wait(call(*a, **k))
            return time.perf_counter_ns() - start

    calls = (original, lambda *a, **k: target.call(a, k))
    for call in calls:
        once(call), once(call)
    each = [(once(calls[0]), once(calls[1])) for _ in range(rounds)]
    return [ns for ns, _ in each], [ns for _, ns in each]


def _length(timeline: Timeline) -> int:
    return timeline.total_ns
