"""How much work operators are, counted in one way for every framework; rates are the frontends' own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from dynaflow_xla import machine

LOOP_TRIPS = 100
"""Assumed trip count of a while loop, which its program does not tell."""

_SHARED = ("products", "convolutions", "elements", "rows")


class Spread(NamedTuple):
    """What more cores than one share of an operator's time: nanoseconds of one core, by kind of work.

    The rest runs on one core, however many there are: sorts, scans' steps one after another, factorizations,
    and whatever is too short to be handed out.

    Attributes:
        products: Matrix products.
        convolutions: Convolutions.
        elements: Loops over elements that XLA shares out: memory bounds them.
        rows: Any loops that PyTorch shares out, over rows or elements.
        forks: How often work is handed out to several cores and waited for. What is short is so, too, if the
            framework does not ask whether it pays.
        steps: How many short steps end with a meeting of all threads that share them, of steps that lose
            ``machine.Numbers.step_ns`` for each further thread.
        tiles: Products and convolutions that run on one core each, but may be shared out where they are
            fused with others: a planner that compares with the whole program cannot be sure.
    """

    products: float = 0.0
    convolutions: float = 0.0
    elements: float = 0.0
    rows: float = 0.0
    forks: float = 0.0
    steps: float = 0.0
    tiles: float = 0.0

    def times(self, factor: float) -> Spread:
        """That so often."""
        return Spread(*(part * factor for part in self))

    def saved_ns(self, cores: int) -> float:
        """Nanoseconds by which so many cores are faster than one; negative where forks cost more."""
        if cores <= 1:
            return 0.0
        numbers = machine.numbers()
        shared: list[tuple[str, float]] = [(kind, getattr(self, kind)) for kind in _SHARED]
        gained = sum(ns * numbers.saved(kind, cores) for kind, ns in shared if ns)
        return gained - self.forks * numbers.fork_ns - self.steps * numbers.step_ns * (cores - 1)

    def blas_ns(self, cores: int) -> float:
        """Nanoseconds that threads of products save; negative where those of LAPACK cost more."""
        return self.products * machine.numbers().saved("products", cores)

    def unsure_ns(self, cores: int) -> float:
        """Nanoseconds that so many cores save besides, if all ``tiles`` are shared out."""
        return self.tiles * machine.numbers().saved("products", cores)


NO_SPREAD = Spread()


def spread_over(spreads: Iterable[Spread]) -> Spread:
    """One after another."""
    return Spread(*(sum(parts) for parts in zip(NO_SPREAD, *spreads, strict=True)))


class Work(NamedTuple):
    """What an operator takes.

    Attributes:
        flops: Operations.
        bytes_moved: Read and written.
        ns: On one core.
        spread: What of these more cores share.
    """

    flops: float = 0.0
    bytes_moved: int = 0
    ns: float = 0.0
    spread: Spread = NO_SPREAD

    def times(self, count: int) -> Work:
        """That so often."""
        return Work(
            self.flops * count, self.bytes_moved * count, self.ns * count, self.spread.times(count)
        )


def together(works: Iterable[Work]) -> Work:
    """One after another."""
    flops, moved, ns = 0.0, 0, 0.0
    spreads = []
    for work in works:
        flops, moved, ns = flops + work.flops, moved + work.bytes_moved, ns + work.ns
        spreads.append(work.spread)
    return Work(flops, moved, ns, spread_over(spreads))


def longest(works: Iterable[Work]) -> Work:
    """Of the branches of a condition the one that takes longest."""
    return max(works, key=lambda work: work.ns)


def comparisons(size: int, length: int) -> float:
    """Of a sort of so many elements in rows of that length."""
    return size * math.log2(max(length, 2))


def fourier(size: int, length: int) -> float:
    """Operations of a fast Fourier transform over so many elements."""
    return 5.0 * size * max(1.0, math.log2(max(length, 2)))


_PRIME, _OF_PRIMES = 100, 8.0


def of_primes(lengths: Iterable[int]) -> float:
    """How many times as long transforms of such lengths take: large prime factors make them longer."""
    return _OF_PRIMES if max(map(_greatest_prime, lengths), default=1) > _PRIME else 1.0


def _greatest_prime(n: int) -> int:
    factor, greatest = 2, 1
    while factor * factor <= n:
        if n % factor:
            factor += 1
        else:
            n, greatest = n // factor, factor
    return max(n, greatest)
