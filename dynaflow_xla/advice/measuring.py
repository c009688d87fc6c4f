"""What ``why`` measures: calls in turns, each region on its own, regions in the plan."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dynaflow_xla.advice.costs import Given, matched, spread
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.timelines.timeline import Timeline

_NOISY = 0.25
"""Of the calls' median: where half of them differ by more, other programs run."""


def given(served: Any, args: Any, kwargs: Any, rounds: int | None) -> Given:
    """The plan of these arguments, and what was found out about it.

    Args:
        served: What answers for the scheduled callable.
        args: Of the call.
        kwargs: Of the call.
        rounds: Calls of the original and of the plan that are timed; None: nothing runs.

    Raises:
        UnsupportedError: calls have effects, so that they must not be repeated.
    """
    entry = served.planned(args, kwargs)
    notes = [aside] if (aside := served.beside_the_plan(args, kwargs)) else []
    known = Given(entry.plan, entry.pg, streams=entry.streams, caller_ns=entry.caller_ns)
    if rounds is None:
        return replace(known, notes=tuple(notes))
    original, scheduled = served.timed(args, kwargs, rounds)
    refused: dict[str, str] = {}

    def measured(what: str, run: Callable[[], Timeline | None]) -> Timeline | None:
        # Calls were timed, so nothing forbids to run them: it is this backend that cannot do this.
        try:
            return run()
        except UnsupportedError as error:
            refused.setdefault(str(error), what)
            return None

    regions = "what regions take on their own"
    alone, note = matched(entry.pg, measured(regions, lambda: served.alone(args, kwargs, 1)))
    wide, _ = matched(entry.pg, measured(regions, lambda: served.alone(args, kwargs, 0)))
    ran = measured("where regions run in the plan", lambda: served.profile(args, kwargs))
    notes += [note] if note else []
    notes += [f"{what} is estimated: {error}" for error, what in refused.items()]
    if (varied := max(spread(original), spread(scheduled))) > _NOISY:
        notes.append(
            f"half of the calls differ by {varied:.0%} or more: other programs run, and reasons that are "
            "measured may be theirs; ask again when the machine is quiet"
        )
    return replace(
        known, alone=alone, wide=wide, ran=ran, notes=tuple(notes),
        original_ns=statistics.median(original), scheduled_ns=statistics.median(scheduled),
        wins=sum(b < a for a, b in zip(original, scheduled, strict=True)) / rounds,
    )  # fmt: skip
