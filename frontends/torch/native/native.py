"""Running a plan natively: stretches of regions as Python steps on the engine's lanes.

Between two cross-lane edges a lane runs one step, so the interpreter lock changes hands at edges and
inside operators only. Tensors cross lanes as references in the call's environment; the engine's
events order who writes and who reads. What a call needs from its caller's thread (grad mode is
always off here, inference mode, flushing of denormals, context variables) is set on the lanes for its
time.
"""

from __future__ import annotations

import atexit
import contextvars
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dynaflow_xla import machine
from dynaflow_xla.errors import DynaflowError, EngineError, step_failed
from dynaflow_xla.ffi import _engine, watching
from dynaflow_xla.frontends.torch._compat import modes
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.native import threads
from dynaflow_xla.frontends.torch.native.memory import Environment, Flow, Memory, results_of
from dynaflow_xla.frontends.torch.native.stretches.regions import (
    Stretch,
    StretchBody,
    build_stretch,
    steps_of,
)
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.instructions import Instruction, Launch, Record, Wait
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.timelines.measured import TRACE_WAIT, Measured, Trace


class _Lane(threading.local):
    busy = False
    owned = False


_lane = _Lane()
_calls: dict[int, _Call] = {}
_numbers = itertools.count(1)
_smallest = 5e-324
_owner = 0


def in_lane() -> bool:
    """Whether this thread runs a step of a plan now."""
    return _lane.busy


def check_process() -> None:
    """Raises EngineError in a forked child, where the lanes' threads do not exist."""
    if _owner and os.getpid() != _owner:
        raise EngineError(
            "this process was forked after dynaflow_xla had started threads; they do not exist in the "
            "child. Start workers with multiprocessing's 'spawn' or 'forkserver' (a DataLoader's "
            "multiprocessing_context), or fork before the first scheduled call."
        )


def _own_engine() -> None:
    """Once a process: calls in flight finish before the interpreter goes, later ones fail."""
    global _owner
    if not _owner:
        atexit.register(_engine.shutdown)
        _owner = os.getpid()


@dataclass
class _Call:
    """One execution: the environment, the caller's settings, the first error.

    ``owned``: threads that PyTorch's operators may use on the caller's thread, while it has lanes' work.
    ``context``: the caller's context variables, which operators of the user's may read.
    """

    env: Environment
    inference: bool
    flush: bool
    owned: int = 1
    started: set[int] = field(default_factory=set)
    error: tuple[Stretch, BaseException] | None = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)


def run_stretch(stretch: Stretch, call: _Call) -> None:
    """Runs a stretch on the caller's thread; the call remembers where it failed."""
    try:
        _run(stretch, call.env)
    except Exception as error:
        call.error = (stretch, error)
        raise


def _run(stretch: Stretch, env: Environment) -> None:
    """Runs a stretch; a profiler of PyTorch's sees it under the names of its regions."""
    if modes.profiler_enabled():
        with torch.profiler.record_function(f"dynaflow_xla {stretch.name}"):
            stretch.run(env)
    else:
        stretch.run(env)


class _LaneStep:
    """What the engine calls: runs a stretch in the environment of the call it is told."""

    takes_turns = True
    """It gives the interpreter lock up as soon as its first long operator runs."""

    def __init__(self, stretch: Stretch, cores: int) -> None:
        self.stretch = stretch
        self.cores = cores

    def __call__(self, numbers: tuple[int, ...]) -> None:
        call = _calls[numbers[0]]
        if id(self) in call.started:
            # The engine starts a step anew after Ctrl-C, which may have come in the middle of it.
            raise EngineError("interrupted")
        call.started.add(id(self))
        was_busy, _lane.busy = in_lane(), True
        try:
            if not _lane.owned:
                self._run_as_guest(call)
            else:
                # The caller's thread may have any lane's steps, that of another lane's width too.
                saved = threads.limit(self.cores) if self.cores != call.owned else None
                try:
                    self._run_here(call)
                finally:
                    if saved is not None:
                        threads.restore(saved)
        except BaseException as error:
            if call.error is None:
                call.error = (self.stretch, error)
            raise EngineError(str(error)) from error
        finally:
            _lane.busy = was_busy

    def _run_here(self, call: _Call) -> None:
        if call.inference:
            with torch.inference_mode():
                _run(self.stretch, call.env)
        else:
            _run(self.stretch, call.env)

    def _run_as_guest(self, call: _Call) -> None:
        """A thread of the engine: its settings are made the caller's for the time of the step."""
        grad, flush = torch.is_grad_enabled(), _flushes()
        saved = threads.limit(self.cores)
        modes.set_grad_enabled(False)
        if flush != call.flush:
            torch.set_flush_denormal(call.flush)
        try:
            # A copy: one context is one thread's at a time.
            call.context.copy().run(self._run_here, call)
        finally:
            if flush != call.flush:
                torch.set_flush_denormal(flush)
            modes.set_grad_enabled(grad)
            threads.restore(saved)


def _flushes() -> bool:
    """Whether this thread's floating point unit flushes denormals to zero."""
    return _smallest * 1.0 == 0.0


@dataclass
class Stage:
    """What runs between two outer regions.

    Attributes:
        order: All stretches in plan order, for running them on one thread.
        program: The engine's program, or None if one lane does everything.
        launches: Stretch of each launch of the program.
        instructions: The plan's instructions of this stage.
        width_of: Cores of each region's launch.
        first: Cores of the lane whose work the caller begins with.
        widest: Of the widest lane that has something to do.
        together: Cores of all such lanes.
        cores: Of the machine, by the plan; 0: it knows of none.
        long: Whether lanes work so long that OpenMP workers that spin are in their way.
    """

    order: list[Stretch]
    program: Any = None
    launches: list[Stretch] = field(default_factory=list)
    instructions: Sequence[Instruction] = ()
    width_of: Mapping[int, int] = field(default_factory=dict)
    first: int = 1
    widest: int = 1
    together: int = 0
    cores: int = 0
    long: bool = False

    def run(self, call: _Call, measured: Measured | None = None) -> None:
        """Runs the stage; tells ``measured`` when regions ran.

        Raises:
            EngineError: a region failed; the exception is its cause.
        """
        if self.program is None or in_lane() or modes.modes_active():
            # A lane that is alone has no more cores than the plan says, either.
            limited = self.cores > self.widest and not in_lane()
            for stretch in self.order:
                saved = threads.limit(self.width_of[stretch.regions[0]]) if limited else None
                try:
                    run_stretch(stretch, call)
                finally:
                    if saved is not None:
                        threads.restore(saved)
            return
        number = next(_numbers)
        _calls[number] = call
        spinning = torch.get_num_threads() - 1
        needed = self.long and self.together + spinning > machine.cores()
        team = threads.team() if needed and self.widest == 1 else None
        ended = needed and team is None and threads.end_workers()
        call.owned = self.first
        saved = threads.limit(self.first)
        _lane.owned = True
        try:
            # Workers that a wide lane makes would have the caller's one core, too, and for good.
            records = self.program.run(
                [number], [], profile=measured is not None, team=team, stay=self.first == 1
            )
        finally:
            _lane.owned = False
            threads.restore(saved)
            if ended:
                threads.make_workers()
            del _calls[number]
        if measured is not None:
            measured.add_stage(self.instructions, map(self._trace, records))

    def _trace(self, record: Trace) -> Trace:
        """A record by region, and by the number of an event in this stage."""
        number, lane, start, end = record
        if number < 0:
            number = self.launches[-1 - number].regions[0]
        elif number >= TRACE_WAIT:
            events = [i.event for i in self.instructions if isinstance(i, Record)]
            number = TRACE_WAIT + events.index(number - TRACE_WAIT)
        return number, lane, start, end


@dataclass
class Native:
    """A plan that can run.

    Attributes:
        captured: The graph.
        pg: Its regions.
        plan: The plan.
        memory: What its buffers are in a call.
        stages: Stages, each with what follows on the caller's thread with all cores, as a stretch: outer
            regions, and wide ones.
    """

    captured: Captured
    pg: PartitionedGraph
    plan: Plan
    memory: Memory
    stages: list[tuple[Stage, Stretch | None]]

    def stretches(self) -> list[Stretch]:
        """All that runs, in order."""
        return [s for stage, outer in self.stages for s in (*stage.order, outer) if s is not None]

    def _launch(self, region: int) -> Launch:
        return next(
            i for i in self.plan.instructions if isinstance(i, Launch) and i.region == region
        )

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Flat inputs (in the order of ``graph.inputs``) to flat outputs.

        Raises:
            EngineError: a region failed; names it, and has the exception as its cause.
        """
        return self.run(inputs)

    def run(self, inputs: Sequence[Any], measured: Measured | None = None) -> list[Any]:
        """As a call; tells ``measured`` when regions ran."""
        memory = self.memory
        env = memory.environment(inputs)
        call = _Call(env, torch.is_inference_mode_enabled(), _flushes())
        cause: BaseException | None = None
        grad = torch.is_grad_enabled()
        modes.set_grad_enabled(False)
        views = modes.keep_views_plain()
        try:
            for stage, outer in self.stages:
                stage.run(call, measured)
                if outer is not None:
                    begin = time.monotonic_ns()
                    run_stretch(outer, call)
                    if measured is not None:
                        took = time.monotonic_ns() - begin
                        measured.add_outer(self._launch(outer.regions[0]), took)
        except Exception as error:
            cause = call.error[1] if call.error else error
            if not isinstance(cause, Exception):
                raise cause from None  # Ctrl-C
            raise self._explain(call, error) from cause
        finally:
            modes.set_grad_enabled(grad)
            modes.restore_views(views)
            # An error refers to the frames it passed, this one among them: it would keep itself, and with
            # itself the call's tensors, until the garbage collector runs.
            call.error = cause = None
        return results_of(memory, env)

    def _explain(self, call: _Call, error: BaseException) -> BaseException:
        if call.error is None:
            return EngineError(f"{self.captured.graph.name!r}: {error}")
        stretch, cause = call.error
        if isinstance(cause, DynaflowError):
            return type(cause)(str(cause))
        region = self.pg.regions[stretch.region_of(cause)]
        where = "" if region.source is None else f" (from {region.source})"
        text = f"region {region.name!r} of {self.captured.graph.name!r}{where} failed: "
        return step_failed(f"{text}{type(cause).__name__}: {cause}", cause)


Compiler = Callable[[Sequence[StretchBody]], list[StretchBody]]
"""What puts programs into the work of stretches."""


def build(
    captured: Captured,
    pg: PartitionedGraph,
    plan: Plan,
    implementations: dict[int, Callable[..., Sequence[Any]]],
    *,
    fuse: bool = True,
    always: bool = False,
    compiler: Compiler | None = None,
    watched: Callable[[Stretch], Stretch] = lambda stretch: stretch,
) -> Native:
    """Makes a plan runnable.

    Args:
        captured: The graph with payloads.
        pg: Its regions.
        plan: A validated plan.
        implementations: See ``regions.steps_of``.
        fuse: Join neighbouring regions of a lane; without it each region is a step (for profiles).
        always: Use the engine for one lane too (for profiles).
        compiler: Makes programs of the operators of stretches; None: they run one by one.
        watched: What runs in the place of each stretch (for debugging).
    """
    memory = Memory(captured, plan)
    cut = _phases(plan, fuse)
    grouped = [_stretches(instructions, fuse) for instructions, _ in cut]
    several = len(plan.lanes_used) > 1
    everything = [list(s) for _, stretches in grouped for s in stretches]
    on_lanes = len(everything)
    everything += [[launch.region for launch in outer] for _, outer in cut if outer]
    flow = Flow(plan, pg, everything, {into for into, _ in memory.written})

    parts = {value for placed in memory.placed for value, *_ in placed.parts}
    works = []
    width = {i.region: i.width for i in plan.instructions if isinstance(i, Launch)}
    for number, group in enumerate(everything):
        steps = steps_of(captured, pg, group, implementations, flow.read_as)
        exported = flow.exported(group)
        count = width[group[0]] if number < on_lanes and (several or plan.cores) else 0
        made = StretchBody(
            tuple(group), steps, exported, flow.taken(group), exported | parts, count
        )
        works.append(made)
    if compiler is not None:
        works = compiler(works)
    stretch = iter([watched(build_stretch(captured, pg, w, memory.placed)) for w in works])
    inner = [[next(stretch) for _ in groups] for _, groups in grouped]
    stages: list[tuple[Stage, Stretch | None]] = []
    for (instructions, outer), (layout, _), stretches in zip(cut, grouped, inner, strict=True):
        widths = {i.lane: i.width for i in instructions if isinstance(i, Launch)}
        stage = _stage(plan, layout, stretches, captured.graph.name, always, instructions, widths)
        stage.instructions = instructions
        stage.width_of = width
        if widths:
            stage.first, stage.widest = widths[min(widths)], max(widths.values())
        stage.together = sum(widths.values())
        stage.cores = plan.cores
        stage.long = _on_lanes_ns(pg, instructions) >= threads.LONG_NS
        stages.append((stage, next(stretch) if outer else None))
    return Native(captured, pg, plan, memory, stages)


def _on_lanes_ns(pg: PartitionedGraph, instructions: Sequence[Instruction]) -> float:
    """How long the lane with the most work is expected to take, on one core."""
    work: dict[int, float] = {}
    for i in instructions:
        if isinstance(i, Launch):
            work[i.lane] = work.get(i.lane, 0.0) + pg.regions[i.region].cost_ns
    return max(work.values(), default=0.0)


def _phases(plan: Plan, fuse: bool) -> list[tuple[list[Instruction], list[Launch]]]:
    """What lanes do, and the launches after it that are on no lane: neighbours together, if asked for."""
    phases: list[tuple[list[Instruction], list[Launch]]] = []
    for instructions, outer in plan.stages():
        if fuse and phases and not instructions:
            phases[-1][1].extend([] if outer is None else [outer])
        else:
            phases.append(([*instructions], [] if outer is None else [outer]))
    return phases


def _stretches(
    instructions: Sequence[Instruction], fuse: bool
) -> tuple[list[tuple[int, Instruction | int]], list[list[int]]]:
    """Layout, (lane, event instruction or stretch number) in order, and the regions of stretches."""
    layout: list[tuple[int, Instruction | int]] = []
    groups: list[list[int]] = []
    open_on: dict[int, int] = {}
    for instruction in instructions:
        if isinstance(instruction, Launch):
            group = open_on.get(instruction.lane, -1)
            if group < 0 or not fuse:
                open_on[instruction.lane] = len(groups)
                layout.append((instruction.lane, len(groups)))
                groups.append([instruction.region])
            else:
                groups[group].append(instruction.region)
        elif isinstance(instruction, Record | Wait):
            open_on.pop(instruction.lane, None)
            layout.append((instruction.lane, instruction))
    return layout, groups


def _stage(
    plan: Plan,
    layout: Sequence[tuple[int, Instruction | int]],
    stretches: list[Stretch],
    name: str,
    always: bool,
    instructions: Sequence[Instruction],
    widths: Mapping[int, int],
) -> Stage:
    if not layout or (len({lane for lane, _ in layout}) < 2 and not always):
        return Stage(stretches)
    _own_engine()
    program = _engine.Program(plan.lanes, plan.events, 1, 0, 0, name)
    number = program.add_buffer("arg", 0, 0, 0)
    watching.name(program, instructions)
    launches = []
    for lane, item in layout:
        if isinstance(item, int):
            stretch = stretches[item]
            label = f"lane {lane} of {name}"
            if watching.watched():
                label += f" ({stretch.name})"
            program.add_python_launch(lane, label, _LaneStep(stretch, widths[lane]), [number], [])
            launches.append(stretch)
        elif isinstance(item, Record):
            program.add_record(lane, item.event)
        elif isinstance(item, Wait):
            program.add_wait(lane, item.event)
    program.finish()
    return Stage(stretches, program, launches)
