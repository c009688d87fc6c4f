"""Values that are no arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_to_compile")


@pytest.mark.parametrize("backend", ["ffi", "xla"])
def test_values_of_a_type_of_their_own_are_refused_by_name(backend: str) -> None:
    """They have a shape, but nothing says of what."""
    hijax = pytest.importorskip("jax.experimental.hijax")

    @dataclasses.dataclass(frozen=True)
    class Pair:
        first: jax.Array
        second: jax.Array

    @dataclasses.dataclass(frozen=True)
    class PairType(hijax.HiType):
        shape: tuple[int, ...]

        def lo_ty(self) -> list[Any]:
            return [jax.core.ShapedArray(self.shape, jnp.dtype("float32"))] * 2

        def lower_val(self, value: Pair) -> list[Any]:
            return [value.first, value.second]

        def raise_val(self, first: Any, second: Any) -> Pair:
            return Pair(first, second)

    hijax.register_hitype(Pair, lambda pair: PairType(pair.first.shape))

    def f(x: Any, pair: Any) -> Any:
        return jnp.sort(x), pair

    x = jnp.arange(4.0)[::-1]
    assert (jax.jit(f)(x, Pair(x, x))[0] == jnp.sort(x)).all()
    with pytest.raises(dfx.UnsupportedError, match="takes arrays.*PairType.*hijax"):
        dfx.schedule(f, "branches", backend=backend)(x, Pair(x, x))
