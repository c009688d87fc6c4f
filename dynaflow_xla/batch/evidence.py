"""What equal values say about a split that is not proved: of rows that are all alike, nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
