"""``profile``: one run with time stamps, as a timeline."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import jax
import numpy as np

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax.adapters.lifted import looks_inside
from dynaflow_xla.frontends.jax.capture import physical
from dynaflow_xla.frontends.jax.lanes.entry import Entry, build_stages
from dynaflow_xla.frontends.jax.lanes.stage import Stage, split_stages
from dynaflow_xla.timelines.measured import Measured, Trace
from dynaflow_xla.timelines.timeline import Timeline

# What other processes take away is no property of the plan: of this many runs, or as many as fit,
# the fastest counts.
_RUNS = 7
_MAX_SECONDS = 1.0


@looks_inside
def profile(fast: Any, args: Any, kwargs: Any) -> Timeline:
    """The timeline of ``dynaflow_xla.profile``, measured on lanes of the CPU."""
    if fast._options.backend == "xla":
        raise UnsupportedError(
            f"{fast._options.name!r} runs as one XLA program, which has no time stamps between regions; "
            "use jax.profiler.trace (regions are its name scopes), or dfx.compile for its order."
        )
    target = fast.planning(args, kwargs)
    made: Entry = target.planned(args, kwargs)
    inputs = target.flat_inputs(args, kwargs)
    if any(isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in inputs):
        raise UnsupportedError("profile runs the function: it takes arrays, not shapes or tracers")
    stages = build_stages(
        made.captured, made.pg, made.plan, made.functions, made.options, profile=True
    )
    captured = made.captured
    env: dict[int, Any] = dict(zip(captured.graph.inputs, inputs, strict=True))
    measured = Measured(made.plan, made.pg)
    for (stage, outer), (instructions, _) in zip(stages, split_stages(made.plan), strict=True):
        if stage is not None:
            measured.add_stage(instructions, _run_stage(stage, captured, env))
        if outer is not None:
            jax.block_until_ready([env[v] for v in made.pg.regions[outer.region].inputs])
            begin = time.monotonic_ns()
            made._run_plain(outer, env)
            jax.block_until_ready([env[v] for v in made.pg.regions[outer.region].outputs])
            measured.add_outer(outer, time.monotonic_ns() - begin)
    return measured.timeline(target._options.name)


def _aligned_empty(spec: Any) -> np.ndarray[Any, Any]:
    size = int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    shift = -raw.ctypes.data % 64
    return raw[shift : shift + size].view(spec.dtype).reshape(spec.shape)


def _run_stage(stage: Stage, captured: Any, env: dict[int, Any]) -> list[Trace]:
    """Runs a stage (its lane regions are pure) a few times; returns the fastest run's records."""
    held, addresses = [], []
    for value in stage.inputs:
        array = _aligned_empty(physical.physical_spec(captured.avals[value]))
        x = physical.to_physical(jax.numpy.asarray(env[value]), captured.avals[value])
        array[...] = np.asarray(x)
        held.append(array)
        addresses.append(array.ctypes.data)
    results = [_aligned_empty(physical.physical_spec(captured.avals[v])) for v in stage.outputs]
    pointers = [ctypes.c_void_p(r.ctypes.data).value or 0 for r in results]
    stage.program.run(addresses, pointers, profile=True)  # the first run of a program loads it
    runs: list[list[Trace]] = []
    until = time.monotonic() + _MAX_SECONDS
    while not runs or (len(runs) < _RUNS and time.monotonic() < until):
        runs.append([tuple(r) for r in stage.program.run(addresses, pointers, profile=True)])
    for value, array in zip(stage.outputs, results, strict=True):
        env[value] = physical.from_physical(jax.numpy.array(array), captured.avals[value])
    return min(runs, key=_length)


def _length(records: list[Trace]) -> int:
    return max((r[3] for r in records), default=0) - min(
        (r[2] for r in records if r[0] < 0), default=0
    )
