"""What equal values say about a split that is not proved: of rows that are all alike, nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Batched(NamedTuple):
    """A batched input that a function reads.

    Attributes:
        name: For people.
        is_data: It has floating-point numbers, which are what data are made of.
        values: What a call gives.
        axis: Its batch axis.
    """

    name: str
    is_data: bool
    values: np.ndarray
    axis: int


def silent(inputs: Iterable[Batched], sizes: Sequence[int]) -> list[str]:
    """Names of inputs that say nothing of a split, or [] if a comparison on these decides.

    Data decide, each of them; where there are none, one of the others is enough (of flags and labels equal
    ones are common).

    Args:
        inputs: All that are batched and read.
        sizes: Rows of the nano-batches.
    """
    data: dict[str, bool] = {}
    others: dict[str, bool] = {}
    for name, is_data, values, axis in inputs:
        (data if is_data else others)[name] = tells(values, axis, sizes)
    if data:
        return [name for name, told in data.items() if not told]
    return [] if any(others.values()) else list(others)


def undecided(inputs: Sequence[str], original: str, runs: str) -> str:
    """Why a call does not run the split that was asked for, and what to do.

    Args:
        inputs: Those that are ``silent``.
        original: What a split is compared with.
        runs: What runs instead, with its verb.
    """
    return (
        f"it is not proved that rows are independent, and comparing this call with {original} would say "
        f"nothing: all rows of {', '.join(inputs)} are equal, or those of a nano-batch are zero. {runs} "
        "until a call has rows that differ. If you know that rows are independent, tell the strategy: "
        "dfx.NanoBatch(2, assume_separable=True)"
    )


def tells(values: np.ndarray, axis: int, sizes: Sequence[int]) -> bool:
    """Whether a function that mixes rows would probably show it on these.

    A running sum over the batch starts anew in each nano-batch, which cannot be seen where what came before
    is zero; sorted along the batch or in another order, equal rows are the same.

    Args:
        values: A batched argument.
        axis: Its batch axis.
        sizes: Rows of the nano-batches.

    Returns:
        False if all rows are equal, or a nano-batch has nothing but zeros.
    """
    rows = np.moveaxis(values, axis, 0)
    if not rows.size:
        return False
    # By bits: NaN equals itself.
    first = rows[0].tobytes()
    if all(row.tobytes() == first for row in rows[1:]):
        return False
    ends = np.cumsum(np.asarray(sizes))
    return all(
        bool((rows[end - size : end] != 0).any()) for end, size in zip(ends, sizes, strict=True)
    )
