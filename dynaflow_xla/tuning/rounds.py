"""Times of ways to run a function, taken in rounds, and what they tell of which is faster."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynaflow_xla.machine import distance
from dynaflow_xla.tuning import paired_ranks

CHANCE = 0.05
"""How often a candidate may be chosen that is as fast as the original. Of several each: divided among these,
five to eleven rounds would miss a third of the gains of a fifth that single long calls hide."""

MIN_ROUNDS = 3

FEW_ROUNDS = 5
"""Fewer rounds tell a median at most: one of them may be disturbed. See ``Medians.doubt``."""

_APART = 0.5
"""Of what rounds of one way differ by: how far three of the best of several have to lie from the others'."""

FAR_MARGIN = 0.25
"""What a candidate has to gain where the cores were far from each other, see ``distance``. The original
shares most between its threads: what gained a sixth over it then lost a tenth once they were near."""


def typical(values: Sequence[float]) -> float:
    """The median of the means of all pairs of values, each with itself, too (Hodges and Lehmann 1963).

    Plain programs have two speeds on some machines: their pool's threads wait for each other on one core in
    every third call. A median tells of the commoner one only; a mean, of what was disturbed once. Up to 29 %
    of the values may be anything. Of a few values, where one would be more than that, it is the median.
    """
    if len(values) < FEW_ROUNDS:
        return statistics.median(values)
    pairs = itertools.combinations_with_replacement(values, 2)
    return statistics.median((a + b) / 2 for a, b in pairs)


CLOSE_BELOW, CLOSE_ABOVE = 0.9, 1.06
"""Within these times of the fastest plain way's time a candidate is compared with it in rows of calls."""

_BESIDE, _MOST_BESIDE = 1.04, 2
"""So are further plain ways and candidates, within the first times of the fastest one's; so many of each."""


class Medians(dict[str, float]):
    """Milliseconds by candidate (see ``typical``), and the samples that they are of.

    Attributes:
        samples: Candidate -> milliseconds, one a round; the first rounds had all candidates.
        far: Whether the cores were far from each other then.
        least: The share of its time by which another way has to be beaten in any case.
        in_rows: Names whose samples are rows of calls, if there are any. These alone compare: the others
            were slower.
    """

    def __init__(
        self,
        samples: Mapping[str, Sequence[float]],
        far: bool = False,
        in_rows: Sequence[str] = (),
    ) -> None:
        super().__init__((name, typical(values)) for name, values in samples.items())
        self.samples = samples
        self.far = far
        self.in_rows = tuple(in_rows)
        self.least = FAR_MARGIN if far and distance.may_come_near() else 0.0

    def rounds_won(self, name: str, over: str) -> tuple[int, int]:
        """In how many rounds a candidate was faster than another one, and of how many."""
        pairs = list(zip(self.samples[name], self.samples[over], strict=False))
        return sum(a < b for a, b in pairs), len(pairs)

    def chance(self, name: str, over: str) -> float:
        """How often two that are equally fast differ so clearly: the p-value of a rank test."""
        ours, theirs = self.samples[name], self.samples[over]
        rounds = min(len(ours), len(theirs))
        return paired_ranks.chance(ours[:rounds], theirs[:rounds])

    def doubt(self, name: str, over: str) -> str:
        """Why it is not sure that a candidate is faster, or "".

        Fewer than five rounds are all that a budget allowed for slow calls. To win all of them is no rare
        chance (three: one in eight), and the best of several candidates has several. So each of its rounds
        has to be faster than each of the other's, which of two that are alike one is in one case of 20 with
        three rounds, of 70 with four; and where the best of several had three, by half of what the rounds of
        either differ by.
        """
        pairs = list(zip(self.samples[name], self.samples[over], strict=False))
        won, of = self.rounds_won(name, over)
        if of < FEW_ROUNDS:
            if won < of:
                return f"faster in {won} of {of} rounds only"
            ours, theirs = zip(*pairs, strict=True)
            apart = min(theirs) - max(ours)
            needed = max(max(ours) - min(ours), max(theirs) - min(theirs)) * _APART
            several = len(self.in_rows or self) > 2
            if apart > 0 and (apart >= needed or not several or of > MIN_ROUNDS):
                return ""
            return (
                f"faster in {won} of {of} rounds, which differ too much among each other for so few to tell "
                "(a larger budget_s has more)"
            )
        chance = self.chance(name, over)
        if chance <= CHANCE:
            return ""
        return (
            f"faster in {won} of {of} rounds; of two that are equally fast, one looks so much faster "
            f"with probability {chance:.2g} (rank test; at most {CHANCE:g})"
        )

    def beats(self, name: str, over: str, margin: float) -> bool:
        """Whether a candidate is faster by ``margin``, and more surely than chance explains."""
        if self.in_rows and not {name, over}.issubset(self.in_rows):
            return False
        return self[name] <= self[over] * (1 - max(margin, self.least)) and not self.doubt(
            name, over
        )

    def beside(self, baseline: str) -> list[str]:
        """What may run instead of it."""
        return [name for name in self.in_rows or self if name != baseline]

    def fastest(self, names: Iterable[str]) -> str:
        """Which of some ways is the fastest one, of those that compare."""
        names = list(names)
        compare = [name for name in names if name in self.in_rows]
        return min(compare or names, key=lambda name: self[name])

    def close(self, plain: Iterable[str], margin: float) -> list[str]:
        """The fastest of ``plain`` and the fastest candidate, if that is close to it or its gain is not sure.

        And what is close to each of the two. Nothing where there is nothing to compare further.
        """
        plain = list(plain)
        base = self.fastest(plain)
        others = sorted((n for n in self if n not in plain), key=lambda name: self[name])
        if not others or self[others[0]] > CLOSE_ABOVE * self[base]:
            return []
        best = others[0]
        sure = min(CLOSE_BELOW, 1 - max(margin, self.least)) * self[base]
        if self[best] < sure and not self.doubt(best, base):
            return []

        def near(first: str, of: Iterable[str]) -> list[str]:
            known = sorted(of, key=lambda name: self[name])
            return [n for n in known if self[n] <= _BESIDE * self[first]][:_MOST_BESIDE]

        return [*near(base, plain), *near(best, others)]

    def in_doubt(self, plain: Iterable[str], margin: float) -> list[str]:
        """The fastest of ``plain`` and the candidate that would be chosen were it sure; else nothing."""
        base = min(plain, key=lambda name: self[name])
        most = self[base] * (1 - max(margin, self.least))
        faster = [name for name in self if self[name] <= most]
        if not faster or any(not self.doubt(name, base) for name in faster):
            return []
        return [base, min(faster, key=lambda name: self[name])]


@dataclass(frozen=True)
class _Settled:
    samples: dict[str, list[float]]
    far: bool
    in_rows: tuple[str, ...] = ()


class Rounds:
    """Samples as they are taken. Rounds while the cores are far from each other are kept apart.

    Whoever is compared was sampled in the same rounds: in near ones, or in far ones.

    Args:
        names: The candidates.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._sampled = tuple(names)
        self._near: dict[str, list[float]] = {name: [] for name in self._sampled}
        self._far: dict[str, list[float]] = {name: [] for name in self._sampled}
        self._settled: _Settled | None = None
        self._before: Medians | None = None

    def begin(self) -> tuple[Sequence[str], dict[str, list[float]]]:
        """Who is sampled in the next round, and where the samples belong."""
        far = distance.are_far()
        if self._settled is None:
            return self._sampled, self._far if far else self._near
        if far == self._settled.far:
            return self._sampled, self._settled.samples
        return self._sampled, {name: [] for name in self._sampled}  # tells nothing of the others

    def drop(self, factor: float) -> int:
        """Samples those no more that are not this close to the fastest; how many are left.

        While the cores are far nobody is dropped: who is slow then need not be.
        """
        medians = self.medians()
        if not medians.far:
            most = factor * min(medians.values())
            close = tuple(name for name in self._sampled if medians[name] <= most)
            if close != self._sampled:
                kept = {name: list(values) for name, values in medians.samples.items()}
                self._sampled, self._settled = close, _Settled(kept, medians.far)
        return len(self._sampled)

    def compared_further(self, plain: Sequence[str], margin: float, *, in_rows: bool) -> list[str]:
        """Who alone is sampled from now on, if anybody.

        Args:
            plain: As for ``Medians.close``.
            margin: The same.
            in_rows: In rows of calls. Samples so far tell nothing of these; if there are too few rows, what
                was known before counts.
        """
        made = self.medians()
        names = made.close(plain, margin) if in_rows else made.in_doubt(plain, margin)
        if not names:
            return []
        rounds = 0 if in_rows else min(len(made.samples[name]) for name in names)
        samples = {name: list(values) for name, values in made.samples.items()}
        samples |= {name: samples[name][:rounds] for name in names}
        self._sampled, self._before = tuple(names), made
        self._settled = _Settled(samples, made.far, tuple(names) if in_rows else ())
        return names

    def medians(self) -> Medians:
        """Of the rounds in which the cores were near, if there are enough; else of the others."""
        settled = self._settled
        if settled is not None:
            few = min(len(settled.samples[name]) for name in self._sampled) < MIN_ROUNDS
            if few and self._before is not None:
                return self._before
            return Medians(settled.samples, settled.far, settled.in_rows)
        near, far = (
            min(len(samples[name]) for name in self._sampled) for samples in (self._near, self._far)
        )
        if near >= FEW_ROUNDS or near >= MIN_ROUNDS > far:
            return Medians(self._near)
        if far >= MIN_ROUNDS:
            return Medians(self._far, far=True)
        # So few of each that all have to count.
        both = {name: [*self._near[name], *self._far[name]] for name in self._near}
        return Medians(both, far=far > 0)
