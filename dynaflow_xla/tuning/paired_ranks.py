"""An exact rank test of pairs: whether one of two is smaller so often, and by so much, by chance."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


def chance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How often two that are alike look so much as if the first were smaller.

    All values are ranked together (Conover and Iman 1981), and what is summed are the differences of ranks in
    the pairs. If both are alike, a pair could as well be the other way round: the p-value is the share of all
    such exchanges whose sum is as small (Fisher's and Pitman's permutation test), counted, not sampled. Equal
    values share the mean of their ranks, and a pair of equal values changes nothing.

    Two other tests of pairs see less in times, some of which are much too long now and then. The sign test
    does not know by how much a pair was won. Wilcoxon's signed ranks are those of the differences, where one
    outlier outweighs most pairs, and each of both makes outliers of its own; among all values it has the
    last rank, and no more.

    Args:
        ours: One value a pair.
        theirs: The other one.

    Returns:
        The one-sided p-value; 1.0 without any difference.
    """
    ordered = sorted([*ours, *theirs])

    def rank(value: float) -> int:
        return bisect_left(ordered, value) + bisect_right(ordered, value)  # twice the mean rank

    differences = [rank(a) - rank(b) for a, b in zip(ours, theirs, strict=True)]
    against = sum(d for d in differences if d > 0)
    # ways[s]: how many exchanges give those that are positive the sum s.
    ways = [1] + [0] * against
    for size in map(abs, differences):
        ways = [ways[s] + (ways[s - size] if s >= size else 0) for s in range(against + 1)]
    return sum(ways) / (1 << len(differences))
