"""``debug`` and ``check_determinism`` for scheduled JAX functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dynaflow_xla.debugging import trials
from dynaflow_xla.debugging.report import DebugReport, DeterminismReport
from dynaflow_xla.errors import UnsupportedError, checks
from dynaflow_xla.ffi import _engine, xla
from dynaflow_xla.frontends.jax.adapters.lifted import Lifted, looks_inside
from dynaflow_xla.frontends.jax.adapters.wrapper import array_copies, same
from dynaflow_xla.frontends.jax.capture import capture
from dynaflow_xla.frontends.jax.capture.physical import is_key
from dynaflow_xla.frontends.jax.capture.tracing import exact_types
from dynaflow_xla.frontends.jax.lanes import device_stage, stamped
from dynaflow_xla.frontends.jax.lanes.entry import LaneEntry, build_stages
from dynaflow_xla.frontends.jax.planned import BufferValues, Planned, own_device, refuse_shapes
from dynaflow_xla.frontends.jax.regions.functions import region_function
from dynaflow_xla.ir.partitioned import PartitionedGraph, contents
from dynaflow_xla.planning.instructions import Launch, Merge, Record, Slice, Wait
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.recording import Decision
from dynaflow_xla.timelines.measured import fastest
from dynaflow_xla.timelines.spans import Span
from dynaflow_xla.timelines.timeline import Timeline, complete


def _bits(x: Any) -> str:
    """Digest of an array."""
    if isinstance(x, jax.Array) and is_key(x):
        x = jax.random.key_data(x)
    array = np.asarray(x)
    return trials.digest(array.tobytes(), str(array.dtype), array.shape)


@dataclass
class Subject:
    """A planned signature with its inputs, for ``dynaflow_xla.debugging``.

    Every region is compiled on its own, once, and runs by itself: in the orders of lanes that are asked for,
    over the plan's buffers.

    Attributes:
        made: The planned signature.
        inputs: Flat inputs of the function (closed-over values first).
        name: Of the function.
        bound: The inputs are those of the plan's graph, whose batch may be split.
    """

    made: Planned
    inputs: Sequence[Any]
    name: str
    bound: bool = False
    _functions: dict[int, Callable[..., list[Any]]] = field(default_factory=dict)
    _stages: list[Any] | None = None

    @property
    def plan(self) -> Plan:
        """What a call runs."""
        return self.made.plan

    @property
    def pg(self) -> PartitionedGraph:
        """The plan's regions."""
        return self.made.pg

    def round(self, plan: Plan, seed: int, concurrent: bool) -> trials.Round:
        """What watches a run."""
        return trials.Round(plan, _bits, seed, concurrent)

    def _memory(self, plan: Plan) -> BufferValues:
        made, inputs = self.made, self.inputs
        if made.split is not None and not self.bound:
            inputs = made.split.inputs(tuple(inputs))
        return BufferValues(plan, made.captured.graph, inputs)

    def function(self, region: int) -> Callable[..., list[Any]]:
        """The region without the gates that order it inside of one program."""
        if region not in self._functions:
            made = self.made
            function = made.functions[region]
            gated = {*getattr(made, "gates", ()), *getattr(made, "inside", ())}
            if region in gated and made.split is not None:
                function = made.split.function(region, Decision(region, 0))
            elif region in gated:
                function = region_function(made.captured, made.pg.regions[region])
            self._functions[region] = jax.jit(function)
        return self._functions[region]

    def alone(self, cores: int) -> Timeline | None:
        """The regions one after another, each compiled on its own, by a client of so many cores.

        On an accelerator a region has all of it, whatever the number of cores: that is measured once.

        Stamps inside of one program do not tell independent regions of a lane apart: XLA runs them in an
        order of its own.

        Args:
            cores: 0: those of the device that a call computes on. Outer regions always run there.

        Returns:
            None for 0 cores of an accelerator.
        """
        own = own_device(self.inputs)
        if own.platform != "cpu":
            if not cores:
                return None
            cores = 0
        memory, spans, now = self._memory(self.plan), [], 0
        texts = contents(self.pg)
        for launch in self.plan.launches:
            region = self.pg.regions[launch.region]
            narrow = cores > 0 and not region.outer
            device = xla.lane_device(0, cores) if narrow else own
            with exact_types(self.made.captured), jax.default_device(device):
                ins = jax.device_put([memory[b] for b in launch.ins], device)

                function = self.function(launch.region)

                def once(function: Any = function, ins: Any = ins) -> Any:
                    start = time.perf_counter_ns()
                    outs = jax.block_until_ready(function(*ins))
                    return time.perf_counter_ns() - start, outs

                took, outs = fastest(once, lambda run: run[0])
                outs = jax.device_put(outs, own)
            memory.write(launch, dict(zip(region.outputs, outs, strict=True)))
            spans.append(
                Span(
                    0, region.name, "launch", now, now + took, region=region.id, nano=region.nano,
                    resource=region.resource, content=texts[region.id],
                    # On one core the rest is; what stays outside has had all there are.
                    cores=max(1, self.plan.cores) if cores and region.outer else 1,
                )
            )  # fmt: skip
            now += took
        return complete("measured", spans, 1, {"name": self.name})

    def run(self, watch: trials.Round) -> None:
        """Runs a plan on this thread, or on the engine's lanes."""
        memory = self._memory(watch.plan)
        stage: list[Any] = []
        for instruction in watch.plan.instructions:
            if isinstance(instruction, Launch) and (instruction.lane < 0 or not watch.concurrent):
                self._on_lanes(stage, memory, watch)
                stage = []
                self._launch(instruction, memory, watch)
            elif watch.concurrent and not isinstance(instruction, Slice | Merge):
                stage.append(instruction)
        self._on_lanes(stage, memory, watch)

    def _launch(self, launch: Launch, memory: BufferValues, watch: trials.Round) -> None:
        watch.begin(launch.region)
        region = self.pg.regions[launch.region]
        with exact_types(self.made.captured):
            outs = self.function(launch.region)(*[memory[b] for b in launch.ins])
            jax.block_until_ready(outs)
            memory.write(launch, dict(zip(region.outputs, outs, strict=True)))
        watch.end(launch.region, outs)

    def _on_lanes(self, stage: Sequence[Any], memory: BufferValues, watch: trials.Round) -> None:
        """Runs what is between two outer regions on the engine's lanes, a step a region."""
        if not any(isinstance(i, Launch) for i in stage):
            return
        plan = watch.plan
        program = _engine.Program(plan.lanes, plan.events, 0, 0, 0, f"{self.name} under debug")
        failed: list[Exception] = []

        def step(launch: Launch) -> Callable[[Any], None]:
            def run(_: Any) -> None:
                try:
                    self._launch(launch, memory, watch)
                except Exception as error:
                    failed.append(error)
                    raise

            return run

        for instruction in stage:
            if isinstance(instruction, Launch):
                label = f"region {instruction.name!r}"
                program.add_python_launch(instruction.lane, label, step(instruction), [], [])
            elif isinstance(instruction, Record):
                program.add_record(instruction.lane, instruction.event)
            elif isinstance(instruction, Wait):
                program.add_wait(instruction.lane, instruction.event)
        program.finish()
        try:
            program.run([], [])
        except RuntimeError as error:
            raise (failed or [error])[0] from error

    def compiled(self, seed: int) -> dict[int, tuple[str, ...]] | None:
        """The compiled lane programs, as a call of the backend "ffi" on cores runs them."""
        made = self.made
        if (
            not isinstance(made, LaneEntry)
            or device_stage.platform(made.options.gpu_lanes) != "cpu"
        ):
            return None
        if self._stages is None:
            xla.ensure_registered()
            self._stages = build_stages(made, profile=True)
        memory = self._memory(made.plan)
        producers, graph = made.pg.producer_region(), made.pg.graph
        parts = {
            join.value: [
                (part, offset, offset + graph.values[part].bytes)
                for part, offset in zip(join.parts, join.offsets, strict=True)
            ]
            for join in graph.joins
        }
        seen: dict[int, tuple[str, ...]] = {}
        for stage, outer in self._stages:
            if stage is not None:
                arrays = stamped.disturbed(stage, made.captured, memory, seed)
                for value, array in zip(stage.outputs, arrays, strict=True):
                    data = array.tobytes()
                    for part, begin, end in parts.get(value, ((value, 0, len(data)),)):
                        region = producers[part]
                        seen[region] = (*seen.get(region, ()), trials.digest(data[begin:end]))
            if outer is not None:
                ins = [memory[b] for b in outer.ins]
                with exact_types(made.captured):
                    outs = self.function(outer.region)(*ins)
                outputs = made.pg.regions[outer.region].outputs
                memory.write(outer, dict(zip(outputs, outs, strict=True)))
        return seen


def refuse(made: Planned, name: str, caller: str) -> None:
    """Raises UnsupportedError for a function whose regions nobody may run more than once."""
    for op in made.captured.graph.ops:
        if op.outer and capture.changes_something(op.payload):
            raise UnsupportedError(
                f"{caller} runs a function many times, and a part of {name!r} {op.outer_reason}: "
                f"{op.kind}{op.at}. Look at the part of it that only computes: schedule that on its "
                "own, or take the effect out"
            )


def _subject(fast: Any, args: Any, kwargs: Any, caller: str) -> Subject:
    refuse_shapes(caller, args, kwargs)
    target = fast.planning(args, kwargs)
    made = target.planned(args, kwargs)
    refuse(made, fast._options.name, caller)
    return Subject(made, target.flat_inputs(args, kwargs), fast._options.name)


@looks_inside
def alone(fast: Any, args: Any, kwargs: Any, cores: int) -> Timeline | None:
    """The plan's regions one after another, see ``Subject.alone``."""
    return _subject(fast, args, kwargs, "why").alone(cores)


@looks_inside
def debug(fast: Any, args: Any, kwargs: Any, rounds: int, seed: int) -> DebugReport:
    """The report of ``dynaflow_xla.debug``."""
    subject = _subject(fast, args, kwargs, "debug")
    notes = [aside] if (aside := fast.beside_the_plan(args, kwargs)) else []
    return trials.debug(subject, rounds, seed, notes)


def alone_planned(made: Planned, inputs: Sequence[Any], name: str, cores: int) -> Timeline | None:
    """``alone`` of a planned signature that somebody else made; inputs are those of the plan's graph."""
    refuse(made, name, "why")
    return Subject(made, inputs, name, bound=True).alone(cores)


def debug_planned(
    made: Planned, inputs: Sequence[Any], name: str, rounds: int, seed: int
) -> DebugReport:
    """The same of a planned signature that somebody else made; inputs are those of the plan's graph."""
    refuse(made, name, "debug")
    return trials.debug(Subject(made, inputs, name, bound=True), rounds, seed)


def check_determinism(fast: Any, args: Any, kwargs: Any, runs: int) -> DeterminismReport:
    """The report of ``dynaflow_xla.check_determinism``: of whole calls, on copies."""
    find = looks_inside(lambda f, a, k: _subject(f, a, k, "check_determinism"))
    copies: Callable[[Any], Any] = array_copies
    values: Callable[[Any], Any] = same
    if isinstance(fast, Lifted):
        if not fast.wrapper.compares:
            return fast.inside(lambda f, a, k: check_determinism(f, a, k, runs), args, kwargs)
        copies, values = fast.wrapper.copies, fast.wrapper.values
    refused(fast, args, kwargs, "check_determinism")

    def call() -> list[tuple[str, str]]:
        a, k = copies((args, kwargs))
        result = values(fast(*a, **k))
        return [
            (
                "result" + jax.tree_util.keystr(path),
                _bits(x) if isinstance(x, jax.Array | np.ndarray) else repr(x),
            )
            for path, x in jax.tree_util.tree_leaves_with_path(result)
        ]

    name = checks.name_of(fast)
    return trials.check_determinism(name, runs, call, lambda: [find(fast, *copies((args, kwargs)))])


@looks_inside
def refused(fast: Any, args: Any, kwargs: Any, caller: str) -> None:
    """Refuses what are no arrays, and a function with effects; pure callbacks are what may be looked for."""
    refuse_shapes(caller, args, kwargs)
    made = fast.planning(args, kwargs).planned(args, kwargs)
    refuse(made, fast._options.name, caller)
