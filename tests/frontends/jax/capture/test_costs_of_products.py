"""What products of matrices cost besides their operations: by how the factors lie, and their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

from dynaflow_xla.frontends.jax.capture.costs import estimate  # noqa: E402

pytestmark = pytest.mark.usefixtures("assumed_numbers")


def of(f: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """The work of all products in a function of arrays of these shapes."""
    jaxpr = jax.make_jaxpr(f)(*[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    return estimate(eqn)


def ns(rows: int, columns: int, depth: int, layout: str = "", dtype: Any = jnp.float32) -> float:
    """Nanoseconds of a product of two matrices; which of them lie turned: "left", "right" or both."""
    left, right = "left" in layout, "right" in layout
    summed = ((0,) if left else (1,), (1,) if right else (0,))
    return of(
        lambda a, b: lax.dot_general(a, b, (summed, ((), ()))),
        (depth, rows) if left else (rows, depth),
        (columns, depth) if right else (depth, columns),
        dtype=dtype,
    ).ns


def several(count: int, size: int, pattern: str = "bij,bjk->bik") -> float:
    return of(lambda a, b: jnp.einsum(pattern, a, b), *2 * [(count, size, size)]).ns


def test_sums_across_the_rows_of_the_left_factor_take_longer() -> None:
    assert ns(500, 64, 250, "left") > 1.05 * ns(500, 64, 250)
    # A narrow result has little else to do.
    assert ns(512, 8, 512, "left") > 5 * ns(512, 8, 512)


@pytest.mark.parametrize(("even", "odd"), [(128, 120), (512, 500), (1024, 1000), (2048, 2000)])
def test_rows_that_share_lines_of_the_cache_take_longer(even: int, odd: int) -> None:
    more, less = (ns(n, 64, 256, "left") - ns(n, 64, 256) for n in (even, odd))
    assert more / even > 2 * less / odd


def test_many_wide_rows_of_the_right_factor_crowd_the_cache() -> None:
    assert ns(512, 1024, 256, "left") > 1.9 * ns(512, 1024, 256)
    assert ns(500, 1000, 250, "left") < 1.2 * ns(500, 1000, 250)
    assert ns(512, 1024, 64, "left") < 1.2 * ns(512, 1024, 64)
    # YNNPACK's take the same.
    assert ns(512, 1024, 256) == pytest.approx(ns(512, 1008, 256), rel=0.05)


def test_a_turned_right_factor_is_read_along_its_rows() -> None:
    assert 1.1 * ns(16, 512, 512) < ns(16, 512, 512, "right") < 2 * ns(16, 512, 512)
    assert ns(16, 512, 512, "left right") > 3 * ns(16, 512, 512)


@pytest.mark.parametrize(("even", "odd"), [
    ((10_000, 8, 4), (10_000, 6, 4)), ((10_000, 4, 4), (10_000, 4, 3)), ((2000, 16, 64), (2000, 12, 64)),
])  # fmt: skip
def test_results_that_no_vector_fits_take_longer(
    even: tuple[int, ...], odd: tuple[int, ...]
) -> None:
    assert ns(*odd) > 1.05 * ns(*even)


def test_smallest_matrices_are_multiplied_in_a_loop() -> None:
    each = {size: several(1000, size) / 1000 for size in (3, 6, 8)}
    assert each[6] > 20 * each[3]
    assert each[6] > 5 * each[8]
    assert several(1000, 8, "bji,bjk->bik") > 5 * several(1000, 8)


def test_sums_over_several_dimensions_are_made_one() -> None:
    """XLA copies the left factor for them, and leaves the product to the library that tiles it."""
    gradient = of(lambda x, y: jnp.einsum("bsi,bso->io", x, y), (8, 64, 512), (8, 64, 512))
    assert ns(512, 512, 512) < gradient.ns < 1.1 * ns(512, 512, 512) < ns(512, 512, 512, "left")
    assert gradient.spread.forks == 1
    small = of(lambda x, y: jnp.einsum("bsi,bso->io", x, y), (4, 8, 64), (4, 8, 64))
    assert small.spread.forks == 0


def test_others_count_their_operations_alone() -> None:
    """Vectors have loops of their own, as integers have."""
    assert ns(1024, 1, 1024, "left") == ns(1024, 1, 1024)
    assert ns(512, 8, 512, "left", jnp.int32) == ns(512, 8, 512, dtype=jnp.int32)
