"""How many integers are below known bounds: what a search among sorted integers finds, and sums of it.

Whether an integer is below a bound depends on it alone, so that each such number is a sum over the batch.
Sizes of groups are differences of these, and say which group an item is in by the item's own integer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dynaflow_xla.batch.states import Below, InOrder, Key, State, SummedBy, is_zero

Terms = tuple[tuple[int, int], ...]


def searched(items: State, bounds: Sequence[int], origin: SummedBy, *, after: bool) -> Below | None:
    """Where bounds belong among sorted integers.

    Args:
        items: The integers, along one axis.
        bounds: What is searched for.
        origin: The operator.
        after: Behind the integers that are equal to a bound; else in front of these.
    """
    if not isinstance(items, InOrder) or not items.rising or items.key is None:
        return None
    if items.rows.outer * items.rows.inner != 1 or items.rows.power or items.rows.fill is not None:
        return None
    key = items.key
    return Below(key, origin, tuple(_settled({b + after: 1}, key) for b in bounds))


def _settled(found: dict[int, int], key: Key) -> Terms:
    """Bounds that tell nothing left out: no integer is below the lowest."""
    known: Counter[int] = Counter()
    for bound, times in found.items():
        if key.low is None or bound > key.low:
            known[bound if key.high is None else min(bound, key.high + 1)] += times
    return tuple(sorted((b, n) for b, n in known.items() if n))


def added(states: Sequence[State], signs: Sequence[int], length: int) -> Below | None:
    """Sums and differences of such numbers and of zeros, element by element."""
    first = next(s for s in states if isinstance(s, Below))
    totals: list[Counter[int]] = [Counter() for _ in range(length)]
    for state, sign in zip(states, signs, strict=True):
        if is_zero(state):
            continue
        if not isinstance(state, Below) or state.key is not first.key or state.terms is None:
            return None
        if len(state.terms) != length:
            return None
        for total, terms in zip(totals, state.terms, strict=True):
            for bound, times in terms:
                total[bound] += sign * times
    return Below(first.key, first.origin, tuple(_settled(t, first.key) for t in totals))


def joined(states: Sequence[State], lengths: Sequence[int]) -> Below | None:
    """Such numbers and zeros, one after another."""
    first = next(s for s in states if isinstance(s, Below))
    made: list[Terms] = []
    for state, length in zip(states, lengths, strict=True):
        if is_zero(state):
            made += [()] * length
        elif isinstance(state, Below) and state.key is first.key and state.terms is not None:
            made += state.terms
        else:
            return None
    return Below(first.key, first.origin, tuple(made))


def taken(state: Below, chosen: slice) -> Below | None:
    """Some of such numbers."""
    if state.terms is None:
        return None
    return Below(state.key, state.origin, state.terms[chosen])


def running(state: Below) -> Below | None:
    """Running totals of such numbers."""
    if state.terms is None:
        return None
    total: Counter[int] = Counter()
    made = []
    for terms in state.terms:
        for bound, times in terms:
            total[bound] += times
        made.append(_settled(total, state.key))
    return Below(state.key, state.origin, tuple(made))


def divides(sizes: Below) -> bool:
    """Whether these are sizes of groups that sorted items fall into by their own integers.

    That is so where each group ends behind all integers below a bound, and no bound is below the one before:
    an item lies before the end of a group if and only if its integer is below that bound.
    """
    ends = running(sizes)
    last: int | None = None
    for terms in () if ends is None or ends.terms is None else ends.terms:
        if terms and (len(terms) > 1 or terms[0][1] != 1):
            return False
        bound = terms[0][0] if terms else None  # None: no integer is below
        if last is not None and (bound is None or bound < last):
            return False
        last = bound
    return ends is not None
