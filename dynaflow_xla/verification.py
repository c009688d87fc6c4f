"""When results count as equal, and the report that ``dynaflow_xla.verify`` returns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynaflow_xla.errors import VerificationError

Row = tuple[str, str, float, float, bool]
"""An output's path and type, its difference where that is worst, what is allowed there, bit-equal."""

TOLERANCES = {
    "bfloat16": (2e-2, 2e-2), "float16": (2e-3, 2e-3), "float32": (2e-5, 2e-5),
    "float64": (1e-12, 1e-12), "complex32": (2e-3, 2e-3), "complex64": (2e-5, 2e-5),
    "complex128": (1e-12, 1e-12),
}  # fmt: skip
"""dtype -> (relative to the element, relative to the root mean square of the output's ordinary elements).

Cutting changes fusion, hence rounding, and where terms cancel the rounding of their size remains."""

_FILLED, _FILLED_WITH, _ALIKE = 1e3, 4, 0.02
"""What is larger than so many times the median of what differs, and has so few different magnitudes (of which
two are one within the last), is what masks fill in: -1e9, a type's least number. It is not ordinary, and would
let anything pass beside it."""


@dataclass(frozen=True)
class Report:
    """Result of ``verify``: per output its path, type and difference where it is worst."""

    rows: tuple[Row, ...]

    @property
    def max_abs(self) -> float:
        """Largest absolute difference over all outputs."""
        return max((row[2] for row in self.rows), default=0.0)

    @property
    def bit_equal(self) -> bool:
        """Whether every output has the same bits."""
        return all(row[4] for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(
            f"{path}: {kind} largest difference {diff:.3g} (allowed there {bound:.3g})"
            + (" bit-equal" if equal else "")
            for path, kind, diff, bound, equal in self.rows
        )


def _ordinary_size(size: Any, difference: Any) -> float:
    """Root mean square of an output's elements, without what a mask filled in."""
    differing = size[difference > 0]
    if not differing.size:
        return 0.0
    filled = size > _FILLED * float(np.median(differing))
    if filled.any() and np.unique(np.round(np.log(size[filled]) / _ALIKE)).size <= _FILLED_WITH:
        size = size[~filled]
    largest = float(size.max(initial=0.0))
    return largest * math.sqrt(float(np.mean((size / largest) ** 2))) if largest > 0 else 0.0


def compare(name: str, kind: str, dtype: str, want: Any, got: Any) -> Row:
    """One row of a report.

    Args:
        name: Of the output, for messages.
        kind: Its type and shape, for messages.
        dtype: The type that the results have in their framework.
        want: The right values, a NumPy array in that type or a wider one.
        got: Those to compare, of the same type and shape.

    Raises:
        VerificationError: the values differ too much; of types without tolerance, at all.
    """
    equal = want.tobytes() == got.tobytes()
    if dtype not in TOLERANCES:
        if not equal:
            where = np.unravel_index(int(np.argmax(want != got)), want.shape) if want.shape else ()
            raise VerificationError(
                f"{name} ({kind}) must be equal; first difference at {tuple(map(int, where))}: "
                f"{want[where]} != {got[where]}"
            )
        return name, kind, 0.0, 0.0, equal
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    w, g = want.astype(wide), got.astype(wide)
    rtol, atol = TOLERANCES[dtype]
    finite = np.isfinite(w)
    if not np.array_equal(finite, np.isfinite(g)) or not np.array_equal(
        w[~finite], g[~finite], equal_nan=True
    ):
        raise VerificationError(f"{name} ({kind}) differs in its NaN or infinite elements")
    size = np.where(finite, np.abs(w), 0.0)
    difference = np.abs(np.where(finite, w, 0.0) - np.where(finite, g, 0.0))
    rms = _ordinary_size(size, difference)
    allowed = rtol * size + max(atol * rms, 1e-30)
    worst = np.unravel_index(int(np.argmax(difference / allowed)), w.shape) if w.size else None
    if worst is None:
        return name, kind, 0.0, 0.0, equal
    if difference[worst] > allowed[worst]:
        raise VerificationError(
            f"{name} ({kind}) at {tuple(map(int, worst))}: {g[worst]} differs from {w[worst]} by "
            f"{difference[worst]:.3g}; {allowed[worst]:.3g} is allowed"
        )
    return name, kind, float(difference[worst]), float(allowed[worst]), equal
