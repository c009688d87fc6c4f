"""Decisions of one callable whose calls differ in sizes: which are made, and which are taken from others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.frontends.torch.tuning import call_signature, one_thread
from dynaflow_xla.machine import distance
from dynaflow_xla.tuning import decisions
from dynaflow_xla.tuning.autotune import the
from dynaflow_xla.tuning.choice import Choice

_MAX_KINDS = 1024
_MAX_ONCE = 4096

_MOST_ALIKE, _MOST_SIZES = 4, 64
"""So many sizes of one magnitude are decided for, and of all magnitudes; further ones take a decision."""


@dataclass
class _Kind:
    """What is known of signatures that differ in sizes only.

    Attributes:
        once: What sizes take that come for the first time: the last decision.
        further: The same, for sizes that are too many.
        sizes: How often was decided.
    """

    once: Choice
    further: Choice
    sizes: int = 0


@dataclass
class _Alike:
    """What is known of those whose sizes are of one magnitude, too.

    Attributes:
        kind: Of all magnitudes.
        further: The last decision, as sizes that are too many take it.
        sizes: How often was decided.
    """

    kind: _Kind
    further: Choice | None = None
    sizes: int = 0

    def closed(self) -> Choice | None:
        """What an undecided size takes that is not decided for any more; None: it may be."""
        if self.sizes >= _MOST_ALIKE or self.kind.sizes >= _MOST_SIZES:
            return self.further or self.kind.further
        return None


class Decisions(decisions.Decisions[Choice]):
    """Auto's decisions of one callable, by signature.

    Sizes that come for the first time take what was decided for others, and are decided for when they
    come again: a cache of keys and values that grows has new sizes at every call, each of which would
    pay for a decision and none gain by it. For the same reason they take no nano-batches, which are
    planned for each size, unless nano-batches are what the user asked for: then without a compiler.
    And a counter of steps, or such a cache, may have the same sizes again in each epoch or layer: of sizes
    between the same powers of two only some are decided for.

    Args:
        unmeasured: What runs where nothing was measured, from the reason; by default the original.
    """

    def __init__(self, unmeasured: Callable[[str], Choice] | None = None) -> None:
        super().__init__(unmeasured or partial(Choice, None))
        self._kinds: Recent[Any, _Kind] = Recent(_MAX_KINDS)
        self._alike: Recent[Any, _Alike] = Recent(_MAX_KINDS)
        self._once: Recent[Any, Choice] = Recent(_MAX_ONCE)
        # The same of what waits for near cores, as long as nothing is decided.
        self._waiting: Recent[Any, Choice] = Recent(_MAX_KINDS)
        self._looked = -math.inf

    def get(self, signature: Any) -> Choice | None:
        """What was decided, or what other sizes decided; None before the first call."""
        if (made := self.decided(signature)) is not None:
            return made
        alike = self._of_alike(signature)
        return (alike and alike.closed()) or self._once.get(signature)

    def _of_alike(self, signature: Any) -> _Alike | None:
        key = call_signature.of_magnitude(signature)
        if (found := self._alike.get(key)) is not None:
            return found
        kind = self._kinds.get(call_signature.without_sizes(signature))
        return None if kind is None else self._alike.setdefault(key, _Alike(kind))

    def of_other_sizes(self, signature: Any, *, original: bool = False) -> Choice | None:
        """For sizes that come for the first time, or are too many: the decision for others, if there is one.

        Args:
            signature: Nothing is decided for it.
            original: Only if that is the original; else nothing happens.
        """
        if self.waits_for_near(signature):
            return None
        if (alike := self._of_alike(signature)) is None:
            return None if original else self._of_those_that_wait(signature)
        found = alike.closed() or alike.kind.once
        if original and found.child is not None:
            return None
        if found is alike.kind.once:
            if signature in self._once:
                return None
            self._once[signature] = found
        return found

    def _of_those_that_wait(self, signature: Any) -> Choice | None:
        found = self._waiting.get(call_signature.without_sizes(signature))
        if found is None or self._may_be_near() or signature in self._once:
            return None  # this one may be decided
        self._once[signature] = made = self._taken(found, "these sizes came once")
        return made

    def _taken(self, found: Choice, why: str) -> Choice:
        # One thread may be right for small sizes only.
        only = found.child is not None and (
            found.child.splits or found.candidate == one_thread.NAME
        )
        taken = self._unmeasured("") if only else found
        reason = f"{why}: {the(taken.name)} runs, after {the(found.name)} for other sizes"
        return Choice(taken.child, reason, candidate=taken.candidate)

    def wait_for_near(self, signature: Any, made: Choice, times: int) -> None:
        """Other sizes do with it what they do with a decision, as long as there is none and cores are far."""
        super().wait_for_near(signature, made, times)
        self._once.pop(signature)
        self._waiting[call_signature.without_sizes(signature)] = made

    def _may_be_near(self) -> bool:
        """Whether the cores are near by now; looked at once a second."""
        now = time.monotonic()
        if now < self._looked + 1.0:
            return False
        self._looked = now
        return not distance.are_far()

    def put(self, signature: Any, choice: Choice) -> Choice:
        """Keeps a decision."""
        self._once.pop(signature)
        name = call_signature.without_sizes(signature)
        once = self._taken(choice, "these sizes came once")
        further = self._taken(
            choice, "enough sizes like these were decided for (dfx.tune decides for these, too)"
        )
        kind = self._kinds.setdefault(name, _Kind(once, further))
        alike = self._alike.setdefault(call_signature.of_magnitude(signature), _Alike(kind))
        alike.kind, alike.further = kind, further
        kind.once, kind.further = once, further
        alike.sizes += 1
        kind.sizes += 1
        self._waiting.pop(name)
        return super().put(signature, choice)
