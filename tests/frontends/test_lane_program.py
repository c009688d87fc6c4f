"""Views of the caller's memory: kept by address, used again in other combinations, bounded."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dynaflow_xla as dfx
from dynaflow_xla.ffi import lane_program

LARGE = lane_program._SMALL_BYTES // 4 + 64


@pytest.fixture
def viewed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of which views are made."""
    made: list[int] = []
    view = lane_program.LaneProgram._view

    def counted(self: Any, index: int, memory: Any) -> Any:
        made.append(memory.ctypes.data)
        return view(self, index, memory)

    monkeypatch.setattr(lane_program.LaneProgram, "_view", counted)
    return made


def three(x: Any, y: Any, z: Any) -> Any:
    return jnp.sort(x) + y, jnp.sort(z) * y


def pools(size: int) -> list[list[Any]]:
    return [
        [jax.random.normal(jax.random.key(10 * n + i), (size,)) for i in range(4)] for n in range(3)
    ]


def check(fast: Any, *arrays: Any) -> None:
    for got, want in zip(fast(*arrays), three(*arrays), strict=True):
        assert (got == want).all()


def test_views_are_used_again(viewed: list[int]) -> None:
    """As in a training loop, whose parameters lie at few addresses in many combinations."""
    fast = dfx.schedule(jax.jit(three), dfx.Branches(), lanes=2, backend="ffi")
    arrays = pools(LARGE)
    for chosen in itertools.product(*arrays):
        check(fast, *chosen)
    for chosen in itertools.product(*arrays[::-1]):  # what was one input's memory is another's
        check(fast, *chosen)
    inputs = {array.unsafe_buffer_pointer() for pool in arrays for array in pool}
    # Each lane looks at an array once; without that it would be some hundred times.
    assert sum(address in inputs for address in viewed) <= 2 * len(inputs)


def test_small_inputs_are_copied_until_they_come_again(viewed: list[int]) -> None:
    fast = dfx.schedule(jax.jit(three), dfx.Branches(), lanes=2, backend="ffi")
    arrays = pools(256)
    inputs = {array.unsafe_buffer_pointer() for pool in arrays for array in pool}
    for chosen in zip(*arrays, strict=True):
        check(fast, *chosen)
    assert not inputs & set(viewed)
    first = [pool[0] for pool in arrays]
    for _ in range(3):
        check(fast, *first)
    again = [address for address in viewed if address in inputs]
    assert set(again) == {x.unsafe_buffer_pointer() for x in first}
    assert len(again) <= 2 * len(first)  # once a lane
    # What was copied for other addresses is not read at these, nor the other way round.
    for chosen in (*itertools.product(*arrays), first, first):
        check(fast, *chosen)
    assert "not 64-byte aligned" not in dfx.explain(fast, *first)


@pytest.mark.parametrize("size", [64, LARGE])
def test_the_views_of_a_program_are_bounded(size: int) -> None:
    fast = dfx.schedule(
        jax.jit(lambda x: jnp.sort(x) + 1), dfx.Sequential(), lanes=1, backend="ffi"
    )
    arrays = [jnp.arange(float(size)) * n for n in range(200)]
    for n, x in enumerate(arrays):
        for _ in range(2):
            assert (fast(x) == jnp.arange(float(size)) * n + 1).all()
    stages = fast._entry((arrays[0],), {})[2].compiled
    programs = [p for stage, _ in stages if stage is not None for p in stage.lane_programs]
    assert programs
    for program in programs:
        assert len(program._views) <= 32
        assert all(0 < len(known) <= 64 for known in program._known)
