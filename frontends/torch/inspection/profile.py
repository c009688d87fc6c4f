"""``profile``: the regions of a call with time stamps, as a timeline; and whole calls, timed in turns."""

from __future__ import annotations

import time
from typing import Any

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.torch.capture import marks
from dynaflow_xla.frontends.torch.commands import wait
from dynaflow_xla.frontends.torch.core import Core
from dynaflow_xla.frontends.torch.dynamo import running
from dynaflow_xla.frontends.torch.native.entry import NativeEntry
from dynaflow_xla.frontends.torch.tuning import copying, keeping
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.timelines.measured import Measured, fastest
from dynaflow_xla.timelines.timeline import Timeline


def profile(fast: Core, args: Any, kwargs: Any) -> Timeline:
    """The timeline of ``dynaflow_xla.profile``: the regions run one by one, without fusing their steps."""
    target = fast.target(args, kwargs)
    entry = target.planned(args, kwargs)
    return _profile(target, args, kwargs, entry, entry.stamped(), entry.plan)


def _profile(
    target: Core, args: Any, kwargs: Any, entry: Any, runnable: Any, plan: Plan
) -> Timeline:
    """Of what has the entry's regions and stands in its place, by this plan."""
    timelines: list[Timeline] = []

    def run(inputs: list[Any]) -> list[Any]:
        prepare = getattr(entry, "prepare", None)
        inputs = inputs if prepare is None else prepare(inputs)
        measured = Measured(plan, entry.pg)
        # On a GPU lanes enqueue on its default stream, whatever stream the caller is on.
        wait(inputs)
        outputs = runnable.run(inputs, measured)
        wait(outputs)
        timelines.append(measured.timeline(target.options.name))
        finish = getattr(entry, "finish", None)
        return outputs if finish is None else finish(outputs)  # type: ignore[no-any-return]

    kept = keeping.preserved(target.original, target.changes, args, kwargs)
    with kept as put_back, running.observing(entry, run):

        def once() -> Timeline:
            put_back()
            timelines.clear()
            target.call(*copying.copies((args, kwargs)), planned=True)
            if not timelines:
                raise UnsupportedError(f"{target.options.name!r} did not run a captured graph")
            return min(timelines, key=_length)

        return fastest(once, _length)


def alone(fast: Core, args: Any, kwargs: Any, cores: int) -> Timeline | None:
    """As ``profile``, of the plan's regions one after another: each on one core, or on all (0).

    They are the entry's own, with whatever the schedule put in their place or joined.
    """
    target = fast.target(args, kwargs)
    entry = target.planned(args, kwargs)
    if isinstance(entry, NativeEntry):
        if cores == 0 and not entry.plan.cores:
            return None
        runnable = entry.one_by_one(wide=cores == 0)
        return _profile(target, args, kwargs, entry, runnable, runnable.plan)
    return _of_xla(target, args, kwargs, entry) if cores == 1 else None


def _of_xla(target: Core, args: Any, kwargs: Any, entry: Any) -> Timeline:
    """Of a graph that runs on XLA: the plan of the JAX program that it became."""
    from dynaflow_xla.frontends.torch.on_xla import looked_at

    found: list[Timeline | None] = []

    def run(inputs: Any) -> list[Any]:
        given = list(inputs)
        if not found:
            found.append(looked_at.alone(entry, given, target.options.name, 1))
        return entry(list(given))  # type: ignore[no-any-return]

    kept = keeping.preserved(target.original, target.changes, args, kwargs)
    with kept, running.observing(entry, run):
        target.call(*copying.copies((args, kwargs)), planned=True)
    if not found or found[0] is None:
        raise UnsupportedError(f"{target.options.name!r} did not run a captured graph")
    return found[0]


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
            a, k = copying.copies((args, kwargs))
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
