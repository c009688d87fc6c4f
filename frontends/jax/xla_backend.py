"""The backend ``xla``: a whole plan as plain JAX code inside one XLA program.

Regions are traced inline, in the plan's order, each under a scope with its name. On a GPU, order
gates carry those order edges of the plan that data does not give (``gate_placement``); elsewhere they
are the identity, and the program is the original's operators in another order. Nothing of it is left
at run time but the program, so every JAX transformation goes through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from dynaflow_xla.errors import RuleError
from dynaflow_xla.frontends.jax import capture, order_gate
from dynaflow_xla.frontends.jax.gate_placement import Gate, RegionOrder, place_gates
from dynaflow_xla.frontends.jax.lower import region_function
from dynaflow_xla.frontends.jax.physical import from_physical, to_physical
from dynaflow_xla.ir import PartitionedGraph
from dynaflow_xla.plan import Plan

if TYPE_CHECKING:
    from dynaflow_xla.frontends.jax.entry import Options

PLAN_SCOPE = "dfx_plan"
"""The name scope around a plan; the component behind it is the region (``scope_of``)."""

DEFAULT_LANES = 4
"""Lanes are a matter of a strategy's taste here: a GPU runs whatever nodes of a graph are ready."""

MAX_LANES = 64


def scope_of(region_name: str) -> str:
    """A region's name as a name scope: a slash would make two components of it."""
    return region_name.replace("/", ".")


@dataclass
class XlaEntry:
    """A planned signature, evaluated in the outer program. Same surface as ``entry.Entry``.

    Attributes:
        captured: Graph with payloads.
        pg: Its regions.
        plan: The validated plan.
        functions: Region id -> traceable function.
        order: The order of regions that the program keeps.
        gates: Region id -> the gate in front of it.
        seconds: Time spent by step.
    """

    options: Options
    captured: capture.Captured
    pg: PartitionedGraph
    plan: Plan
    functions: dict[int, Callable[..., list[Any]]]
    order: RegionOrder
    gates: dict[int, Gate]
    seconds: dict[str, float]

    def __call__(self, *inputs: Any) -> list[Any]:
        """Evaluates on flat inputs (graph inputs in order); returns flat outputs."""
        with jax.named_scope(PLAN_SCOPE):
            made = _Evaluation(self, inputs).run()
        return [
            made[out] if is_value else out
            for out, is_value in zip(
                self.captured.outputs, self.captured.output_is_value, strict=True
            )
        ]

    @property
    def stages(self) -> list[Any]:
        """No custom call runs this plan."""
        return []

    def region_notes(self) -> list[str]:
        """Sentences for explain."""
        return [*self.pg.notes, *self.plan.notes]

    def summary(self) -> str:
        """One sentence for explain."""
        values = self.pg.graph.values
        copied = sum(values[x].bytes for gate in self.gates.values() for x in gate.copied)
        return (
            f"lanes {self.plan.lanes}, order gates {len(self.gates)} (identities except on a GPU), "
            f"for which a GPU program copies {copied} bytes"
        )


class _Evaluation:
    """One trace of a plan. A gated value replaces the plain one in the regions behind the gate."""

    def __init__(self, entry: XlaEntry, inputs: Sequence[Any]):
        self.entry = entry
        self.env: dict[int, Any] = dict(zip(entry.captured.graph.inputs, inputs, strict=True))
        self.gated: dict[int, list[tuple[int, Any]]] = {}

    def run(self) -> dict[int, Any]:
        entry = self.entry
        for launch in entry.order.launches:
            region = entry.pg.regions[launch.region]
            with jax.named_scope(scope_of(region.name)):
                beside: list[Any] = []
                if region.id in entry.gates:
                    beside = self._gate(entry.gates[region.id])
                inputs = [self._read(v, region.id) for v in region.inputs]
                outs = entry.functions[region.id](*inputs, *beside)
            self.env.update(zip(region.outputs, outs, strict=True))
        return {v: self._final(v) for v in entry.captured.graph.outputs}

    def _read(self, value: int, region: int) -> Any:
        for behind, x in reversed(self.gated.get(value, [])):
            if behind == region or self.entry.order.before(behind, region):
                return x
        return self.env[value]

    def _final(self, value: int) -> Any:
        """A result is the last value in its memory, so that no gate on the way makes a copy of it."""
        for behind, x in reversed(self.gated.get(value, [])):
            if value not in self.entry.gates[behind].copied:
                return x
        return self.env[value]

    def _gate(self, gate: Gate) -> list[Any]:
        """Puts a region behind its gate; returns what passed beside it."""
        avals = self.entry.captured.avals

        def array(value: int) -> Any:
            return to_physical(self._read(value, gate.region), avals[value])

        passed = order_gate.order(
            [array(x) for x in gate.xs],
            [array(d) for d in gate.deps],
            [x in gate.beside for x in gate.xs],
        )
        beside = []
        for value, x in zip(gate.xs, passed, strict=True):
            if value in gate.beside:
                beside.append(x)
            else:
                x = from_physical(x, avals[value])
                self.gated.setdefault(value, []).append((gate.region, x))
        return beside


def build(
    options: Options,
    captured: capture.Captured,
    pg: PartitionedGraph,
    plan: Plan,
    functions: dict[int, Callable[..., list[Any]]],
    seconds: dict[str, float],
) -> XlaEntry:
    """Makes the entry of a validated plan."""
    order = RegionOrder(pg, plan)
    gates = {gate.region: gate for gate in place_gates(pg, order)}
    for gate in gates.values():
        if gate.beside:
            functions[gate.region] = region_function(
                captured, pg.regions[gate.region], gate.beside, gate.starts, gate.paths
            )
    return XlaEntry(options, captured, pg, plan, functions, order, gates, seconds)


def differentiable(
    made: XlaEntry, traced: Any, n_consts: int, build_entry: Callable[..., Any]
) -> Callable[..., list[Any]]:
    """The scheduled call, with derivatives in both modes.

    JAX differentiates the scheduled program itself. Only where the function holds rules of its own
    (``custom_jvp``, ``custom_vjp``, ``remat``), which a capture looks through, is the differentiated
    program made from a second plan that keeps the operators with such rules whole.
    """
    closed = traced.jaxpr
    if not capture.holds_custom_rules(closed.jaxpr):
        return made

    @functools.cache
    def whole() -> XlaEntry:
        captured = capture.capture(
            closed, n_consts - len(closed.jaxpr.constvars), made.options.name, keep_rules=True
        )
        try:
            entry: XlaEntry = build_entry(captured, made.options)
        except RuleError:  # a rule for an operator that is now inside a whole one
            entry = build_entry(captured, replace(made.options, rules=None, default_cut=True))
        return entry

    if closed.effects:
        return whole()  # custom_jvp refuses effects
    call = jax.custom_jvp(lambda *flat: made(*flat))

    @call.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return jax.jvp(whole(), tuple(primals), tuple(tangents))

    return call


def shared_matmul_operand(made: XlaEntry) -> bool:
    """Whether regions that may overlap multiply by the same value: XLA would merge their products."""
    readers: dict[int, list[int]] = {}
    for launch in made.order.launches:
        for index in made.pg.regions[launch.region].ops:
            op = made.pg.graph.ops[index]
            if op.kind == "dot_general":
                for value in op.inputs:
                    readers.setdefault(value, []).append(launch.region)
    before = made.order.before
    return any(
        a != b and not before(a, b) and not before(b, a)
        for regions in readers.values()
        for a in regions
        for b in regions
    )
