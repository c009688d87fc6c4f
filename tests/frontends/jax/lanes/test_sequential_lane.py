"""``Sequential`` takes one lane where more cores gain nothing, and all cores where they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dynaflow_xla as dfx  # noqa: E402
from dynaflow_xla import machine  # noqa: E402
from dynaflow_xla.planning.instructions import Launch  # noqa: E402

pytestmark = pytest.mark.wide


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is gained depends on the machine."""
    monkeypatch.setattr(machine, "cores", lambda: 2)
    machine.use(machine.ASSUMED)
    yield
    machine.use(None)


def sorts(x: Any, y: Any) -> Any:
    return jnp.sort(x).sum() + jnp.sort(y).sum()


def products(x: Any, y: Any) -> Any:
    for _ in range(3):
        x = x @ y
    return x


def lanes_of(fast: Any, *args: Any) -> set[int]:
    return {step.lane for step in dfx.plan(fast, *args).instructions if isinstance(step, Launch)}


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng().standard_normal(shape, dtype=np.float32))


def test_sorts_have_one_lane_and_products_all_cores() -> None:
    fast = dfx.schedule(jax.jit(sorts), dfx.Sequential())
    args = drawn(1 << 16), drawn(1 << 16)
    assert lanes_of(fast, *args) == {0}
    np.testing.assert_allclose(fast(*args), sorts(*args), rtol=1e-4, atol=1e-2)
    wide = dfx.schedule(jax.jit(products), dfx.Sequential())
    args = drawn(768, 768), drawn(768, 768)
    assert lanes_of(wide, *args) == {-1}
    np.testing.assert_allclose(wide(*args), products(*args), rtol=1e-3, atol=1.0)


def test_what_is_short_for_a_lane_keeps_all_cores() -> None:
    """A lane's entry would cost more than two percent of it."""
    fast = dfx.schedule(jax.jit(sorts), dfx.Sequential())
    assert lanes_of(fast, drawn(1 << 12), drawn(1 << 12)) == {-1}
