"""Which sizes of its arguments the sizes of a call's results are, learned from calls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class SizeProduct:
    """A size: the product of some neighbouring sizes of an argument, or a constant.

    Attributes:
        argument: Which tensor; -1 for a constant.
        first: Its first dimension that counts, or the constant.
        end: The dimension behind the last that counts.
    """

    argument: int
    first: int
    end: int = 0

    def at(self, shapes: Sequence[Sequence[Any]]) -> Any:
        """The size for arguments of these shapes."""
        if self.argument < 0:
            return self.first
        return math.prod(shapes[self.argument][self.first : self.end])


@dataclass(frozen=True)
class Seen:
    """The shapes of a call's tensors, and of its results'."""

    given: tuple[tuple[int, ...], ...]
    made: tuple[tuple[int, ...], ...]


def _candidates(seen: Seen, result: int, axis: int) -> Iterator[SizeProduct]:
    """What a size may be, the likeliest first."""
    wanted, rank = seen.made[result][axis], len(seen.made[result])
    order = sorted(range(len(seen.given)), key=lambda n: len(seen.given[n]) != rank)
    for number in order:
        if axis < len(seen.given[number]) and seen.given[number][axis] == wanted:
            yield SizeProduct(number, axis, axis + 1)
    for number in order:
        for dim, size in enumerate(seen.given[number]):
            if size == wanted:
                yield SizeProduct(number, dim, dim + 1)
    for number in order:
        shape = seen.given[number]
        for first in range(len(shape)):
            for end in range(first + 2, len(shape) + 1):
                if math.prod(shape[first:end]) == wanted:
                    yield SizeProduct(number, first, end)
    yield SizeProduct(-1, wanted)


def learned(seen: Sequence[Seen]) -> tuple[tuple[SizeProduct, ...], ...] | None:
    """For each result its sizes, as all calls have them (one at least); None if no rule holds for all."""
    first = seen[0]
    if any(tuple(map(len, s.made)) != tuple(map(len, first.made)) for s in seen):
        return None
    found: list[tuple[SizeProduct, ...]] = []
    for result, shape in enumerate(first.made):
        sizes: list[SizeProduct] = []
        for axis in range(len(shape)):
            fits = (
                c
                for c in _candidates(first, result, axis)
                if all(c.at(s.given) == s.made[result][axis] for s in seen)
            )
            size = next(fits, None)
            if size is None:
                return None
            sizes.append(size)
        found.append(tuple(sizes))
    return tuple(found)
