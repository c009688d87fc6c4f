"""The backend ``xla``: a whole plan as plain JAX code inside one XLA program.

Regions are traced inline, in the plan's order, each under a scope with its name. On a GPU, order
gates carry those order edges of the plan that data does not give (``gate_placement``); elsewhere they
are the identity, and the program is the original's operators in another order. Nothing of it is left
at run time but the program, so every JAX transformation goes through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax.capture.capture import Loop
from dynaflow_xla.frontends.jax.capture.physical import from_physical, to_physical
from dynaflow_xla.frontends.jax.planned import BufferValues, Planned
from dynaflow_xla.frontends.jax.regions import lapack_guard, order_gate
from dynaflow_xla.frontends.jax.xla import placed_results
from dynaflow_xla.frontends.jax.xla.gate_placement import Gate
from dynaflow_xla.frontends.jax.xla.region_order import RegionOrder
from dynaflow_xla.planning.instructions import Launch, Merge, Slice
from dynaflow_xla.planning.table import region_table
from dynaflow_xla.timelines.timeline import Timeline

PLAN_SCOPE = "dfx_plan"
"""The name scope around a plan; the component behind it is the region (``scope_of``)."""


def scope_of(region_name: str) -> str:
    """A region's name as a name scope: a slash would make two components, XLA cuts names at an "@"."""
    return region_name.replace("/", ".").replace("@", "~")


_logs: list[list[XlaEntry]] = []


@contextlib.contextmanager
def traced_entries() -> Iterator[list[XlaEntry]]:
    """Collects the plans that are traced in the block, in this process."""
    log: list[XlaEntry] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


@dataclass(kw_only=True)
class XlaEntry(Planned):
    """A planned signature of the backend ``xla``, evaluated in the outer program.

    Attributes:
        order: The order of regions that the program keeps.
        gates: Region id -> the gate in front of it.
        inside: Region id -> values that it gives to gates alone.
        witnessed: Values for which gates wait by a scalar, see ``gate_placement.overwritten``.
        places: Values that are written into a whole one when they are made.
    """

    order: RegionOrder
    gates: dict[int, Gate]
    inside: dict[int, tuple[int, ...]] = field(default_factory=dict)
    witnessed: frozenset[int] = frozenset()
    places: dict[int, placed_results.RowsOfWhole] = field(default_factory=dict)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Evaluates on flat inputs of the function (closed-over values first); returns flat outputs."""
        for log in _logs:
            log.append(self)
        return self.evaluate(inputs)

    def _beside(self, region: int) -> tuple[int, ...]:
        gate = self.gates.get(region)
        if gate is None:
            return ()
        return (*gate.beside, *gate.deps) if gate.products else gate.beside

    def evaluate(self, inputs: Sequence[Any], number: int | None = None) -> list[Any]:
        """The same for the body of a loop, which is the operator ``number`` of what is around it."""
        scope = PLAN_SCOPE if number is None else f"{PLAN_SCOPE}_{number}"
        with jax.named_scope(scope), lapack_guard.one_at_a_time():
            return _Evaluation(self, self.bind(tuple(inputs))).run()

    @property
    def stages(self) -> list[Any]:
        """No custom call runs this plan."""
        return []

    compiled = stages

    def loops_in(self, region: int) -> dict[int, Loop]:
        """The loops with scheduled bodies in a region, by operator."""
        captured, ops = self.captured, self.pg.regions[region].ops
        if self.split is not None:
            captured, ops = self.split.source(region)
        return {index: captured.loops[index] for index in ops if index in captured.loops}

    def bodies(self) -> list[tuple[str, XlaEntry]]:
        """The plans of loop bodies, with the names of region and operator as in a compiled program."""
        return [
            (f"{scope_of(region.name)}/{index}:", loop.entry)
            for region in self.pg.regions
            for index, loop in self.loops_in(region.id).items()
        ]

    def where(self) -> str:
        """Backend and device, for explain."""
        return f"xla ({jax.default_backend()})"

    def account(self) -> list[str]:
        """The plans of loops' bodies, then what of the order is in the program."""
        lines = []
        for name, body in self.bodies():
            lines.append(f"body of the loop {name[:-1]}: {body.summary()}")
            lines += ["  " + line for line in region_table(body.plan, body.pg)]
        return [*lines, self.summary()]

    def measured(self, inputs: Sequence[Any], name: str) -> Timeline:
        """Regions are fused into one program here."""
        raise UnsupportedError(
            f"{name!r} runs as one XLA program, which has no time stamps between regions; use "
            "jax.profiler.trace (regions are its name scopes), or dfx.compile for its order."
        )

    def summary(self) -> str:
        """One sentence for explain."""
        values = self.pg.graph.values
        copied = sum(values[x].bytes for gate in self.gates.values() for x in gate.copied)
        return (
            f"lanes {self.plan.lanes}, order gates {len(self.gates)} (identities except on a GPU), "
            f"for which a GPU program copies {copied} bytes"
        )


class _Evaluation:
    """One trace of a plan. A gated value replaces the plain one in the regions behind the gate.

    What regions read and make lies in the plan's buffers. Gates are beside the plan: they know values,
    also such that never leave their region.
    """

    def __init__(self, entry: XlaEntry, memory: BufferValues):
        self.entry = entry
        self.memory = memory
        self.values = memory.values
        for instruction in entry.plan.instructions:
            if isinstance(instruction, Slice):
                memory[instruction.out]
        self.gated: dict[int, list[tuple[int, Any]]] = {}
        self.stands_for: dict[int, Any] = {}  # what a gate reads instead of a value

    def run(self) -> list[Any]:
        entry = self.entry
        buffers = entry.plan.buffers
        whole = {place.whole for place in entry.places.values()}
        for launch in entry.order.launches:
            region = entry.pg.regions[launch.region]
            if region.outputs and whole.issuperset(region.outputs):
                # A merge: its parts are in place.
                self.memory.write(launch, {v: self.values[v] for v in region.outputs})
                continue
            with jax.named_scope(scope_of(region.name)):
                beside: list[Any] = []
                if region.id in entry.gates:
                    beside = self._gate(entry.gates[region.id], launch)
                inputs = [self._read(b, region.id) for b in launch.ins]
                outs = entry.functions[region.id](*inputs, *beside)
                given = (*region.outputs, *entry.inside.get(region.id, ()))
                made = dict(zip(given, outs, strict=True))
                self.values.update(made)
                for value in region.outputs:
                    made[value] = self._written(value)
                self.memory.write(launch, made)
        for merge in entry.plan.instructions:
            if isinstance(merge, Merge):
                value = buffers[merge.out].value
                if value in whole:
                    self.memory.put([merge.out], self.values[value])
                    continue
                parts = [self._final(buffers[part].value, part) for part in merge.srcs]
                self.memory.put([merge.out], jax.lax.concatenate(parts, merge.axis))
        for buffer in buffers:
            if buffer.kind == "result" and buffer.offset < 0:
                self.memory.put([buffer.id], self._final(buffer.value, buffer.id))
        for value in entry.captured.graph.inputs:
            if value in self.gated:
                self.values[value] = self._final(value, -1)
        return entry.flat_outputs(self.memory)

    def _written(self, value: int) -> Any:
        """Puts a part in its place, or makes the witness of a value that may be overwritten."""
        entry = self.entry
        place = entry.places.get(value)
        if place is not None:
            whole = placed_results.write(self.values.get(place.whole), self.values[value], place)
            self.values[place.whole] = self.stands_for[value] = whole
        elif value in entry.witnessed:
            self.values[value], self.stands_for[value] = order_gate.witness(self.values[value])
        return self.values[value]

    def _behind_gates(self, value: int, region: int) -> list[Any]:
        """The value as it passed the last gate that is before a region, if there is one."""
        for behind, x in reversed(self.gated.get(value, [])):
            if behind == region or self.entry.order.before(behind, region):
                return [x]
        return []

    def _read(self, number: int, region: int) -> Any:
        """What a region finds in a buffer."""
        passed = self._behind_gates(self.entry.plan.buffers[number].value, region)
        return passed[0] if passed else self.memory[number]

    def _final(self, value: int, number: int) -> Any:
        """A result is the last value in its memory, so that no gate on the way makes a copy of it."""
        for behind, x in reversed(self.gated.get(value, [])):
            if value not in self.entry.gates[behind].copied:
                return x
        return self.values[value] if number < 0 else self.memory[number]

    def _gate(self, gate: Gate, launch: Launch) -> list[Any]:
        """Puts a region behind its gate; returns what passed beside it."""
        avals = self.entry.captured.avals
        reads = {self.entry.plan.buffers[b].value: b for b in launch.ins}

        def array(value: int) -> Any:
            if value in reads:
                x = self._read(reads[value], gate.region)
            else:
                x = next(iter(self._behind_gates(value, gate.region)), self.values[value])
            return to_physical(x, avals[value])

        deps = [self.stands_for[d] if d in self.stands_for else array(d) for d in gate.deps]
        xs = [array(x) for x in gate.xs]
        passed = order_gate.order(xs, deps, [x in gate.beside for x in gate.xs]) if xs else []
        beside = []
        for value, x in zip(gate.xs, passed, strict=True):
            if value in gate.beside:
                beside.append(x)
            else:
                x = from_physical(x, avals[value])
                self.gated.setdefault(value, []).append((gate.region, x))
        return [*beside, *deps] if gate.products else beside
