"""The package's own cases: small functions that each frontend writes down, with arguments of one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynaflow_xla.protocols import Frontend

_SQUARES = [((128, 128), 0.05)] * 2

SHAPES: dict[str, list[tuple[tuple[int, ...], float]]] = {
    "sorts": [((1 << 16,), 1.0)] * 2,
    "recurrent": [((32, 32, 128), 1.0), *_SQUARES],
    "products": [((1024, 1024), 1.0), *[((1024, 1024), 0.05)] * 2],
    "chain": [((256, 256), 1.0), ((256, 256), 0.05)],
    "small": [((16, 16), 1.0)] * 2,
}
"""By case the arguments' shapes, and what random values are multiplied by.

``sorts`` and ``recurrent`` have two parts that one core each can do; in ``products`` each part fills all
cores, ``chain`` has nothing that could run beside anything, and ``small`` is too short to gain.
"""


def cases_of(frontend: Frontend) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """By name the functions of a framework and their arguments."""
    functions = frontend.cases()
    return {
        name: (
            functions[name],
            tuple(frontend.example(shape, "float32", n) * by for n, (shape, by) in enumerate(of)),
        )
        for name, of in SHAPES.items()
    }
