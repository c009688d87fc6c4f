"""The rank test of pairs: beside all exchanges tried out, and beside scipy."""

from __future__ import annotations

import itertools
import random

import pytest

from dynaflow_xla.tuning import paired_ranks


def tried_out(ours: list[float], theirs: list[float]) -> float:
    """The share of all exchanges in pairs that give the first ones ranks with a sum as small."""
    values = ours + theirs
    rank = {v: sum(w < v for w in values) + (values.count(v) + 1) / 2 for v in values}
    seen = sum(map(rank.__getitem__, ours))
    pairs = list(zip(ours, theirs, strict=True))
    sums = [sum(rank[pair[i]] for pair, i in zip(pairs, which, strict=True))
            for which in itertools.product((0, 1), repeat=len(pairs))]  # fmt: skip
    return sum(s <= seen for s in sums) / len(sums)


@pytest.mark.parametrize("values", [2, 4, 1000])
def test_the_chance_is_the_share_of_exchanges(values: int) -> None:
    """Few values make ties."""
    drawn = random.Random(values)
    for count in range(11):
        for _ in range(8):
            ours = [float(drawn.randint(0, values)) for _ in range(count)]
            theirs = [float(drawn.randint(values // 2, values + 1)) for _ in range(count)]
            want = tried_out(ours, theirs)
            assert paired_ranks.chance(ours, theirs) == pytest.approx(want, abs=1e-12)


def test_what_is_known_by_hand() -> None:
    chance = paired_ranks.chance
    assert chance([], []) == chance([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert chance([1.0], [2.0]) == 0.5
    assert chance([2.0], [1.0]) == 1.0
    assert chance([1.0] * 5, [2.0] * 5) == 1 / 32
    # Differences of ranks -5, -2 and 2: no larger are the sums with -5 but that of -5, 2 and 2.
    assert chance([1.0, 3.0, 5.0], [6.0, 4.5, 4.0]) == 3 / 8


def test_an_outlier_weighs_no_more_than_its_rank() -> None:
    ours = [0.9 + k / 1000 for k in range(10)]
    theirs = [1.0 + k / 1000 for k in range(11)]
    assert (
        paired_ranks.chance([*ours, 2.0], theirs)
        == paired_ranks.chance([*ours, 2e9], theirs)
        < 0.05
    )


@pytest.mark.parametrize("count", [5, 8, 10])
def test_it_is_scipys(count: int) -> None:
    stats, np = pytest.importorskip("scipy.stats"), pytest.importorskip("numpy")
    drawn = np.random.default_rng(count)
    for shift in (-1.0, -0.3, 0.0, 0.5):
        ours, theirs = drawn.normal(shift, 1.0, count), drawn.normal(0.0, 1.0, count)
        ranks = stats.rankdata(np.concatenate([ours, theirs]))
        want = stats.permutation_test(
            (ranks[:count], ranks[count:]), lambda a, b: np.sum(a - b),
            permutation_type="samples", alternative="less", n_resamples=np.inf,
        ).pvalue  # fmt: skip
        found = paired_ranks.chance(ours.tolist(), theirs.tolist())
        assert found == pytest.approx(want, rel=1e-9)
