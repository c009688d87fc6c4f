"""A stage with time stamps at the ends of its regions, run."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numpy as np

from dynaflow_xla.ffi.lane_program import aligned_bytes
from dynaflow_xla.frontends.jax.capture import physical
from dynaflow_xla.frontends.jax.lanes.stage import Stage
from dynaflow_xla.frontends.jax.planned import BufferValues
from dynaflow_xla.timelines.measured import Trace, fastest


def _aligned_empty(spec: Any) -> np.ndarray[Any, Any]:
    size = int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize
    return aligned_bytes(size).view(spec.dtype).reshape(spec.shape)  # type: ignore[no-any-return]


class _OwnMemory:
    """Memory of a stage's arguments and results, outside of any program of JAX's."""

    def __init__(self, stage: Stage, captured: Any, memory: BufferValues) -> None:
        self._stage, self._captured, self._memory = stage, captured, memory
        avals = captured.avals
        self._held = []
        for number, value in zip(stage.reads, stage.inputs, strict=True):
            array = _aligned_empty(physical.physical_spec(avals[value]))
            x = physical.to_physical(jax.numpy.asarray(memory[number]), avals[value])
            array[...] = np.asarray(x)
            self._held.append(array)
        specs = [physical.physical_spec(avals[v]) for v in stage.outputs]
        self.results = [_aligned_empty(spec) for spec in specs]
        self.addresses = [array.ctypes.data for array in self._held]
        self.pointers = [ctypes.c_void_p(r.ctypes.data).value or 0 for r in self.results]

    def keep(self) -> None:
        """Writes the results to the plan's memory."""
        stage, avals = self._stage, self._captured.avals
        for numbers, value, array in zip(stage.writes, stage.outputs, self.results, strict=True):
            x = physical.from_physical(jax.numpy.array(array), avals[value])
            self._memory.put(numbers, x)


def run(stage: Stage, captured: Any, memory: BufferValues) -> list[Trace]:
    """Runs a stage (its lane regions are pure) a few times; returns the fastest run's records."""
    made = _OwnMemory(stage, captured, memory)

    def once() -> list[Trace]:
        records = stage.program.run(made.addresses, made.pointers, profile=True)
        return [tuple(r) for r in records]

    records = fastest(once, _length)
    made.keep()
    return records


def disturbed(
    stage: Stage, captured: Any, memory: BufferValues, seed: int
) -> list[np.ndarray[Any, Any]]:
    """Runs a stage once, its scratch and results full of NaN at first, its lanes with pauses.

    Args:
        stage: With stamps, so that there is a pause behind each region.
        captured: Its function.
        memory: Gets the results.
        seed: Of the pauses; 0: none, and scratch as it was.

    Returns:
        The results, an array each.
    """
    made = _OwnMemory(stage, captured, memory)
    for array in made.results:
        array.reshape(-1).view(np.uint8)[...] = 0xFF
    stage.program.run(made.addresses, made.pointers, disturb=seed)
    made.keep()
    return made.results


def _length(records: list[Trace]) -> int:
    return max((r[3] for r in records), default=0) - min(
        (r[2] for r in records if r[0] < 0), default=0
    )
