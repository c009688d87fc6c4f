"""Tracing one lane of a stage: its regions, with gates where other lanes are involved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_xla import machine
from dynaflow_xla.errors import PlanError
from dynaflow_xla.ffi import xla
from dynaflow_xla.frontends.jax.capture.physical import (
    from_physical,
    is_key,
    physical_spec,
    to_physical,
)
from dynaflow_xla.frontends.jax.lanes.parts import StageParts
from dynaflow_xla.frontends.jax.regions import one_pass
from dynaflow_xla.ir.graph import Graph, Region
from dynaflow_xla.planning.instructions import Launch, Record, Wait

_HOLD_MIN_NS = 50_000
"""A region of so many nanoseconds is kept behind a publish that the plan has before it,"""

_HOLD_MAX_SHARE = 0.2
"""if the copy of an argument costs no more than that of its time: it is all the other lane may wait for."""


def _feeding_costliest(graph: Graph, region: Region) -> list[int]:
    """Those inputs of a region that its costliest operator depends on."""
    sources: dict[int, frozenset[int]] = {v: frozenset([v]) for v in region.inputs}
    costliest, best = frozenset[int](), -1.0
    for index in region.ops:
        op = graph.ops[index]
        mine = frozenset[int]().union(*(sources.get(v, frozenset()) for v in op.inputs))
        sources.update(dict.fromkeys(op.outputs, mine))
        if op.cost_ns > best:
            costliest, best = mine, op.cost_ns
    return sorted(costliest)


@dataclass(eq=False)
class _Held:
    """A value on the lane; every buffer that holds it refers to this."""

    value: int
    x: Any = None


class LaneEmitter:
    """Traces one lane's function; gates are merged where their order allows."""

    def __init__(
        self, lane: int, builder: StageParts, profile: bool, place: one_pass.Place | None = None
    ):
        self.lane = lane
        self.builder = builder
        self.profile = profile
        self.place = place
        self.held: dict[int, _Held] = {}  # by buffer of the plan
        self.chain: Any = None
        self.previous: list[Any] = []
        self.waits: list[int] = []
        self.receives: list[tuple[_Held, int]] = []
        self.sends: list[tuple[_Held, int]] = []
        self.records: list[int] = []

    def flush(
        self,
        *,
        stamp: int = -1,
        done: bool = False,
        force: bool = False,
        held: Sequence[_Held] = (),
    ) -> None:
        """Emits a gate with all that is pending; ``held`` values pass through it (or nothing, if idle)."""
        if not (force or done or self.waits or self.receives or self.sends or self.records):
            return
        avals = self.builder.captured.avals
        in_specs = [physical_spec(avals[h.value]) for h, _ in self.receives]
        xs = [to_physical(h.x, avals[h.value]) for h, _ in self.sends]
        # Ordering operands: what the lane computed before (the ends of its chains, see ``_launch``)
        # must exist before the gate waits, or a wait could hold the lane's thread while work that is
        # ready stands behind it.
        # Sent values pass through the gate in place, so that what this lane does with them next
        # cannot start before the other lane has them.
        through = [
            i for i, (h, _) in enumerate(self.sends) if not done and not is_key(avals[h.value])
        ]
        sending = [h for h, _ in self.sends]
        passed = [*sending, *(h for h in held if h not in sending)]
        xs += [h.x for h in passed[len(sending) :]]
        through += range(len(sending), len(xs))
        through_specs = [physical_spec(avals[passed[i].value]) for i in through]
        sent = {id(x) for x in xs}
        deps = [x for x in self.previous if id(x) not in sent]
        chain_spec = jax.ShapeDtypeStruct(self.chain.shape, self.chain.dtype)
        first_x = 1 + len(deps)
        first_through = 1 + len(in_specs)
        gate = jax.ffi.ffi_call(
            xla.GATE_TARGET,
            [chain_spec, *in_specs, *through_specs],
            has_side_effect=True,
            input_output_aliases={first_x + i: first_through + n for n, i in enumerate(through)},
        )
        results = gate(
            self.chain,
            *deps,
            *xs,
            lane=np.int64(self.lane),
            deps=np.int64(len(deps)),
            waits=np.array(self.waits, np.int64),
            ins=np.array([b for _, b in self.receives], np.int64),
            outs=np.array([b for _, b in self.sends], np.int64),
            records=np.array(self.records, np.int64),
            stamp=np.int64(stamp),
            done=np.int64(done),
        )
        self.chain = results[0]
        for (receiving, _), x in zip(self.receives, results[1:first_through], strict=True):
            receiving.x = from_physical(x, avals[receiving.value])
        for i, x in zip(through, results[first_through:], strict=True):
            passed[i].x = x
        self.waits, self.receives, self.sends, self.records = [], [], [], []
        self.previous = []

    def run(self, instructions: Sequence[Any], args: dict[int, Any]) -> Any:
        """Emits the lane's instructions; returns the last chain value."""
        builder = self.builder
        self.held.update((b, _Held(builder.buffer(b).value, x)) for b, x in args.items())
        self.chain = jnp.zeros((1,), jnp.uint8)
        for position, instruction in enumerate(instructions):
            if isinstance(instruction, Wait):
                if self.sends or self.records:
                    self.flush()  # never wait in front of a publish
                self.waits.append(instruction.event)
            elif isinstance(instruction, Record):
                self.records.append(instruction.event)
                # Publish at once: another lane waits for it.
                self.flush(held=self._held_back(instructions[position + 1 :]))
            elif isinstance(instruction, Launch):
                self._launch(instruction)
            else:
                raise PlanError(f"the ffi backend cannot run {type(instruction).__name__} yet")
        self.sends += [
            (self.held[part], buffer)
            for part, buffer in builder.result_writes
            if builder.lane_of[builder.origin[part][0]] == self.lane
            and part not in builder.in_place
        ]
        self.flush(done=True)
        return self.chain

    def _held_back(self, following: Sequence[Any]) -> list[_Held]:
        """Values that the coming gate passes through so that long regions do not start before it.

        XLA:CPU starts whatever is ready, in any order: a long region that the plan puts behind a
        publish could run first, and the other lane would wait for both. An input of the lane
        program is copied on its way through, so a small one is taken.
        """
        builder = self.builder
        graph, avals = builder.captured.graph, builder.captured.avals
        held: list[_Held] = []
        sending = {h for h, _ in self.sends}
        behind = {builder.origin_of(b) for b, h in self.held.items() if h in sending}
        for instruction in following:
            if not isinstance(instruction, Launch):
                break
            region = builder.pg.regions[instruction.region]
            ordered = any(builder.origin_of(b) in behind for b in instruction.ins)
            behind.update(map(builder.origin_of, instruction.outs))
            if ordered or region.cost_ns < _HOLD_MIN_NS:
                continue
            buffers = dict(zip(region.inputs, instruction.ins, strict=True))
            feeding = [buffers[v] for v in _feeding_costliest(graph, region)]
            number = min(
                (b for b in feeding if b in self.held),
                key=lambda b: builder.buffer(b).bytes,
                default=None,
            )
            if number is None or is_key(avals[builder.buffer(number).value]):
                continue
            if (
                builder.buffer(number).bytes / machine.numbers().copy_bytes_per_ns
                < _HOLD_MAX_SHARE * region.cost_ns
            ):
                held.append(self.held[number])
                behind.add(builder.origin_of(number))
        return held

    def _launch(self, launch: Launch) -> None:
        builder = self.builder
        region = builder.pg.regions[launch.region]
        for number in launch.ins:
            if number not in self.held:
                if number not in builder.shared:
                    raise builder.unreachable(launch, number)
                if self.sends or self.records:
                    self.flush()
                self.held[number] = _Held(builder.buffer(number).value)
                self.receives.append((self.held[number], builder.shared[number]))
        if self.waits or self.receives:
            self.flush()
        fn = builder.functions[launch.region]
        with jax.named_scope(region.name):
            outs = fn(*[self.held[number].x for number in launch.ins])
        avals = builder.captured.avals
        outs = [self._in_place(launch, v, x) for v, x in zip(region.outputs, outs, strict=True)]
        made = [_Held(v, x) for v, x in zip(region.outputs, outs, strict=True)]
        ends = [h.x for h in made if not is_key(avals[h.value])]
        if len(ends) == len(made):
            # Who waits for this region waits for what it read, too: that need not be in memory.
            read = {id(self.held[number].x) for number in launch.ins}
            self.previous = [x for x in self.previous if id(x) not in read]
        self.previous += ends
        for number, h in builder.results(launch, made).items():
            self.held[number] = h
            if number in builder.shared:
                self.sends.append((h, builder.shared[number]))
        if self.profile:
            self.flush(stamp=launch.region, force=True)

    def _in_place(self, launch: Launch, value: int, x: Any) -> Any:
        """A region's result, or what stands for one that is written where the outer program wants it."""
        if self.place is None or (number := self.builder.left_alone(launch, value)) is None:
            return x
        buffer = dict(self.builder.result_writes).get(number)
        told = None if buffer is None else self.place.written_to(x, buffer)
        if told is None:
            return x
        self.builder.in_place.add(number)
        return told
