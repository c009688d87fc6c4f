"""How near the estimated costs of matrix products are to what they take: JAX on one core.

    python benchmarks/studies/products.py [--rounds 15] [--only "narrow,of points"] [--out FILE]

Backward passes sum over rows, attentions over heads, and points are of three numbers: what such a product
takes depends on how its factors lie more than on its operations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

import jax.numpy as jnp
from common import estimated
from common.estimated import Case, normal
from jax import lax

SUMMED = {"": ((1,), (0,)), ", right turned": ((1,), (1,)), ", left turned": ((0,), (0,))}
"""Which dimensions of two matrices a product sums over."""


def product(summed: Any) -> Any:
    """The product of two matrices along these dimensions."""
    return lambda a, b: lax.dot_general(a, b, (summed, ((), ())))


def matrices(name: str, rows: int, columns: int, depth: int) -> Iterator[Case]:
    """A product of two matrices, in each layout."""
    for layout, summed in SUMMED.items():
        left = (depth, rows) if summed[0] == (0,) else (rows, depth)
        right = (columns, depth) if summed[1] == (1,) else (depth, columns)
        made = (normal(*left), normal(*right))
        yield f"{name} {rows} x {depth} x {columns}{layout}", product(summed), made


def named(name: str, pattern: str, **sizes: int) -> Case:
    """A product that ``jnp.einsum`` calls so."""
    factors = pattern.split("->")[0].split(",")
    made = tuple(normal(*(sizes[c] for c in dims)) for dims in factors)
    text = " ".join(f"{key}={size}" for key, size in sizes.items())
    return f"{name} {pattern} {text}", lambda x, y: jnp.einsum(pattern, x, y), made


def products() -> Iterator[Case]:
    """Name, function and arguments."""
    for size in (64, 128, 256, 500, 512, 768):
        yield from matrices("square", size, size, size)
    for rows, columns, depth in ((512, 1024, 256), (500, 1000, 250), (256, 512, 2048)):
        yield from matrices("gradient", rows, columns, depth)
    for columns in (2, 6, 8, 12, 16, 48):
        yield from matrices("narrow", 2048, columns, 128)
    for rows in (4, 16):
        yield from matrices("few rows", rows, 512, 512)
    for depth in (4, 16):
        yield from matrices("short sums", 1024, 512, depth)
    for depth in (3, 4, 5, 8):
        yield from list(matrices("of points", 10_000, depth, depth))[:1]
    for batch, rows in ((8, 64), (64, 64)):
        sizes = {"b": batch, "s": rows, "i": 128, "o": 256}
        yield named("layer", "bsi,io->bso", **sizes)
        yield named("its gradient", "bsi,bso->io", **sizes)
        yield named("its gradient", "bso,io->bsi", **sizes)
    for batch, heads, rows, width in ((2, 4, 128, 32), (4, 8, 256, 64)):
        sizes = {"b": batch, "h": heads, "q": rows, "k": rows, "d": width}
        yield named("attention", "bhqd,bhkd->bhqk", **sizes)
        yield named("attention", "bqhd,bkhd->bhqk", **sizes)
        yield named("attention", "bhqk,bhkd->bhqd", **sizes)
        yield named("attention", "bhqk,bkhd->bqhd", **sizes)
        yield named("attention", "bhqk,bhqd->bhkd", **sizes)
    for count, size in ((1000, 3), (256, 6), (1000, 8), (256, 16), (64, 32), (16, 128)):
        sizes = {"b": count, "i": size, "j": size, "k": size}
        yield named("several", "bij,bjk->bik", **sizes)
        yield named("several", "bji,bjk->bik", **sizes)


if __name__ == "__main__":
    estimated.main("products", products(), __doc__)
