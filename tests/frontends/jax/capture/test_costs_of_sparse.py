"""Costs of sparse operators: those of what they are lowered to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental import sparse  # noqa: E402

from dynaflow_xla.frontends.jax.capture.costs import estimates  # noqa: E402

pytestmark = pytest.mark.usefixtures("assumed_numbers", "two_cores")

SHAPE, STORED = (256, 128), 4096


def coordinates() -> Any:
    dense = jnp.zeros(SHAPE).at[::8].set(1.0)
    return sparse.BCOO.fromdense(dense, nse=STORED)


def rows() -> Any:
    return sparse.BCSR.from_bcoo(coordinates())


def ns_of(fn: Callable[..., Any], *given: Any) -> float:
    return estimates.original_ns(jax.make_jaxpr(fn)(*given).jaxpr, 1)


CASES: dict[str, Any] = {
    "matrix": (lambda m, x: m @ x, coordinates, (128, 64)),
    "vector": (lambda m, x: m @ x, coordinates, (128,)),
    "rows": (lambda m, x: m @ x, rows, (128, 64)),
    "dense": (lambda m, x: m.todense(), coordinates, (1,)),
    "sorted": (lambda m, x: m.sort_indices().data, coordinates, (1,)),
    "summed": (lambda m, x: m.sum_duplicates(nse=STORED).data, coordinates, (1,)),
    "transposed": (lambda m, x: m.T @ x, coordinates, (256, 64)),
}


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """The primitives of sparse operators are the Python functions that they are lowered to."""

    def run(function: Callable[..., Any], *args: Any, **params: Any) -> Any:
        return function(*args, **params)

    with pytest.MonkeyPatch.context() as patch:
        for module in (sparse.bcoo, sparse.bcsr):
            for name, primitive in vars(module).items():
                function = getattr(module, f"_{name.removesuffix('_p')}_impl", None)
                if name.endswith("_p") and function is not None:
                    patch.setattr(primitive, "bind", partial(run, function), raising=False)
        yield


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_its_operators(name: str) -> None:
    fn, make, shape = CASES[name]
    x = jnp.ones(shape)

    def written(m: Any, x: Any) -> Any:
        with written_out():
            return fn(m, x)

    m = make()
    assert ns_of(fn, m, x) == pytest.approx(ns_of(written, m, x), rel=1e-6)


def test_a_product_takes_longer_with_more_columns_and_more_elements() -> None:
    m = coordinates()
    narrow, wide = (
        ns_of(lambda m, x: m @ x, m, jnp.ones((128, 8))),
        ns_of(lambda m, x: m @ x, m, jnp.ones((128, 512))),
    )
    assert wide > 16 * narrow > 0
    assert narrow > 8 * STORED * estimates.INDEXED_ROWS_NS
