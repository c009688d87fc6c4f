"""From a plan to lane programs: one compiled executable a lane, with gates at the cross-lane edges.

A plan is cut into *stages* at its outer regions. In each stage, every lane's regions become one
JAX function compiled for that lane's client. Cross-lane edges and results go through gates (the
custom call ``dfx_gate``): it waits for events, copies tensors in from shared memory, copies tensors
out, signals events, in that order. Shared memory is touched by gates only, and a lane's gates are
chained in lane order, so the plan's happens-before order is the order of every access.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from dynaflow_xla.errors import PlanError
from dynaflow_xla.ffi import _compat as ffi_compat, _engine, programs, watching, xla
from dynaflow_xla.ffi.lane_program import LaneProgram
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture.physical import (
    from_physical,
    physical_aval,
)
from dynaflow_xla.frontends.jax.lanes.emitter import LaneEmitter
from dynaflow_xla.frontends.jax.lanes.parts import StageParts
from dynaflow_xla.frontends.jax.lanes.stage import Stage
from dynaflow_xla.frontends.jax.regions import lapack_guard, one_pass
from dynaflow_xla.planning.instructions import Launch, Record, Wait


class StageBuilder(StageParts):
    """Lowers one stage of a plan to an engine program."""

    def build(self, *, profile: bool = False) -> Stage:
        """Compiles every lane and makes the engine program."""
        avals = self.captured.avals
        events = [i.event for i in self.instructions if isinstance(i, Record)]
        event_number = {event: i for i, event in enumerate(events)}
        program = self._program(len(events), self.plan.scratch_bytes)
        arg_buffer, results = self._outside(program)
        self.result_writes = [(part, buffer) for part, _, buffer in results]
        for number in self._crossing():
            offset = self.buffer(number).offset
            self.shared[number] = self._add(program, "scratch", -1, offset, number)
        lowered = {}
        lane_inputs: dict[int, list[int]] = {}
        for lane in self.lanes:
            mine = [i for i in self.instructions if i.lane == lane]
            renumbered = [
                i if isinstance(i, Launch) else type(i)(event=event_number[i.event], lane=i.lane)
                for i in mine
            ]
            used = {number for i in mine if isinstance(i, Launch) for number in i.ins}
            lane_inputs[lane] = [number for number in self.arguments if number in used]
            lowered[lane] = self._lower_lane(lane, renumbered, lane_inputs[lane], profile)
        texts = {lane: _compat.text_of(low) for lane, low in lowered.items()}
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
                specs = [self.spec(number) for number in lane_inputs[lane]]
                name = f"lane {lane} ({named[lane]})"
                device = xla.lane_device(lane, self.width_of[lane])
                made = LaneProgram(name, compiled[lane], specs, device, consts[lane])
                lane_programs.append(made)
                reads = [arg_buffer[number] for number in lane_inputs[lane]]
                program.add_python_launch(lane, made.name, made, reads, [])
            # Events are recorded and waited for by gates inside the lane programs, so the engine's
            # own lists hold one launch a lane and no event.
            for i in self.instructions:
                if isinstance(i, Record):
                    program.add_step_record(i.lane, event_number[i.event])
                elif isinstance(i, Wait):
                    program.add_step_wait(i.lane, event_number[i.event])
            watching.name(program, self.instructions, event_number)
            # Lanes would fight for cores; a lane of one core has no more than that when it is alone.
            held = len(self.lanes) > 1 or all(self.width_of[lane] == 1 for lane in self.lanes)
            program.limit_blas = held and any("@lapack_" in text for text in texts.values())
            program.finish()
            return programs.Loaded(program, lane_programs)

        loaded = programs.shared(identity.text(), load)
        return Stage(
            inputs=tuple(self.buffer(number).value for number in self.inputs),
            outputs=tuple(output.value for output in self.outputs),
            reads=self.inputs,
            writes=tuple(output.buffers for output in self.outputs),
            told=(*self.told, *(("lane", lane, lane_inputs[lane]) for lane in self.lanes)),
            hash=identity.text(),
            lanes=self.lanes,
            loaded=loaded,
            reference=self.reference,
            output_avals=tuple(physical_aval(avals[output.value]) for output in self.outputs),
            lane_texts=texts,
            program_name=self.plan.graph,
            in_place_bytes=sum(self.buffer(number).bytes for number in self.in_place),
        )

    def _program(self, events: int, scratch_bytes: int) -> Any:
        """An engine program for the stage, with nothing in it yet."""
        return _engine.Program(
            lanes=max(self.lanes, default=0) + 1,
            events=events,
            args=len(self.inputs),
            results=len(self.outputs),
            scratch_bytes=scratch_bytes,
            name=self.plan.graph,
        )

    def _add(self, program: Any, kind: str, index: int, offset: int, number: int) -> int:
        """Tells the engine of memory for a buffer of the plan; the engine's number of it."""
        self.told.append((kind, index, offset, self.buffer(number).bytes))
        return int(program.add_buffer(*self.told[-1]))

    def _outside(self, program: Any) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
        """Tells the engine of arguments and results.

        Returns:
            The engine's numbers of the arguments; the parts of results, where each begins in its result,
            and the engine's numbers of them.
        """
        arguments = {}
        for number in self.arguments:
            position, offset = self.inputs.index(self.whole(number)), self.buffer(number).offset
            arguments[number] = self._add(program, "arg", position, max(0, offset), number)
        results = [
            (part, offset, self._add(program, "result", position, offset, part))
            for position, output in enumerate(self.outputs)
            for part, offset in output.parts
        ]
        return arguments, results

    def _crossing(self) -> list[int]:
        """The scratch buffers of the stage; first those that are read, in the order of the reads."""
        written = {self.origin[b]: b for b in self.origin if self.buffer(b).kind == "scratch"}
        read = (self.origin_of(number) for launch in self.launches for number in launch.ins)
        return [written[origin] for origin in dict.fromkeys((*read, *written)) if origin in written]

    def _compile_lanes(self, lowered: dict[int, Any]) -> dict[int, Any]:
        """Compiles the lanes' programs side by side."""
        options = self.compiler_options

        def compile_lane(lane: int) -> Any:
            low = lowered[lane]
            return low.compile(compiler_options=options) if options else low.compile()

        with ThreadPoolExecutor(max_workers=max(1, len(self.lanes))) as pool:
            begun: dict[int, Any] = {}
            with contextlib.suppress(RuntimeError):
                # The main thread has ended, and one of the user's goes on; or there are too many threads.
                begun.update((lane, pool.submit(compile_lane, lane)) for lane in self.lanes)
            here = {lane: compile_lane(lane) for lane in self.lanes if lane not in begun}
            return here | {lane: one.result() for lane, one in begun.items()}

    def _lower_lane(
        self, lane: int, instructions: list[Any], inputs: list[int], profile: bool
    ) -> Any:
        avals = self.captured.avals

        def lane_function(*args: Any) -> Any:
            place = one_pass.Place(lane) if self.one_pass else None
            emitter = LaneEmitter(lane, self, profile, place)
            given = {
                number: from_physical(x, avals[self.buffer(number).value])
                for number, x in zip(inputs, args, strict=True)
            }
            # On several threads they could wait for each other's.
            alone = self.width_of[lane] == 1
            guard = lapack_guard.as_they_come() if alone else lapack_guard.one_at_a_time()
            with guard, one_pass.on_lane(place):
                return emitter.run(instructions, given)

        # JAX's cache of compiled programs does not know how many threads they were compiled for.
        width = "" if self.width_of[lane] == 1 else f"_of_{self.width_of[lane]}_cores"
        lane_function.__name__ = f"{self.plan.graph}_lane{lane}{width}"
        return self._lowered(
            lane_function,
            list(map(self.spec, inputs)),
            lane,
            xla.lane_device(lane, self.width_of[lane]),
        )

    def _lowered(
        self,
        function: Callable[..., Any],
        specs: Sequence[Any],
        lane: int,
        device: Any,
        donated: Sequence[int] = (),
    ) -> Any:
        """Lowers a function for a lane's device.

        Raises:
            PlanError: it closes over a traced value.
        """
        sharding = jax.sharding.SingleDeviceSharding(device)
        jitted = jax.jit(
            function,
            in_shardings=sharding,
            out_shardings=sharding,
            keep_unused=True,
            donate_argnums=tuple(donated),
        )
        # The mesh is of other devices; keys were looked at in the function, and derivatives draw again.
        with (
            ffi_compat.nothing_evaluated(),
            ffi_compat.without_mesh(),
            jax.debug_key_reuse(False),
        ):
            traced = jitted.trace(
                *[jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in specs]
            )
        if any(isinstance(const, jax.core.Tracer) for const in _compat.traced_consts(traced)):
            raise PlanError(
                f"a replacement on lane {lane} of {self.plan.graph!r} closes over a traced value; "
                "make it an argument of the scheduled function instead"
            )
        with ffi_compat.nothing_evaluated(), ffi_compat.without_mesh():
            return traced.lower()
