"""A planned signature on lanes."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from dynaflow_xla.ffi import blas, xla
from dynaflow_xla.frontends.jax.capture.physical import from_physical, to_physical
from dynaflow_xla.frontends.jax.capture.tracing import exact_types
from dynaflow_xla.frontends.jax.lanes import device_stage, stage_primitive, stamped
from dynaflow_xla.frontends.jax.lanes.stage import Stage
from dynaflow_xla.frontends.jax.planned import BufferValues, Planned, refuse_shapes
from dynaflow_xla.frontends.jax.regions import handed_out, lapack_guard, on_caller, one_pass
from dynaflow_xla.planning.instructions import Launch
from dynaflow_xla.timelines.measured import Measured, fastest
from dynaflow_xla.timelines.timeline import Timeline
from dynaflow_xla.watching import progress, telling

_MAY_BLOCK = (
    "note: on a GPU, a compile on another thread while a call of this backend runs may block both for ever "
    "(seen on an H100 with jaxlib 0.11.2); backend='xla' has no such calls"
)


@dataclass(kw_only=True)
class LaneEntry(Planned):
    """A planned signature of the backend ``ffi``.

    Attributes:
        compiled: ``stages`` if they were needed already, else empty.
    """

    _stages: list[tuple[Stage | None, Launch | None]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @functools.cached_property
    def on_caller(self) -> bool:
        """Whether it is one lane, the thread that calls the program, and needs no other program."""
        if not self.apart or not self.program_ns or self.split is not None:
            return False
        if not on_caller.is_lane_zero(self.plan, self.pg):
            return False
        return not handed_out.is_any(self.pg) or self._options_are_free

    @property
    def _options_are_free(self) -> bool:
        return handed_out.options_are_free(self.options.compiler_options or {})

    @functools.cached_property
    def own_options(self) -> Mapping[str, Any]:
        """XLA's options that keep loops from threads: from all, or from all but the one that calls."""
        if self.on_caller:
            return handed_out.OPTIONS if handed_out.is_any(self.pg) else {}
        whole = self.apart and self.split is None and not self.plan.lanes_used
        if not whole or self.plan.replaces or not self._options_are_free:
            return {}
        vain = handed_out.costs_more_than_it_gains(self.captured.jaxpr)
        return handed_out.OPTIONS if vain else {}

    @property
    def compiled(self) -> list[tuple[Stage | None, Launch | None]]:
        """``stages`` if they were needed already, else empty."""
        return self._stages or []

    @property
    def stages(self) -> list[tuple[Stage | None, Launch | None]]:
        """Stages with the outer launch that follows each; compiled when first needed."""
        with self._lock:
            if self._stages is None:
                t0 = time.perf_counter()
                xla.ensure_registered()
                lanes = len(self.plan.lanes_used)
                with progress.report(f"compiling {self.options.name!r}: {lanes} lane programs"):
                    self._stages = build_stages(self)
                blas.register()  # lowering the first program that needs LAPACK has loaded it
                took = self.seconds["compile"] = time.perf_counter() - t0
                telling.count("compiles", lanes)
                telling.count("compile_ns", int(took * 1e9))
                telling.told(
                    "compile", f"{self.options.name}: {lanes} lane programs in {took:.2f} s",
                    function=self.options.name, programs=lanes, seconds=took, backend="ffi",
                )  # fmt: skip
            return self._stages

    def __call__(self, *inputs: Any) -> list[Any]:
        """Evaluates on flat inputs of the function (closed-over values first); returns flat outputs."""
        avals = self.captured.avals
        memory = self.bind(inputs)
        chain = lapack_guard.Chain()
        if self.on_caller:
            with exact_types(self.captured), lapack_guard.one_at_a_time(chain):
                for launch in self.plan.instructions:
                    if isinstance(launch, Launch):
                        self._run_plain(launch, memory)
                return on_caller.marked(self.flat_outputs(memory), inputs)  # type: ignore[no-any-return]
        for stage, outer in self.stages:
            if stage is not None:
                args = [
                    to_physical(memory[number], avals[value])
                    for number, value in zip(stage.reads, stage.inputs, strict=True)
                ]
                results = stage_primitive.bind(stage, args)
                for numbers, value, x in zip(stage.writes, stage.outputs, results, strict=True):
                    memory.put(numbers, from_physical(x, avals[value]))
            if outer is not None:
                # The one program around the lanes can have several batched LAPACK calls in its regions.
                with exact_types(self.captured), lapack_guard.one_at_a_time(chain):
                    self._run_plain(outer, memory)
        return self.flat_outputs(memory)

    def where(self) -> str:
        """Backend and device, for explain."""
        return f"ffi ({device_stage.where(self.options.gpu_lanes)})"

    def account(self) -> list[str]:
        """What the engine runs, in numbers."""
        plan = self.plan
        why = "" if self.on_caller else ": in steps of loops, handing out costs more than it gains"
        own = [f"compiled with {name}={value}{why}" for name, value in self.own_options.items()]
        if self.on_caller:
            return [
                f"lanes {plan.lanes}: lane 0 is the thread that calls, and runs all of it as one program; "
                "nothing is copied, no custom calls",
                *own,
            ]
        if device_stage.platform(self.options.gpu_lanes) == "cuda":
            own.append(_MAY_BLOCK)
        calls = sum(bool(instructions) for instructions, _ in plan.stages())
        passes = []
        if self.options.one_pass and device_stage.platform(self.options.gpu_lanes) == "cpu":
            launched = [i for i in plan.instructions if isinstance(i, Launch) and i.lane >= 0]
            told = [(i.region, i.lane) for i in launched]
            passes = one_pass.told(self.pg, told, self.options.lanes)
        return [
            f"lanes {plan.lanes}, events {plan.events}, scratch {plan.scratch_bytes} bytes, copied per call "
            f"{plan.copied_bytes} bytes, custom calls {calls}",
            *own,
            *passes,
        ]

    def ran(self) -> list[str]:
        """What device lanes say of themselves, and inputs that had to be copied."""
        stages = [stage for stage, _ in self.compiled if stage is not None]
        lines = [f"device lanes: {stage.note}" for stage in stages if stage.note]
        if in_place := sum(stage.in_place_bytes for stage in stages):
            lines.append(
                f"one pass: {in_place} bytes of results are written where the caller gets them, not copied"
            )
        copied = sum(program.copied_views for s in stages for program in s.lane_programs)
        if copied:
            lines.append(
                f"note: {copied} inputs were not 64-byte aligned and were copied in the last call"
            )
        return lines

    def measured(self, inputs: Sequence[Any], name: str) -> Timeline:
        """Every stage and wide region a few times, outer regions, which may have effects, once.

        Raises:
            UnsupportedError: the inputs are no arrays.
        """
        refuse_shapes("profile", inputs)
        stages = build_stages(self, profile=True)
        memory = BufferValues(self.plan, self.captured.graph, inputs)
        measured = Measured(self.plan, self.pg)
        for (stage, outer), (instructions, _) in zip(stages, self.plan.stages(), strict=True):
            if stage is not None:
                measured.add_stage(instructions, stamped.run(stage, self.captured, memory))
            if outer is not None and not self.pg.regions[outer.region].outer:
                measured.add_outer(outer, self._measured_wide(outer, memory))
            elif outer is not None:
                jax.block_until_ready([memory[b] for b in outer.ins])
                begin = time.monotonic_ns()
                self._run_plain(outer, memory)
                jax.block_until_ready([memory[b] for b in outer.outs])
                measured.add_outer(outer, time.monotonic_ns() - begin)
        return measured.timeline(name)

    def _measured_wide(self, launch: Launch, memory: BufferValues) -> int:
        """Nanoseconds of a region on all cores, compiled by itself: what XLA fuses with neighbours is not."""
        args = [memory[b] for b in launch.ins]
        with exact_types(self.captured):
            took, outs = _fastest(self.functions[launch.region], args)
        memory.write(launch, dict(zip(self.pg.regions[launch.region].outputs, outs, strict=True)))
        call, _ = _fastest(
            lambda x: [x + 1], [jax.numpy.zeros(1)]
        )  # a program's call is no part of it
        return max(0, took - call)


def _fastest(function: Callable[..., list[Any]], args: Sequence[Any]) -> tuple[int, list[Any]]:
    program = jax.jit(function)
    jax.block_until_ready(args)

    def run() -> tuple[int, list[Any]]:
        begin = time.monotonic_ns()
        outs = jax.block_until_ready(program(*args))
        return time.monotonic_ns() - begin, outs

    return fastest(run, lambda made: made[0])


def build_stages(
    made: Planned, *, profile: bool = False
) -> list[tuple[Stage | None, Launch | None]]:
    """Lowers and compiles every stage of a plan."""
    stages: list[tuple[Stage | None, Launch | None]] = []
    for instructions, outer in made.plan.stages():
        stage = None
        if any(isinstance(i, Launch) for i in instructions):
            with exact_types(made.captured):
                stage = device_stage.builder(made, instructions).build(profile=profile)
            stage.replaceable = made.options.candidate
        stages.append((stage, outer))
    return stages
