"""How large values are, from their abstract shapes."""

from __future__ import annotations

import math
from typing import Any


def size(aval: Any) -> int:
    """Elements of a dense value."""
    return math.prod(aval.shape)


def aval_bytes(aval: Any) -> int:
    """Bytes of a dense value (a PRNG key counts 16)."""
    return size(aval) * int(getattr(aval.dtype, "itemsize", 16))
