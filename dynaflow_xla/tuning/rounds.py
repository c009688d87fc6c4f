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
"""Of fewer rounds the rank test tells nothing: they have to be won all."""

FAR_MARGIN = 0.25
"""What a candidate has to gain where the cores were far from each other, see ``distance``. The original
shares most between its threads: what gained a sixth over it then lost a tenth once they were near."""


def typical(values: Sequence[float]) -> float:
    """The median of the means of all pairs of values, each with itself, too (Hodges and Lehmann 1963).

    Plain programs have two speeds on some machines: their pool's threads wait for each other on one core in
    every third call. A median tells of the commoner one only; a mean, of what was disturbed once. Up to 29 %
    of the values may be anything.
    """
    pairs = itertools.combinations_with_replacement(values, 2)
    return statistics.median((a + b) / 2 for a, b in pairs)


class Medians(dict[str, float]):
    """Milliseconds by candidate (see ``typical``), and the samples that they are of.

    Attributes:
        samples: Candidate -> milliseconds, one a round; the first rounds had all candidates.
        far: Whether the cores were far from each other then.
    """

    def __init__(self, samples: Mapping[str, Sequence[float]], far: bool = False) -> None:
        super().__init__((name, typical(values)) for name, values in samples.items())
        self.samples = samples
        self.far = far

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

    def margin(self, margin: float) -> float:
        """The share of its time by which another way has to be beaten, to be beaten by ``margin``."""
        return max(margin, FAR_MARGIN) if self.far else margin

    def beats(self, name: str, over: str, margin: float) -> bool:
        """Whether a candidate is faster by ``margin``, and more surely than chance explains."""
        return self[name] <= self[over] * (1 - self.margin(margin)) and not self.doubt(name, over)

    def in_doubt(self, plain: Iterable[str], margin: float) -> list[str]:
        """The fastest of ``plain`` and the candidate that would be chosen were it sure; else nothing."""
        base = min(plain, key=lambda name: self[name])
        faster = [name for name in self if self[name] <= self[base] * (1 - self.margin(margin))]
        if not faster or any(not self.doubt(name, base) for name in faster):
            return []
        return [base, min(faster, key=lambda name: self[name])]


class Rounds:
    """Samples as they are taken. Rounds while the cores are far from each other are kept apart.

    Args:
        names: The candidates.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._sampled = tuple(names)
        self._near: dict[str, list[float]] = {name: [] for name in self._sampled}
        self._far: dict[str, list[float]] = {name: [] for name in self._sampled}

    def begin(self, names: Sequence[str]) -> dict[str, list[float]]:
        """Where the samples of the next round, of these candidates, belong."""
        self._sampled = tuple(names)
        return self._far if distance.are_far() else self._near

    def only(self, names: Sequence[str]) -> None:
        """From now on these alone are sampled, and of earlier rounds those count that had them all."""
        self._sampled = tuple(names)
        for samples in (self._near, self._far):
            rounds = min(len(samples[name]) for name in names)
            samples.update({name: samples[name][:rounds] for name in names})

    def medians(self) -> Medians:
        """Of the rounds in which the cores were near, if there are enough; else of the others."""
        near, far = (
            min(len(samples[name]) for name in self._sampled) for samples in (self._near, self._far)
        )
        if near >= FEW_ROUNDS or near >= MIN_ROUNDS > far:
            return Medians(_first_of(self._near, self._far))
        if far >= MIN_ROUNDS:
            return Medians(_first_of(self._far, self._near), far=True)
        # So few of each that all have to count.
        both = {name: [*self._near[name], *self._far[name]] for name in self._near}
        return Medians(both, far=far > 0)


def _first_of(
    samples: Mapping[str, list[float]], others: Mapping[str, list[float]]
) -> dict[str, list[float]]:
    """The samples; of candidates that were given up before there were any, the others."""
    return {name: taken or others[name] for name, taken in samples.items()}
