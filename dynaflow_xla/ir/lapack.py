"""Decompositions of matrices, and solutions by them: operations, and nanoseconds on one core.

XLA and PyTorch on a CPU both call LAPACK for them. What it takes is ``rate * n**3`` at 36 operations a
nanosecond for matrices of some thousand rows, and longer by ``small / n`` for small ones, whose products are
too narrow to be fast. Fitted to OpenBLAS (SciPy's, in JAX) and MKL (in PyTorch) with one thread on an AMD
EPYC of the fourth generation, 32 to 512 rows, within a factor of 1.5 as a rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_FLOPS_PER_NS = 36.0
_CALL_NS = 2_000.0
FEW_COLUMNS = 16
"""OpenBLAS solves for so many right-hand sides at half the speed."""


class _Kind(NamedTuple):
    """What a decomposition of ``n`` rows takes.

    Attributes:
        flops: Operations by ``n**3``: the usual leading terms (Golub & Van Loan, 4th ed.).
        rate: Nanoseconds of large matrices by ``n**3``, times ``_FLOPS_PER_NS``: less than ``flops`` where
            LAPACK has another algorithm than the literature counts for (it divides and conquers).
        small: Rows below which the narrow part takes longer than the rest.
    """

    flops: float
    rate: float
    small: float


FACTORIZATIONS = {
    "cholesky": _Kind(1 / 3, 1 / 3, 150), "cholesky_update": _Kind(2.0, 2.0, 100),
    "cholesky_solve": _Kind(2.0, 2.0, 90), "ldl": _Kind(1 / 3, 1 / 3, 180),
    "lu": _Kind(2 / 3, 2 / 3, 180), "geqrf": _Kind(4 / 3, 4 / 3, 120), "qr": _Kind(8 / 3, 8 / 3, 120),
    "householder_product": _Kind(4 / 3, 4 / 3, 120), "eigh": _Kind(9.0, 4.0, 260),
    "eigvals": _Kind(10.0, 9.0, 380), "eig": _Kind(25.0, 12.0, 420), "svd": _Kind(20.0, 8.0, 200),
    "schur": _Kind(25.0, 12.0, 420), "hessenberg": _Kind(10 / 3, 3.0, 110),
    "tridiagonal": _Kind(4 / 3, 4 / 3, 120), "triangular_solve": _Kind(1.0, 1.0, 90),
    "tridiagonal_solve": _Kind(0.1, 0.1, 0), "inverse": _Kind(2.0, 2.4, 260),
    "exponential": _Kind(20.0, 6.5, 160),
}  # fmt: skip
"""Of matrices, and solutions by one."""

_VALUES_ALONE = {
    "svd": _Kind(4.0, 4.0, 200),
    "eigh": _Kind(4 / 3, 2.2, 220),
    "eig": _Kind(10.0, 9.0, 380),
}
"""Where no vectors are computed."""


def flops(kind: str, shape: Sequence[int], columns: int | None = None) -> float:
    """Operations of one of ``FACTORIZATIONS``.

    Args:
        kind: Its name.
        shape: Of the matrices, ``[..., m, n]``.
        columns: Right-hand sides of a solution; by default as many as rows.
    """
    return FACTORIZATIONS[kind].flops * _cubed(shape, columns)


def nanoseconds(
    kind: str,
    shape: Sequence[int],
    columns: int | None = None,
    *,
    vectors: bool = True,
    few: int = FEW_COLUMNS,
) -> float:
    """What it takes on one core.

    Args:
        kind: Its name.
        shape: Of the matrices, ``[..., m, n]``.
        columns: As for ``flops``.
        vectors: False: values alone, of what has vectors.
        few: Right-hand sides that are solved for at half the speed.
    """
    made = FACTORIZATIONS[kind] if vectors else _VALUES_ALONE.get(kind, FACTORIZATIONS[kind])
    work = made.rate * _cubed(shape, columns) / _FLOPS_PER_NS
    narrow = 1.0 + (few / max(columns, 1) if columns is not None else 0.0)
    return _CALL_NS + work * narrow * (1.0 + made.small / max(1, min(shape[-2:])))


def _cubed(shape: Sequence[int], columns: int | None) -> int:
    """``n**3`` of each matrix, or ``n**2`` times its right-hand sides."""
    return math.prod(shape) * (min(shape[-2:]) if columns is None else columns)
