"""Conditions on where a batch is cut: sizes keep to them, or an error says why none can."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.strategies.base import Context, sizes_of
from dynaflow_xla.strategies.splits.conditions import Conditions


def sizes(strategy: dfx.Strategy, rows: int, **user: Any) -> tuple[int, ...]:
    return sizes_of(strategy, Context(rows, (), "cpu", 2, user))[0]


@pytest.mark.parametrize(
    ("strategy", "rows", "expected"),
    [
        (dfx.NanoBatch(2, align=16), 64, (32, 32)),
        (dfx.NanoBatch(2, align=16), 40, (16, 24)),
        (dfx.NanoBatch(3, align=8), 25, (8, 8, 9)),
        (dfx.NanoBatch([16, 32, 5], align=16), 53, (16, 32, 5)),
        (dfx.NanoBatch(2, boundaries=[0, 3, 9, 12]), 12, (3, 9)),
        (dfx.NanoBatch(2, boundaries=[5, 6]), 12, (6, 6)),
        (dfx.NanoBatch(2, boundaries=[4, 6, 8], align=4), 12, (4, 8)),
        (dfx.NanoBatch(2, weights=[9, 1, 1, 1, 1, 5]), 6, (1, 5)),
        (dfx.NanoBatch(2, weights=[9, 1, 1, 1, 1, 5], align=2), 6, (2, 4)),
        (dfx.NanoBatch(2, weights=[1, 1, 9, 1], boundaries=[1, 2]), 4, (2, 2)),
        (dfx.NanoBatch(2, weights=[0] * 8), 8, (4, 4)),
        (dfx.NanoBatch(3, weights=[0] * 12, align=2), 12, (4, 4, 4)),
        (dfx.NanoBatch([2, 2], boundaries=(2,)), 4, (2, 2)),
        (dfx.NanoBatch(1, align=7), 4, ()),
        (dfx.DualBatch(align=8), 20, (8, 12)),
        (dfx.NanoBatch(2, uneven=True), 12, (6, 6)),
    ],
)
def test_sizes_keep_to_conditions(
    strategy: dfx.Strategy, rows: int, expected: tuple[int, ...]
) -> None:
    assert sizes(strategy, rows) == expected


def test_requests_and_work_from_the_context() -> None:
    strategy = dfx.NanoBatch(2, boundaries="starts", weights="tokens")
    assert repr(strategy) == "NanoBatch(2, weights='tokens', boundaries='starts')"
    got = sizes(strategy, 6, starts=np.array([0, 1, 4]), tokens=np.array([1, 1, 1, 1, 8, 8]))
    assert got == (4, 2)
    with pytest.raises(
        dfx.PlanError, match=r"reads boundaries from context\['starts'\]; the context has"
    ):
        sizes(strategy, 6, tokens=[1] * 6)
    with pytest.raises(dfx.PlanError, match="one for each boundary; got 3"):
        sizes(strategy, 6, tokens=[1] * 6, starts=3)


@pytest.mark.parametrize(
    ("strategy", "rows", "words"),
    [
        (dfx.NanoBatch(4, align=16), 40,
         r"NanoBatch\(4, align=16\): 4 nano-batches of 40 rows need 3 cuts, and a nano-batch may begin only "
         r"at row 16, 32 \(beginning at multiples of 16 rows\): at most 3 nano-batches"),
        (dfx.NanoBatch(2, align=64), 40, "may begin at no row but the first"),
        (dfx.NanoBatch([8, 8], align=16), 16,
         r"nano-batch 1 of \[8, 8\] rows begins at row 8, where none may begin \(beginning at multip"),
        (dfx.NanoBatch([5, 7], boundaries=[3, 9]), 12, "begins at row 5.*nearest rows that may: 3, 9"),
        (dfx.NanoBatch(2, boundaries=[3, 13]), 12, "boundaries go to row 13, and the batch has 12 rows"),
        (dfx.NanoBatch(2, boundaries=[0, 12]), 12, "at no row but the first .beginning at 2 given"),
        (dfx.NanoBatch(2, boundaries=[3, 5], align=2), 12, "at no row but the first"),
        (dfx.NanoBatch(2, weights=[1, 2, 3], align=2), 4, "work is given for 3 rows, and the batch has 4"),
    ],
)  # fmt: skip
def test_what_no_split_can_meet(strategy: dfx.Strategy, rows: int, words: str) -> None:
    with pytest.raises(dfx.PlanError, match=words):
        sizes(strategy, rows)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dfx.NanoBatch(2, align=0), "align must be an integer >= 1, a number of rows; got 0"),
        (lambda: dfx.NanoBatch(2, align=1.5), "align must be an integer"),  # type: ignore[arg-type]
        (lambda: dfx.NanoBatch(2, boundaries=[4, 4]), "each after the one before; got .4, 4."),
        (lambda: dfx.NanoBatch(2, boundaries=[-1, 4]), "rows from 0 on"),
        (lambda: dfx.NanoBatch(2, boundaries=[0.5]), "must be integers, the rows at which requests begin"),
        (lambda: dfx.NanoBatch(2, boundaries=3), "boundaries must be numbers, or the key"),
        (lambda: dfx.NanoBatch(2, weights=[1, -1]), "finite and not negative"),
        (lambda: dfx.NanoBatch(2, assume_separable="no"), "assume_separable must be True or False"),  # type: ignore[arg-type]
        (lambda: dfx.Split.even(2, assume_separable=1), "assume_separable must be True or False"),  # type: ignore[arg-type]
        (lambda: dfx.NanoBatch(2, uneven=1), "uneven must be True or False"),  # type: ignore[arg-type]
        (lambda: dfx.NanoBatch([1, 1], uneven=True), "sizes or uneven=True, not both"),
        (lambda: dfx.NanoBatch([1, 1], weights="w"), "sizes or weights, not both"),
        (lambda: dfx.Split.of_sizes([1, 1]).under(work=[1, 1]), "work and uneven= decide on them; not both"),
    ],
)  # fmt: skip
def test_conditions_that_cannot_be(make: Any, words: str) -> None:
    with pytest.raises(dfx.PlanError, match=words):
        make()


def test_a_strategy_of_ones_own_declares_conditions() -> None:
    class Mine(dfx.Strategy):
        def split(self, ctx: Any) -> dfx.Split:
            return dfx.Split.even(3).under(align=4, work=range(16))

    assert sizes(Mine(), 16) == (8, 4, 4)


def test_random_conditions_are_met_or_refused() -> None:
    """Against all cuts there are: met if any is; and no other cut moved alone comes nearer."""
    draw = random.Random(0)
    for _ in range(400):
        batch, count, align = draw.randint(1, 24), draw.randint(1, 5), draw.choice([1, 1, 2, 3, 8])
        among = range(batch + 1)
        bounds = (
            tuple(sorted(draw.sample(among, draw.randint(0, batch))))
            if draw.random() < 0.5
            else None
        )
        work = (
            tuple(draw.choice([0.0, 1.0, 5.0]) for _ in range(batch)) if draw.random() < 0.5 else ()
        )
        asked = Conditions(align, bounds, work)
        may = [n for n in range(1, batch) if n % align == 0 and (bounds is None or n in bounds)]
        if len(may) < count - 1:
            with pytest.raises(dfx.PlanError, match=f"at most {len(may) + 1} nano-batches"):
                asked.sizes(batch, count)
            continue
        made = asked.sizes(batch, count)
        assert len(made) == count and sum(made) == batch and min(made) > 0
        assert set(accumulate(made[:-1])) <= set(may)
        asked.check(made)
        for tried in asked.tried(batch, count):
            asked.check(tried)


@pytest.mark.parametrize("share", [4.0, 2.0, 0.25])
def test_many_nano_batches_of_growing_shares(share: float) -> None:
    """The largest of so many shares is no float: they are those of the largest one."""
    made = Conditions(uneven=True).sizes(1300, 1200, share)
    assert sum(made) == 1300 and len(made) == 1200 and min(made) == 1
    few = Conditions(uneven=True).sizes(84, 3, share)
    assert few == {4.0: (4, 16, 64), 2.0: (12, 24, 48), 0.25: (64, 16, 4)}[share]
