"""From a stage of a plan to steps of device lanes: an executable a *segment*, events between them.

What a lane does between two waits or records is one segment, compiled as one XLA executable for that
lane's client; a region with a CUDA kernel in its place is a step of its own. A stage of kernels only
needs no clients, and may be recorded into a CUDA graph. Values that leave a segment lie in memory of the
outer program: in a result, or in the stage's scratch, where no two of them share bytes (inside a segment
XLA knows of no order between a read of one and a write of the other). The engine orders segments by
events, as the plan says.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dynaflow_xla import machine
from dynaflow_xla.errors import EngineError, PlanError, UnsupportedError
from dynaflow_xla.ffi import _compat as ffi_compat, programs
from dynaflow_xla.ffi.device_lanes import DeviceLanes, cuda_lanes
from dynaflow_xla.ffi.device_steps import add_step
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture.physical import (
    from_physical,
    physical_aval,
    to_physical,
)
from dynaflow_xla.frontends.jax.lanes.lower import StageBuilder
from dynaflow_xla.frontends.jax.lanes.parts import Origin
from dynaflow_xla.frontends.jax.lanes.stage import Stage
from dynaflow_xla.frontends.jax.planned import Planned
from dynaflow_xla.frontends.jax.regions.functions import KernelRegion
from dynaflow_xla.kernels import Lanes
from dynaflow_xla.planning.instructions import Launch, Record, Wait

_override = threading.local()


def lanes_in_force() -> DeviceLanes | None:
    """The device lanes that stages are built for on this thread; None: lanes of the CPU."""
    return getattr(_override, "lanes", None)


@contextlib.contextmanager
def use_lanes(lanes: DeviceLanes | None) -> Iterator[None]:
    """Within it, this thread builds stages for these lanes."""
    before = lanes_in_force()
    _override.lanes = lanes
    try:
        yield
    finally:
        _override.lanes = before


@dataclass
class _Segment:
    lane: int
    launches: list[Launch] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)  # buffers of the plan
    writes: list[tuple[int, int]] = field(default_factory=list)  # buffer of the plan, of the engine
    kernel: KernelRegion | None = None  # of its only launch
    # Without a kernel:
    lowered: Any = None
    text: str = ""
    consts: list[Any] = field(default_factory=list)
    in_place: list[bool] = field(default_factory=list)


class DeviceStageBuilder(StageBuilder):
    """Lowers one stage of a plan to a program of executables on device lanes."""

    def __init__(
        self, lanes: DeviceLanes, gpu: Lanes | None, made: Planned, instructions: Sequence[Any]
    ):
        super().__init__(made, instructions)
        self._lanes, self._gpu = lanes, gpu

    def build(self, *, profile: bool = False) -> Stage:
        """Compiles every segment and makes the engine program.

        Raises:
            UnsupportedError: profiling (lanes on a device have no clock of ours).
            EngineError: a lane cannot be made.
        """
        if profile:
            raise UnsupportedError(
                "dfx.profile measures lanes on the CPU; on a GPU use jax.profiler or Nsight Systems: each "
                "lane is a stream there"
            )
        avals = self.captured.avals
        items = self._segments()
        events = [i.event for i in items if isinstance(i, Record)]
        number = {event: n for n, event in enumerate(events)}
        offsets, scratch_bytes = self._scratch(items)
        program = self._program(len(events), scratch_bytes)
        places, writes, aligned = self._buffers(program, offsets)
        lanes = self._lanes
        steps = [i for i in items if isinstance(i, _Segment)]
        capturable = all(s.kernel is not None for s in steps)
        engine = self._engine(capturable)
        texts: dict[int, str] = {}
        for step in steps:
            step.writes = [w for made in self._made_by(step) for w in writes.get(made, ())]
            if step.kernel is None:
                step.in_place = [aligned[buffer] for _, buffer in step.writes]
                step.lowered = self._lower(step, step.in_place)
                step.text = _compat.text_of(step.lowered)
                step.consts = [np.asarray(c) for c in _compat.const_args(step.lowered)]
                texts[step.lane] = texts.get(step.lane, "") + step.text

        def load() -> programs.Loaded:
            compiled: dict[str, tuple[int, Any]] = {}
            counters = []
            for item in items:
                if isinstance(item, Record):
                    program.add_record(item.lane, number[item.event])
                elif isinstance(item, Wait):
                    program.add_wait(item.lane, number[item.event])
                elif item.kernel is not None:
                    self._add_kernel(engine, program, item, item.kernel, places)
                else:
                    counters.append(self._add_executable(program, item, places, compiled))
            program.finish()
            note = self._note(len(counters), len(compiled), len(steps) - len(counters))
            return programs.Loaded(program, counters=counters, note=note)

        name = self._identity(items, places, aligned)
        return Stage(
            inputs=tuple(self.buffer(number).value for number in self.inputs),
            outputs=tuple(output.value for output in self.outputs),
            reads=self.inputs,
            writes=tuple(output.buffers for output in self.outputs),
            told=(*self.told, *self._orders(items, number, places)),
            hash=name,
            lanes=self.lanes,
            loaded=programs.shared(name, load, engine),
            reference=self.reference,
            output_avals=tuple(physical_aval(avals[output.value]) for output in self.outputs),
            lane_texts=texts,
            program_name=self.plan.graph,
            platform=lanes.platform,
            scratch_bytes=scratch_bytes,
            capturable=capturable,
        )

    def _orders(
        self, items: list[Any], number: dict[int, int], places: dict[Origin, int]
    ) -> Iterator[tuple[Any, ...]]:
        """What each lane does in which order: the buffers of its steps, and events."""
        for item in items:
            if isinstance(item, _Segment):
                reads = [places[self.origin_of(b)] for b in item.inputs]
                yield "step", item.lane, reads, [buffer for _, buffer in item.writes]
            else:
                yield type(item).__name__.lower(), item.lane, number[item.event]

    def _identity(
        self, items: list[Any], places: dict[Origin, int], aligned: dict[int, bool]
    ) -> str:
        """The content hash of the stage's program."""
        identity = programs.Identity(self._lanes.platform, self.compiler_options)
        identity.add(self._lanes.settings, self._gpu, self.plan.to_json(), self.instructions)
        identity.add(self.inputs, self.outputs, sorted(places.items()), sorted(aligned.items()))
        for step in items:
            if not isinstance(step, _Segment):
                continue
            identity.add(step.lane, [self.pg.regions[i.region].name for i in step.launches])
            if step.kernel is None:
                identity.add_code(step.text, step.consts)
            else:
                kernel = step.kernel.kernel
                identity.add_image(kernel.image_bytes())
                identity.add(kernel.name, kernel.size, kernel.shared_bytes, step.kernel.parameters)
        return identity.text()

    def _add_executable(
        self,
        program: Any,
        step: _Segment,
        places: dict[Origin, int],
        compiled: dict[str, tuple[int, Any]],
    ) -> Any:
        """Adds a segment's executable to its lane; counters of what it does."""
        lanes = self._lanes
        names = ", ".join(self.pg.regions[i.region].name for i in step.launches)
        with jax.enable_x64(True):
            kept = [jax.device_put(c, lanes.device(step.lane)) for c in step.consts]
        return add_step(
            program, lanes, step.lane, f"lane {step.lane} ({names})",
            self._compile(step.lowered, step.text, step.lane, compiled),
            jax.block_until_ready(kept),
            (list(map(self.spec, step.inputs)), [places[self.origin_of(b)] for b in step.inputs]),
            ([self.spec(b) for b, _ in step.writes],
             [buffer for _, buffer in step.writes]),
            step.in_place,
        )  # fmt: skip

    def _note(self, steps: int, compiled: int, kernels: int) -> str:
        if not steps:
            return f"{kernels} kernels, recorded into XLA's CUDA graph"
        how = self._lanes.problem or "lanes run their executables through the PJRT C API"
        some = f"; {kernels} kernels" if kernels else ""
        return f"{how}; {steps} steps of {compiled} compiled programs{some}"

    def _engine(self, kernels_only: bool) -> Any:
        """The engine of the stage's lanes.

        Raises:
            UnsupportedError: lanes of XLA executables are to be confined, or to have priorities.
        """
        count = max(self.lanes, default=0) + 1
        if kernels_only:
            return self._lanes.kernel_engine(self._gpu)
        if self._gpu is not None:
            raise UnsupportedError(
                f"{self.plan.graph!r} has regions that are XLA executables: those run on streams that "
                "XLA's clients make, without priorities and on the whole device. Give lanes= a number, "
                "replace every region by a dfx.CudaKernel, or use PyTorch, whose lanes can have both"
            )
        return self._lanes.engine(count)

    def _add_kernel(
        self,
        engine: Any,
        program: Any,
        step: _Segment,
        made: KernelRegion,
        places: dict[Origin, int],
    ) -> None:
        """Adds a region's kernel to its lane.

        Raises:
            EngineError: the driver does not take the image.
        """
        region, kernel = self.pg.regions[step.launches[0].region], made.kernel
        reads = step.launches[0].ins
        grid, block = kernel.size
        try:
            engine.add_kernel_launch(
                program, step.lane, region.name, kernel.image_bytes(), kernel.name, grid, block,
                kernel.shared_bytes, made.parameters, [places[self.origin_of(b)] for b in reads],
                [places[region.id, value] for value in region.outputs],
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"kernel {kernel.name!r} cannot replace region {region.name!r}: {error}"
            ) from error

    # -- the cut ------------------------------------------------------------------------------

    def _segments(self) -> list[Any]:
        """The stage as segments, records and waits; each lane's in its order."""
        items: list[Any] = []
        open_segments: dict[int, _Segment] = {}
        for instruction in self.instructions:
            if not isinstance(instruction, Launch | Record | Wait):
                raise PlanError(f"device lanes cannot run {type(instruction).__name__}")
            lane = instruction.lane
            if not isinstance(instruction, Launch):
                open_segments.pop(lane, None)
                items.append(instruction)
                continue
            if kernel := self._kernel(instruction):
                open_segments.pop(lane, None)
                items.append(_Segment(lane, [instruction], kernel=kernel))
                continue
            if lane not in open_segments:
                open_segments[lane] = _Segment(lane)
                items.append(open_segments[lane])
            open_segments[lane].launches.append(instruction)
        for segment in items:
            if isinstance(segment, _Segment):
                made = set(self._made_by(segment))
                reads = {self.origin_of(b): b for i in segment.launches for b in i.ins}
                segment.inputs = [b for origin, b in reads.items() if origin not in made]
        return items

    def _kernel(self, launch: Launch) -> KernelRegion | None:
        """What launches a region as a kernel; None for others, and on lanes of a CPU."""
        function = self.functions[launch.region]
        if self._lanes.platform == "cuda" and isinstance(function, KernelRegion):
            return function
        return None

    def _made_by(self, segment: _Segment) -> list[Origin]:
        return [(i.region, v) for i in segment.launches for v in self.pg.regions[i.region].outputs]

    def _scratch(self, items: list[Any]) -> tuple[dict[Origin, tuple[int, int]], int]:
        """Values between segments that are no result: a buffer of each and its offset; and all bytes."""
        results = {self.origin[part] for output in self.outputs for part, _ in output.parts}
        align, end = self._lanes.alignment, 0
        written = {origin: number for number, origin in reversed(self.origin.items())}
        offsets: dict[Origin, tuple[int, int]] = {}
        for segment in items:
            if not isinstance(segment, _Segment):
                continue
            # A kernel writes all its outputs, those that nobody reads, too.
            unread = self._made_by(segment) if segment.kernel is not None else []
            for origin in (*map(self.origin_of, segment.inputs), *unread):
                if origin in written and origin not in results and origin not in offsets:
                    offsets[origin] = written[origin], end
                    end += machine.aligned(self.buffer(written[origin]).bytes, align)
        return offsets, end

    def _buffers(
        self, program: Any, offsets: dict[Origin, tuple[int, int]]
    ) -> tuple[dict[Origin, int], dict[Origin, list[tuple[int, int]]], dict[int, bool]]:
        """Where values are read, where they are written, and which places XLA can write to itself."""
        writes: dict[Origin, list[tuple[int, int]]] = {}
        aligned: dict[int, bool] = {}
        arguments, results = self._outside(program)
        places = {self.origin_of(number): buffer for number, buffer in arguments.items()}
        for part, offset, buffer in results:
            places.setdefault(self.origin[part], buffer)
            writes.setdefault(self.origin[part], []).append((part, buffer))
            aligned[buffer] = offset % machine.ALIGNMENT == 0
        for origin, (number, offset) in offsets.items():
            buffer = self._add(program, "scratch", -1, offset, number)
            places[origin], aligned[buffer] = buffer, True
            writes.setdefault(origin, []).append((number, buffer))
        return places, writes, aligned

    # -- executables --------------------------------------------------------------------------

    def _lower(self, segment: _Segment, in_place: list[bool]) -> Any:
        """Takes the inputs, then for each output in place an argument to donate."""
        avals = self.captured.avals
        n_inputs = len(segment.inputs)

        def aval(number: int) -> Any:
            return avals[self.buffer(number).value]

        def dfx_segment(*args: Any) -> Any:
            held = {
                self.origin_of(b): from_physical(x, aval(b))
                for b, x in zip(segment.inputs, args[:n_inputs], strict=True)
            }
            for launch in segment.launches:
                region = self.pg.regions[launch.region]
                with jax.named_scope(region.name):
                    reads = [held[self.origin_of(b)] for b in launch.ins]
                    outs = self.functions[launch.region](*reads)
                for b, x in self.results(launch, outs).items():
                    held[self.origin[b]] = x
            return [to_physical(held[self.origin[b]], aval(b)) for b, _ in segment.writes]

        outs = [self.spec(b) for b, _ in segment.writes]
        specs = list(map(self.spec, segment.inputs))
        specs += [spec for spec, wanted in zip(outs, in_place, strict=True) if wanted]
        donated = range(n_inputs, len(specs))
        device = self._lanes.device(segment.lane)
        return self._lowered(dfx_segment, specs, segment.lane, device, donated)

    def _compile(
        self, lowered: Any, text: str, lane: int, compiled: dict[str, tuple[int, Any]]
    ) -> Any:
        """Compiles, or takes what another lane has compiled of the same text."""
        if text not in compiled:
            options = self.compiler_options
            made = lowered.compile(compiler_options=options) if options else lowered.compile()
            compiled[text] = (lane, made.runtime_executable())
        owner, executable = compiled[text]
        if owner == lane:
            return executable
        return ffi_compat.share_executable(
            executable, self._lanes.client(lane), self._lanes.device(lane)
        )


def platform(on_gpu: bool) -> str:
    """Where the lanes are that ``builder`` builds for: ``"cpu"`` or ``"cuda"``."""
    lanes = lanes_in_force()
    if lanes is not None:
        return lanes.platform
    return "cuda" if on_gpu and jax.default_backend() == "gpu" else "cpu"


def where(on_gpu: bool) -> str:
    """The lanes that ``builder`` builds for, in words: ``"cpu"``, ``"cuda"`` or ``"device lanes on cpu"``."""
    lanes = lanes_in_force()
    if lanes is not None and lanes.platform == "cpu":
        return "device lanes on cpu"
    return platform(on_gpu)


def default_gpu() -> Any:
    """The GPU that JAX computes on: its default device, if that is one, else the first of this process."""
    chosen = jax.config.jax_default_device  # a device, the name of a platform, or None
    if getattr(chosen, "platform", None) == "gpu":
        return chosen
    return jax.local_devices()[0]


def builder(made: Planned, instructions: Sequence[Any]) -> StageBuilder:
    """The builder for the lanes in force, for those of the GPU if asked for, or for the CPU's.

    Raises:
        EngineError: CUDA lanes are asked for and cannot be had, with the reason.
        UnsupportedError, PlanError: lanes of a CPU are to have what only a GPU's can, or are too many.
    """
    gpu = made.options.gpu
    lanes = lanes_in_force()
    if lanes is None and platform(made.options.gpu_lanes) == "cuda":
        lanes = cuda_lanes(default_gpu())
    if gpu is not None and (lanes is None or lanes.platform != "cuda"):
        gpu.refuse_on_cpu()
    if lanes is None:
        return StageBuilder(made, instructions)
    if gpu is not None:
        gpu.refuse_on_device()
    return DeviceStageBuilder(
        lanes, gpu if gpu is not None and gpu.special else None, made, instructions
    )
