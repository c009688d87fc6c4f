"""A stage with time stamps at the ends of its regions, run."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numpy as np

from dynaflow_xla.ffi.lane_program import aligned_bytes
from dynaflow_xla.frontends.jax.capture import physical
from dynaflow_xla.frontends.jax.lanes.stage import Stage
from dynaflow_xla.frontends.jax.planned import Memory
from dynaflow_xla.timelines.measured import Trace, fastest


def _aligned_empty(spec: Any) -> np.ndarray[Any, Any]:
    size = int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize
    return aligned_bytes(size).view(spec.dtype).reshape(spec.shape)  # type: ignore[no-any-return]


def run(stage: Stage, captured: Any, memory: Memory) -> list[Trace]:
    """Runs a stage (its lane regions are pure) a few times; returns the fastest run's records."""
    held, addresses = [], []
    for number, value in zip(stage.reads, stage.inputs, strict=True):
        array = _aligned_empty(physical.physical_spec(captured.avals[value]))
        x = physical.to_physical(jax.numpy.asarray(memory[number]), captured.avals[value])
        array[...] = np.asarray(x)
        held.append(array)
        addresses.append(array.ctypes.data)
    results = [_aligned_empty(physical.physical_spec(captured.avals[v])) for v in stage.outputs]
    pointers = [ctypes.c_void_p(r.ctypes.data).value or 0 for r in results]

    def once() -> list[Trace]:
        return [tuple(r) for r in stage.program.run(addresses, pointers, profile=True)]

    records = fastest(once, _length)
    for numbers, value, array in zip(stage.writes, stage.outputs, results, strict=True):
        x = physical.from_physical(jax.numpy.array(array), captured.avals[value])
        memory.put(numbers, x)
    return records


def _length(records: list[Trace]) -> int:
    return max((r[3] for r in records), default=0) - min(
        (r[2] for r in records if r[0] < 0), default=0
    )
