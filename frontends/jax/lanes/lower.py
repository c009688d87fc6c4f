"""From a plan to lane programs: one compiled executable a lane, with gates at the cross-lane edges.

A plan is cut into *stages* at its outer regions. In each stage, every lane's regions become one
JAX function compiled for that lane's client. Cross-lane edges and results go through gates (the
custom call ``dfx_gate``): it waits for events, copies tensors in from shared memory, copies tensors
out, signals events, in that order. Shared memory is touched by gates only, and a lane's gates are
chained in lane order, so the plan's happens-before order is the order of every access.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jcore

from dynaflow_xla.errors import DynaflowError, PlanError, UnsupportedError
from dynaflow_xla.ffi import _engine, programs, xla
from dynaflow_xla.ffi.lane_program import LaneProgram
from dynaflow_xla.frontends.jax import _compat
from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.frontends.jax.capture.physical import (
    from_physical,
    physical_aval,
    physical_spec,
    to_physical,
)
from dynaflow_xla.frontends.jax.lanes import lapack_guard
from dynaflow_xla.frontends.jax.lanes.emitter import LaneEmitter
from dynaflow_xla.frontends.jax.xla import order_gate
from dynaflow_xla.ir.graph import PartitionedGraph, Region, View
from dynaflow_xla.kernels import CudaKernel
from dynaflow_xla.planning.plan import Launch, Merge, Plan, Record, Slice


@dataclass(frozen=True)
class Second:
    """What else a region is given for its gate (``gate_placement.Gate``), behind its inputs.

    Attributes:
        values: Inputs that are given a second time.
        readers: Operators that read the second one.
        between: Operators between a second input and those; the others read what they make of the
            first input.
        products: Operators whose results pass beside a gate of their own.
        deps: What those gates read, given behind the second inputs; as abstract values.
    """

    values: tuple[int, ...] = ()
    readers: frozenset[int] = frozenset()
    between: frozenset[int] = frozenset()
    products: frozenset[int] = frozenset()
    deps: tuple[Any, ...] = ()


def region_function(
    captured: Captured, region: Region, second: Second | None = None
) -> Callable[..., list[Any]]:
    """The region as a traceable function from ``region.inputs`` to ``region.outputs``."""
    variables = captured.variables
    second = second or Second()
    other = {variables[v]: _compat.new_var(variables[v].aval) for v in second.values}
    deps = [_compat.new_var(aval) for aval in second.deps]
    inputs = [*(variables[v] for v in region.inputs), *other.values(), *deps]
    equations = []
    for index in region.ops:
        eqn = captured.equation(index)
        reads = [a if isinstance(a, jcore.Literal) else other.get(a, a) for a in eqn.invars]
        if index in second.readers:
            eqn = eqn.replace(invars=reads)
        elif index in second.between:
            fresh = [_compat.new_var(v.aval) for v in eqn.outvars]
            equations.append(eqn.replace(invars=reads, outvars=fresh))
            other.update(zip(eqn.outvars, fresh, strict=True))
        if index in second.products:
            equations.extend(order_gate.behind(eqn, deps))
        else:
            equations.append(eqn)
    outputs = [variables[v] for v in region.outputs]
    closed = _compat.make_jaxpr_of(equations, inputs, outputs, captured.jaxpr)
    return lapack_guard.ordered(closed)


def replaced_function(
    fn: Callable[..., Any], captured: Captured, region: Region, where: str
) -> Callable[..., list[Any]]:
    """A user's replacement for a region, its result types checked.

    Raises:
        PlanError: the replacement returns other shapes or dtypes than the region.
    """
    avals = captured.avals
    specs = [jax.ShapeDtypeStruct(avals[v].shape, avals[v].dtype) for v in region.inputs]

    def flat(*args: Any) -> list[Any]:
        return jax.tree_util.tree_leaves(fn(*args))

    try:
        got = jax.eval_shape(flat, *specs)
    except DynaflowError:
        raise  # a built-in error, too, but not one of those meant here
    except TypeError as error:
        raise PlanError(
            f"the replacement for region {region.name!r} ({where}) must take its {len(specs)} inputs "
            f"{[f'{s.dtype}{list(s.shape)}' for s in specs]}: {error}"
        ) from error
    want = [(tuple(avals[v].shape), avals[v].dtype) for v in region.outputs]
    have = [(tuple(s.shape), s.dtype) for s in got]
    if have != want:

        def show(types: Sequence[Any]) -> str:
            return "(" + ", ".join(f"{d}{list(s)}" for s, d in types) + ")"

        raise PlanError(
            f"the replacement for region {region.name!r} ({where}) must return {show(want)}, as the "
            f"region does; it returns {show(have)}."
        )
    return lapack_guard.ordered_function(flat)


@dataclass(frozen=True)
class KernelRegion:
    """A region with a CUDA kernel in its place; called, it is the region as it was written.

    Attributes:
        kernel: For lanes of a GPU.
        parameters: The kernel's, bound to the region's inputs and outputs.
        as_written: From the region's inputs to its outputs.
    """

    kernel: CudaKernel
    parameters: list[tuple[str, int] | bytes]
    as_written: Callable[..., list[Any]]

    def __call__(self, *args: Any) -> list[Any]:
        """The region as it was written."""
        return self.as_written(*args)


def kernel_function(
    kernel: CudaKernel, captured: Captured, region: Region, backend: str
) -> KernelRegion:
    """A region and the kernel that replaces it on a GPU.

    Raises:
        PlanError: the kernel's parameters do not fit the region.
        UnsupportedError: the backend has no lanes.
    """
    if backend != "ffi":
        raise UnsupportedError(
            f"kernel {kernel.name!r} in the place of region {region.name!r} needs backend='ffi': one XLA "
            "program launches its kernels itself (write it with Pallas there, or call it by jax.ffi)"
        )
    parameters = kernel.bound(len(region.inputs), len(region.outputs), region.name)
    return KernelRegion(kernel, parameters, region_function(captured, region))


def no_kernel_for_parts(kernel: CudaKernel, region: Region) -> UnsupportedError:
    """The error for a kernel in the place of a nano-batch's region."""
    return UnsupportedError(
        f"kernel {kernel.name!r} cannot replace region {region.name!r} of a nano-batch: its sizes and "
        "where its values lie differ from part to part. Replace it by a function"
    )


def cut_view(view: View, whole: Any) -> Any:
    """The rows that a view shows."""
    return jax.lax.slice_in_dim(whole, view.start, view.stop, axis=view.axis)


@_compat.weak_parameter
@dataclass(eq=False)
class Stage:
    """One custom call: what runs between two outer regions.

    Attributes:
        inputs, outputs: Value ids, in the order of the custom call's operands and results.
        hash: Content hash, the custom call's attribute.
        lanes: Lanes that run something here.
        loaded: Engine program with the lane executables, shared with equal stages. Kept while
            anything may still lower or instantiate the custom call.
        reference: The same stage as a plain traceable function (other platforms, batching).
        output_avals: Abstract values of ``outputs``.
        depends: For each output, the positions in ``inputs`` that it depends on.
        platform: Where the custom call runs; elsewhere the reference does.
        scratch_bytes: On CUDA, memory that the custom call asks XLA for.
        capturable: On CUDA, whether the custom call may be recorded into a CUDA graph: kernels only.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    hash: str
    lanes: tuple[int, ...]
    loaded: programs.Loaded
    reference: Callable[..., list[Any]]
    output_avals: tuple[Any, ...]
    lane_texts: dict[int, str] = field(default_factory=dict)
    replan: Any = None
    program_name: str = ""
    platform: str = "cpu"
    scratch_bytes: int = 0
    capturable: bool = False
    depends: tuple[frozenset[int], ...] = ()

    @property
    def program(self) -> Any:
        """The engine's program."""
        return self.loaded.program

    @property
    def lane_programs(self) -> list[LaneProgram]:
        """What runs on the lanes of a CPU."""
        return self.loaded.lane_programs

    @property
    def counters(self) -> list[Any]:
        """Of device lanes: what their steps did."""
        return self.loaded.counters

    @property
    def note(self) -> str:
        """Of device lanes: a sentence for explain."""
        return self.loaded.note


def split_stages(plan: Plan) -> list[tuple[list[Any], Launch | None]]:
    """Cuts the instruction list at outer launches: (instructions, the outer launch after them)."""
    stages: list[tuple[list[Any], Launch | None]] = [([], None)]
    for instruction in plan.instructions:
        if isinstance(instruction, Launch) and instruction.lane < 0:
            stages[-1] = (stages[-1][0], instruction)
            stages.append(([], None))
        elif not isinstance(instruction, Slice | Merge):
            stages[-1][0].append(instruction)
    return stages


class StageBuilder:
    """Lowers one stage of a plan to an engine program."""

    def __init__(
        self,
        captured: Captured,
        pg: PartitionedGraph,
        plan: Plan,
        instructions: list[Any],
        functions: dict[int, Callable[..., list[Any]]],
        needed_later: set[int],
        compiler_options: dict[str, Any] | None,
    ):
        self.captured, self.pg, self.plan = captured, pg, plan
        self.instructions = instructions
        self.functions = functions
        self.compiler_options = compiler_options
        launches = [i for i in instructions if isinstance(i, Launch)]
        self.producer_lane: dict[int, int] = {}
        self.reader_lanes: dict[int, set[int]] = {}
        arguments: dict[int, None] = {}
        for launch in launches:
            region = pg.regions[launch.region]
            for value in region.inputs:
                if value in self.producer_lane:
                    self.reader_lanes.setdefault(value, set()).add(launch.lane)
                else:
                    arguments[value] = None
            for value in region.outputs:
                self.producer_lane[value] = launch.lane
        # What lanes read from outside: inputs of the stage, and views of them.
        self.arguments = tuple(arguments)
        self.views = {view.value: view for view in pg.graph.views if view.value in arguments}
        self.inputs = tuple(dict.fromkeys(self._whole(v) for v in arguments))
        self.joins = {
            join.value: join
            for join in pg.graph.joins
            if join.value in needed_later and self.producer_lane.keys() >= set(join.parts)
        }
        self.outputs = (*(v for v in self.producer_lane if v in needed_later), *self.joins)
        self.lanes = tuple(sorted({launch.lane for launch in launches}))
        self.launches = launches
        self.result_writes: list[tuple[int, int]] = []  # value, buffer
        self.shared_buffer: dict[int, int] = {}

    def _whole(self, value: int) -> int:
        """The input that an argument is, or is a part of."""
        view = self.views.get(value)
        return value if view is None else self.pg.graph.inputs[view.input]

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
            depends=self._dependence(),
        )

    def _compile_lanes(self, lowered: dict[int, Any]) -> dict[int, Any]:
        """Compiles the lanes' programs side by side."""
        options = self.compiler_options

        def compile_lane(lane: int) -> Any:
            low = lowered[lane]
            return low.compile(compiler_options=options) if options else low.compile()

        with ThreadPoolExecutor(max_workers=max(1, len(self.lanes))) as pool:
            return dict(zip(self.lanes, pool.map(compile_lane, self.lanes), strict=True))

    def reference(self, *args: Any) -> list[Any]:
        """The stage as plain traceable code, over arrays (keys as their words)."""
        avals = self.captured.avals
        env = {v: from_physical(x, avals[v]) for v, x in zip(self.inputs, args, strict=True)}
        for view in self.views.values():
            env[view.value] = cut_view(view, env[self._whole(view.value)])
        for launch in self.launches:
            region = self.pg.regions[launch.region]
            outs = self.functions[launch.region](*[env[v] for v in region.inputs])
            env.update(zip(region.outputs, outs, strict=True))
        for join in self.joins.values():
            env[join.value] = jax.lax.concatenate([env[v] for v in join.parts], join.axis)
        return [to_physical(env[v], avals[v]) for v in self.outputs]

    def _dependence(self) -> tuple[frozenset[int], ...]:
        """Which inputs each output depends on, operator by operator."""
        sets: dict[int, frozenset[int]] = {
            v: frozenset([self.inputs.index(self._whole(v))]) for v in self.arguments
        }
        for launch in self.launches:
            for index in self.pg.regions[launch.region].ops:
                op = self.captured.graph.ops[index]
                mine = frozenset().union(*(sets[v] for v in op.inputs))
                for value in op.outputs:
                    sets[value] = mine
        for join in self.joins.values():
            sets[join.value] = frozenset().union(*(sets[v] for v in join.parts))
        return tuple(sets[v] for v in self.outputs)

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
