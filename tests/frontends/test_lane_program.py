"""Views of the caller's memory: kept by address, used again in other combinations, bounded."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.ffi import lane_program


def test_views_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a training loop, whose parameters lie at few addresses in many combinations."""
    made: list[int] = []
    make_view = lane_program.LaneProgram._make_view

    def counted(self: Any, index: int, address: int) -> Any:
        made.append(address)
        return make_view(self, index, address)

    monkeypatch.setattr(lane_program.LaneProgram, "_make_view", counted)

    def f(x: Any, y: Any, z: Any) -> Any:
        return jnp.sort(x) + y, jnp.sort(z) * y

    fast = dfx.schedule(jax.jit(f), dfx.Branches(), lanes=2, backend="ffi")
    pools = [
        [jax.random.normal(jax.random.key(10 * n + i), (256,)) for i in range(5)] for n in range(3)
    ]
    for arrays in itertools.product(*pools):
        for got, want in zip(fast(*arrays), f(*arrays), strict=True):
            assert (got == want).all()
    inputs = {array.unsafe_buffer_pointer() for pool in pools for array in pool}
    # Each lane looks at an array once; without that it would be some hundred times.
    assert sum(address in inputs for address in made) <= 2 * len(inputs)


def test_the_views_of_a_program_are_bounded() -> None:
    fast = dfx.schedule(
        jax.jit(lambda x: jnp.sort(x) + 1), dfx.Sequential(), lanes=1, backend="ffi"
    )
    arrays = [jnp.arange(64.0) * n for n in range(200)]
    for n, x in enumerate(arrays):
        assert (fast(x) == jnp.arange(64.0) * n + 1).all()
    stages = fast._entry((arrays[0],), {})[2].compiled
    programs = [p for stage, _ in stages if stage is not None for p in stage.lane_programs]
    assert programs
    for program in programs:
        assert len(program._views) <= 32
        assert all(len(known) <= 64 for known in program._of_input)
