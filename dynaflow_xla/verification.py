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

_LARGEST = (65504.0, 3.3895314e38, 3.4028235e38, 1.7976931348623157e308)
"""Of float16, bfloat16, float32 and float64: masks fill in their negatives, and halves of these."""

_ROUND = (1e-6, {"bfloat16": 8e-3, "float16": 1e-3, "complex32": 1e-3})
"""So near to a round number is one, in most types and in narrow ones."""


@dataclass(frozen=True)
class Report:
    """Result of ``verify``: per output its path, type and difference where it is worst.

    Attributes:
        rows: One for each output.
        notes: What was not compared: replacements that the call did not run.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def max_abs(self) -> float:
        """Largest absolute difference over all outputs."""
        return max((row[2] for row in self.rows), default=0.0)

    @property
    def bit_equal(self) -> bool:
        """Whether every output has the same bits."""
        return all(row[4] for row in self.rows)

    def __str__(self) -> str:
        rows = [
            f"{path}: {kind} largest difference {diff:.3g} (allowed there {bound:.3g})"
            + (" bit-equal" if equal else "")
            for path, kind, diff, bound, equal in self.rows
        ]
        return "\n".join([*rows, *(f"note: {text}" for text in self.notes)])


def _filled_in(want: Any, size: Any, dtype: str) -> Any:
    """Which elements are as large as what masks fill in: a type's least number, -1e4, -1e9, 1e30.

    Any error would pass beside them. Large results that are computed are no such round numbers: beside a peak
    of a transform, or the ones of a unit matrix, the rest is rounding of terms of that size.
    """
    near = _ROUND[1].get(dtype, _ROUND[0])
    negative = want.real < 0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        exponent = np.floor(np.log10(size * (1 + near)))
        leading = size / 10.0**exponent
        round_number = np.abs(leading - np.round(leading)) <= near * leading
        found = round_number & (leading < 5) & (exponent >= 8)
        found |= negative & (np.abs(size - 1e4) <= near * 1e4)
        for largest in _LARGEST:
            for part in (largest, largest / 2):
                found |= negative & (np.abs(size / part - 1) <= near)
    return found


def _ordinary_size(want: Any, size: Any, difference: Any, dtype: str) -> float:
    """Root mean square of an output's elements, without what a mask filled in."""
    if not difference.any():
        return 0.0
    size = size[~(_filled_in(want, size, dtype) & (difference == 0))]
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
    rms = _ordinary_size(w, size, difference, dtype)
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
