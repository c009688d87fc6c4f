"""Times of ways to run a function, taken in rounds, and what they tell of which is faster."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from dynaflow_xla.machine import distance
from dynaflow_xla.tuning import paired_ranks

CHANCE = 0.05
"""How often a candidate may be chosen that is as fast as the original."""

MIN_ROUNDS = 3

FEW_ROUNDS = 5
"""Fewer rounds have to be won all, and tell a median at most: one of them may be disturbed."""

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


class Medians(dict[str, float]):
    """Milliseconds by candidate (see ``typical``), and the samples that they are of.

    Attributes:
        samples: Candidate -> milliseconds, one a round; the first rounds had all candidates.
        far: Whether the cores were far from each other then.
        least: The share of its time by which another way has to be beaten in any case.
    """

    def __init__(self, samples: Mapping[str, Sequence[float]], far: bool = False) -> None:
        super().__init__((name, typical(values)) for name, values in samples.items())
        self.samples = samples
        self.far = far
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

        Fewer than five rounds cannot show it. They are all that a budget allowed for slow calls, and have to
        be won all.
        """
        won, of = self.rounds_won(name, over)
        if of < FEW_ROUNDS:
            return "" if won == of else f"faster in {won} of {of} rounds only"
        chance = self.chance(name, over)
        if chance <= CHANCE:
            return ""
        return (
            f"faster in {won} of {of} rounds; of two that are equally fast, one looks so much faster "
            f"with probability {chance:.2g} (rank test; at most {CHANCE:g})"
        )

    def beats(self, name: str, over: str, margin: float) -> bool:
        """Whether a candidate is faster by ``margin``, and more surely than chance explains."""
        return self[name] <= self[over] * (1 - max(margin, self.least)) and not self.doubt(
            name, over
        )

    def in_doubt(self, plain: Iterable[str], margin: float) -> list[str]:
        """The fastest of ``plain`` and the candidate that would be chosen were it sure; else nothing."""
        base = min(plain, key=lambda name: self[name])
        most = self[base] * (1 - max(margin, self.least))
        faster = [name for name in self if self[name] <= most]
        if not faster or any(not self.doubt(name, base) for name in faster):
            return []
        return [base, min(faster, key=lambda name: self[name])]


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
        self._settled: Medians | None = None

    def begin(self) -> tuple[Sequence[str], dict[str, list[float]]]:
        """Who is sampled in the next round, and where the samples belong."""
        far = distance.are_far()
        if self._settled is None:
            return self._sampled, self._far if far else self._near
        if far == self._settled.far:
            return self._sampled, self._settled.samples  # type: ignore[return-value]
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
                self._sampled, self._settled = close, medians
        return len(self._sampled)

    def only(self, names: Sequence[str]) -> None:
        """From now on these alone are sampled, and of earlier rounds those count that had them all."""
        made = self.medians()
        samples = {name: list(values) for name, values in made.samples.items()}
        rounds = min(len(samples[name]) for name in names)
        samples |= {name: samples[name][:rounds] for name in names}
        self._sampled, self._settled = tuple(names), Medians(samples, made.far)

    def medians(self) -> Medians:
        """Of the rounds in which the cores were near, if there are enough; else of the others."""
        if self._settled is not None:
            return Medians(self._settled.samples, self._settled.far)
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
