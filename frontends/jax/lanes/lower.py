"""From a plan to lane programs: one compiled executable a lane, with gates at the cross-lane edges.

A plan is cut into *stages* at its outer regions. In each stage, every lane's regions become one
JAX function compiled for that lane's client. Cross-lane edges and results go through gates (the
custom call ``dfx_gate``): it waits for events, copies tensors in from shared memory, copies tensors
out, signals events, in that order. Shared memory is touched by gates only, and a lane's gates are
chained in lane order, so the plan's happens-before order is the order of every access.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from dynaflow_xla.errors import PlanError
from dynaflow_xla.ffi import _engine, programs, xla
from dynaflow_xla.ffi.lane_program import LaneProgram
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture.physical import (
    from_physical,
    physical_aval,
    physical_spec,
)
from dynaflow_xla.frontends.jax.lanes.emitter import LaneEmitter
from dynaflow_xla.frontends.jax.lanes.parts import StageParts
from dynaflow_xla.frontends.jax.lanes.stage import Stage
from dynaflow_xla.planning.plan import Launch, Record


class StageBuilder(StageParts):
    """Lowers one stage of a plan to an engine program."""

    def build(self, *, profile: bool = False) -> Stage:
        """Compiles every lane and makes the engine program."""
        avals = self.captured.avals
        events = [i.event for i in self.instructions if isinstance(i, Record)]
        event_number = {event: i for i, event in enumerate(events)}
        program = _engine.Program(
            lanes=max(self.lanes, default=0) + 1,
            events=len(events),
            args=len(self.inputs),
            results=len(self.outputs),
            scratch_bytes=self.plan.scratch_bytes,
            name=self.plan.graph,
        )

        def size(value: int) -> int:
            spec = physical_spec(avals[value])
            return int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize

        arg_buffer = {}
        for v in self.arguments:
            offset = self.views[v].offset if v in self.views else 0
            position = self.inputs.index(self._whole(v))
            arg_buffer[v] = program.add_buffer("arg", position, offset, size(v))
        self.result_writes = []
        for i, value in enumerate(self.outputs):
            join = self.joins.get(value)
            parts = [(value, 0)] if join is None else zip(join.parts, join.offsets, strict=True)
            for part, offset in parts:
                buffer = program.add_buffer("result", i, offset, size(part))
                self.result_writes.append((part, buffer))
        offsets = {b.value: b.offset for b in self.plan.buffers if b.kind == "scratch"}
        for value, readers in self.reader_lanes.items():
            if readers - {self.producer_lane[value]}:
                self.shared_buffer[value] = program.add_buffer(
                    "scratch", -1, offsets[value], size(value)
                )
        lowered = {}
        lane_inputs: dict[int, list[int]] = {}
        for lane in self.lanes:
            mine = [i for i in self.instructions if i.lane == lane]
            renumbered = [
                i if isinstance(i, Launch) else type(i)(event=event_number[i.event], lane=i.lane)
                for i in mine
            ]
            used = {
                v
                for i in mine
                if isinstance(i, Launch)
                for v in self.pg.regions[i.region].inputs
                if v in arg_buffer
            }
            lane_inputs[lane] = [v for v in self.arguments if v in used]
            lowered[lane] = self._lower_lane(lane, renumbered, lane_inputs[lane], profile)
        texts = {lane: low.as_text() for lane, low in lowered.items()}
        consts = {lane: _compat.const_args(low) for lane, low in lowered.items()}
        named = {
            lane: ", ".join(self.pg.regions[i.region].name for i in self.launches if i.lane == lane)
            for lane in self.lanes
        }
        identity = programs.Identity("cpu", self.compiler_options)
        identity.add(self.plan.to_json(), self.inputs, self.outputs, profile, named)
        for lane in self.lanes:
            identity.add_code(texts[lane], consts[lane])

        def load() -> programs.Loaded:
            compiled = self._compile_lanes(lowered)
            lane_programs = []
            for lane in self.lanes:
                specs = [physical_spec(avals[v]) for v in lane_inputs[lane]]
                name = f"lane {lane} ({named[lane]})"
                device = xla.lane_device(lane)
                made = LaneProgram(name, compiled[lane], specs, device, consts[lane])
                lane_programs.append(made)
                reads = [arg_buffer[v] for v in lane_inputs[lane]]
                program.add_python_launch(lane, made.name, made, reads, [])
            # Events are recorded and waited for by gates inside the lane programs, so the engine's
            # own lists hold one launch a lane and no event.
            program.limit_blas = any("@lapack_" in text for text in texts.values())
            program.finish()
            return programs.Loaded(program, lane_programs)

        loaded = programs.shared(identity.text(), load)
        return Stage(
            inputs=self.inputs,
            outputs=self.outputs,
            hash=identity.text(),
            lanes=self.lanes,
            loaded=loaded,
            reference=self.reference,
            output_avals=tuple(physical_aval(avals[v]) for v in self.outputs),
            lane_texts=texts,
            program_name=self.plan.graph,
        )

    def _compile_lanes(self, lowered: dict[int, Any]) -> dict[int, Any]:
        """Compiles the lanes' programs side by side."""
        options = self.compiler_options

        def compile_lane(lane: int) -> Any:
            low = lowered[lane]
            return low.compile(compiler_options=options) if options else low.compile()

        with ThreadPoolExecutor(max_workers=max(1, len(self.lanes))) as pool:
            return dict(zip(self.lanes, pool.map(compile_lane, self.lanes), strict=True))

    def _lower_lane(
        self, lane: int, instructions: list[Any], inputs: list[int], profile: bool
    ) -> Any:
        avals = self.captured.avals

        def lane_function(*args: Any) -> Any:
            emitter = LaneEmitter(lane, self, profile)
            return emitter.run(
                instructions,
                {v: from_physical(x, avals[v]) for v, x in zip(inputs, args, strict=True)},
            )

        lane_function.__name__ = f"{self.plan.graph}_lane{lane}"
        sharding = jax.sharding.SingleDeviceSharding(xla.lane_device(lane))
        specs = [
            jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)
            for s in (physical_spec(avals[v]) for v in inputs)
        ]
        jitted = jax.jit(
            lane_function, in_shardings=sharding, out_shardings=sharding, keep_unused=True
        )
        with _compat.without_mesh():  # it is of other devices
            traced = jitted.trace(*specs)
        if any(isinstance(const, jax.core.Tracer) for const in _compat.traced_consts(traced)):
            raise PlanError(
                f"a replacement on lane {lane} of {self.plan.graph!r} closes over a traced value; "
                "make it an argument of the scheduled function instead"
            )
        with _compat.without_mesh():
            return traced.lower()
