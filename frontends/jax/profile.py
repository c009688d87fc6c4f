"""``profile``: one run with time stamps, as a timeline."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import jax
import msgspec
import numpy as np

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax import entry, lower, physical
from dynaflow_xla.plan import Launch, Record
from dynaflow_xla.simulate import lower_bound
from dynaflow_xla.strategies.auto import Auto
from dynaflow_xla.timeline import Span, Timeline, complete

# Trace ids (csrc/include/dfx/observer.h and ffi/xla_handlers.cc): a lane's whole program is negative,
# a region is its number, a wait and a copy are these plus a number.
_TRACE_WAIT = 1 << 24
_TRACE_COPY = 1 << 25

# What other processes take away is no property of the plan: of this many runs, or as many as fit,
# the fastest counts.
_RUNS = 7
_MAX_SECONDS = 1.0

_Trace = tuple[int, int, int, int]  # id, lane, start, end


def profile(fast: Any, args: Any, kwargs: Any) -> Timeline:
    """See ``dynaflow_xla.profile``."""
    if fast._options.backend == "xla":
        raise UnsupportedError(
            f"{fast._options.name!r} runs as one XLA program, which has no time stamps between regions; "
            "use jax.profiler.trace (regions are its name scopes), or dfx.compile for its order."
        )
    target = fast
    if isinstance(fast._options.strategy, Auto):
        choice = fast.decision(args, kwargs)
        child = choice.child if choice is not None else None
        target = child or fast.with_strategy(
            fast._options.strategy.candidates(fast._options.lanes)[0]
        )
    made: entry.Entry = target.planned(args, kwargs)
    inputs = target.flat_inputs(args, kwargs)
    if any(isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in inputs):
        raise UnsupportedError("profile runs the function: it takes arrays, not shapes or tracers")
    stages = entry.build_stages(
        made.captured, made.pg, made.plan, made.functions, made.options, profile=True
    )
    captured = made.captured
    env: dict[int, Any] = dict(zip(captured.graph.inputs, inputs, strict=True))
    measured = _Measured(made)
    for (stage, outer), (instructions, _) in zip(
        stages, lower.split_stages(made.plan), strict=True
    ):
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


def _run_stage(stage: lower.Stage, captured: Any, env: dict[int, Any]) -> list[_Trace]:
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
    runs: list[list[_Trace]] = []
    until = time.monotonic() + _MAX_SECONDS
    while not runs or (len(runs) < _RUNS and time.monotonic() < until):
        runs.append([tuple(r) for r in stage.program.run(addresses, pointers, profile=True)])
    for value, array in zip(stage.outputs, results, strict=True):
        env[value] = physical.from_physical(jax.numpy.array(array), captured.avals[value])
    return min(runs, key=_length)


def _length(records: list[_Trace]) -> int:
    return max((r[3] for r in records), default=0) - min(
        (r[2] for r in records if r[0] < 0), default=0
    )


class _Measured:
    """Spans of the stages and outer regions so far, laid end to end.

    What happens between them here (buffers of the profile itself) is no part of a call: left out.
    """

    def __init__(self, made: entry.Entry):
        self._made = made
        self._spans: list[Span] = []
        self._now = 0
        self._launch_of: dict[tuple[int, int], int] = {}  # (region, nano-batch) -> its span
        self._barrier: tuple[int, ...] = ()
        self._preds = made.pg.predecessors()

    def add_stage(self, instructions: list[Any], records: list[_Trace]) -> None:
        """Spans of one stage from the engine's records."""
        # The program numbers its events in the order in which they are recorded.
        producers: list[Launch | None] = []
        last: dict[int, Launch] = {}
        order: dict[tuple[int, int], list[Launch]] = {}  # by lane and region, in lane order
        for instruction in instructions:
            if isinstance(instruction, Launch):
                last[instruction.lane] = instruction
                order.setdefault((instruction.lane, instruction.region), []).append(instruction)
            elif isinstance(instruction, Record):
                producers.append(last.get(instruction.lane))
        # A lane's first stamp starts where its program did: gates know ends only.
        begin = {lane: t0 for number, lane, t0, _ in records if number < 0}
        stamps = [
            (lane, max(t0, begin.get(lane, t0)), t1, number)
            for number, lane, t0, t1 in records
            if number >= 0
        ]
        start = min([*begin.values(), *(s[1] for s in stamps)], default=0)
        shift = self._now - start
        first = len(self._spans)
        waits: dict[int, Launch] = {}
        lanes_seen: set[int] = set()
        for lane, t0, t1, number in sorted(stamps, key=lambda s: s[:3]):
            at, until = t0 + shift, t1 + shift
            after = () if lane in lanes_seen else self._barrier
            lanes_seen.add(lane)
            if number >= _TRACE_COPY:
                span = Span(lane, "copy", "copy", at, until, after=after)
            elif number >= _TRACE_WAIT:
                producer = producers[number - _TRACE_WAIT]
                name = producer.name if producer is not None else "the start"
                where = producer.lane if producer is not None else lane
                if producer is not None:
                    waits[len(self._spans)] = producer
                span = Span(
                    lane, f"wait for {name!r}", "wait", at, until,
                    reason=f"waits for {name!r} on lane {where}", after=after,
                )  # fmt: skip
            else:
                nano = order[lane, number].pop(0).nano
                self._launch_of[number, nano] = len(self._spans)
                span = self._region(number, lane, at, until, nano, after)
            self._spans.append(span)
        # What a span follows may stand behind it in the list: known only now.
        for i in range(first, len(self._spans)):
            span = self._spans[i]
            found = set(span.after)
            if i in waits:
                found.add(self._signal(self._launch_of[waits[i].region, waits[i].nano]))
            if span.kind == "launch":
                found.update(self._producers(span.region, span.nano))
            self._spans[i] = msgspec.structs.replace(span, after=tuple(sorted(found)))
        self._now = max((s.end_ns for s in self._spans), default=0)

    def _region(
        self, number: int, lane: int, begin: int, end: int, nano: int, after: tuple[int, ...]
    ) -> Span:
        region = self._made.pg.regions[number]
        return Span(
            lane, region.name, "launch", begin, end, number, nano, region.resource, region.flops,
            region.bytes_moved, str(region.source or ""), after=after,
        )  # fmt: skip

    def _producers(self, region: int, nano: int) -> set[int]:
        spans = (self._launch_of.get((p, nano)) for p in self._preds[region])
        return {i for i in spans if i is not None}

    def _signal(self, launch: int) -> int:
        """A region signals after copying out: that copy's span if there is one."""
        span, following = self._spans[launch], launch + 1
        if following < len(self._spans):
            copy = self._spans[following]
            if copy.kind == "copy" and copy.lane == span.lane:
                return following
        return launch

    def add_outer(self, launch: Launch, took_ns: int) -> None:
        """The span of an outer region: everything before it is over, everything else is later."""
        last: dict[int, int] = {}
        for i in range(self._barrier[0] + 1 if self._barrier else 0, len(self._spans)):
            last[self._spans[i].lane] = i
        found = {*last.values(), *self._barrier}
        found.update(self._producers(launch.region, launch.nano))
        index = len(self._spans)
        end = self._now + took_ns
        self._spans.append(
            self._region(launch.region, -1, self._now, end, launch.nano, tuple(sorted(found)))
        )
        self._launch_of[launch.region, launch.nano] = index
        self._barrier = (index,)
        self._now = end

    def timeline(self, name: str) -> Timeline:
        """All of it, with the bound that the measured times give."""
        made = self._made
        lanes = made.plan.lanes
        times = complete("measured", self._spans, lanes, {"name": name})
        bound = lower_bound(made.plan, made.pg, times)
        return complete("measured", self._spans, lanes, {"name": name}, bound)
