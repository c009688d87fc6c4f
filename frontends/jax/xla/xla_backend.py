"""The backend ``xla``: a whole plan as plain JAX code inside one XLA program.

Regions are traced inline, in the plan's order, each under a scope with its name. On a GPU, order
gates carry those order edges of the plan that data does not give (``gate_placement``); elsewhere they
are the identity, and the program is the original's operators in another order. Nothing of it is left
at run time but the program, so every JAX transformation goes through.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend import core as jcore

from dynaflow_xla.batch.expand import MergeSpec
from dynaflow_xla.errors import RuleError
from dynaflow_xla.frontends.jax.batch.split import Split
from dynaflow_xla.frontends.jax.capture import capture
from dynaflow_xla.frontends.jax.capture.physical import from_physical, to_physical
from dynaflow_xla.frontends.jax.lanes import lapack_guard
from dynaflow_xla.frontends.jax.lanes.lower import Second, cut_view, region_function
from dynaflow_xla.frontends.jax.signature.planned import Planned
from dynaflow_xla.frontends.jax.xla import collectives, order_gate, placed_results
from dynaflow_xla.frontends.jax.xla.gate_placement import Gate, overwritten, place_gates
from dynaflow_xla.frontends.jax.xla.loops import Loop
from dynaflow_xla.frontends.jax.xla.region_order import RegionOrder
from dynaflow_xla.ir.graph import Graph, PartitionedGraph
from dynaflow_xla.planning.recording import Decision

PLAN_SCOPE = "dfx_plan"
"""The name scope around a plan; the component behind it is the region (``scope_of``)."""

DEFAULT_LANES = 8
"""A GPU runs whatever nodes of a graph are ready. With few lanes regions would wait for each other for
the lane's sake, and each such wait is a gate."""

MAX_LANES = 64


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
    places: dict[int, placed_results.Place] = field(default_factory=dict)

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
            return self.flat_outputs(_Evaluation(self, self.bind(tuple(inputs))).run())

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

    def __init__(self, entry: XlaEntry, env: dict[int, Any]):
        self.entry = entry
        self.env = env
        for view in entry.captured.graph.views:
            self.env[view.value] = cut_view(view, env[entry.captured.graph.inputs[view.input]])
        self.gated: dict[int, list[tuple[int, Any]]] = {}
        self.stands_for: dict[int, Any] = {}  # what a gate reads instead of a value

    def run(self) -> dict[int, Any]:
        entry = self.entry
        whole = {place.whole for place in entry.places.values()}
        for launch in entry.order.launches:
            region = entry.pg.regions[launch.region]
            if region.outputs and whole.issuperset(region.outputs):
                continue  # a merge: its parts are in place
            with jax.named_scope(scope_of(region.name)):
                beside: list[Any] = []
                if region.id in entry.gates:
                    beside = self._gate(entry.gates[region.id])
                inputs = [self._read(v, region.id) for v in region.inputs]
                outs = entry.functions[region.id](*inputs, *beside)
                given = (*region.outputs, *entry.inside.get(region.id, ()))
                self.env.update(zip(given, outs, strict=True))
                for value in region.outputs:
                    self._written(value)
        graph = entry.captured.graph
        for join in graph.joins:
            if join.value in whole:
                continue
            self.env[join.value] = jax.lax.concatenate(
                [self._final(v) for v in join.parts], join.axis
            )
        return {v: self._final(v) for v in graph.outputs}

    def _written(self, value: int) -> None:
        """Puts a part in its place, or makes the witness of a value that may be overwritten."""
        entry = self.entry
        place = entry.places.get(value)
        if place is not None:
            whole = placed_results.write(self.env.get(place.whole), self.env[value], place)
            self.env[place.whole] = self.stands_for[value] = whole
        elif value in entry.witnessed:
            self.env[value], self.stands_for[value] = order_gate.witness(self.env[value])

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


def build(**made: Any) -> XlaEntry:
    """Makes the entry of a validated plan, from the fields of ``Planned``."""
    pg, split, functions = made["pg"], made["split"], made["functions"]
    chained = collectives.in_graph(made["options"].compiler_options)
    order = RegionOrder(pg, made["plan"], chained=chained)
    opaque = frozenset[int]() if split is None else split.joint_regions()
    placed = place_gates(pg, order, opaque, inside=split is None)
    gates = {gate.region: gate for gate in placed}
    inside = _given_to_gates(pg, placed)
    captured = made["captured"]
    for region in pg.regions:
        gate = gates.get(region.id)
        second = None
        if gate is not None and (gate.beside or gate.products):
            deps = tuple(captured.avals[d] for d in gate.deps) if gate.products else ()
            second = Second(gate.beside, gate.starts, gate.paths, gate.products, deps)
        if second is not None and split is not None:
            functions[region.id] = split.function(region.id, Decision(region.id, 0), second)
        elif second is not None or region.id in inside:
            outputs = (*region.outputs, *inside.get(region.id, ()))
            functions[region.id] = region_function(
                captured, replace(region, outputs=outputs), second
            )
    waiting: dict[int, list[int]] = {}
    for gate in gates.values():
        for dep in gate.deps:
            waiting.setdefault(dep, []).append(gate.region)
    witnessed = overwritten(pg, order, gates.values())
    whole = (m for m in _merges(pg, split) if witnessed.isdisjoint(m[1]))
    places = placed_results.places(pg, whole, order.before, waiting)
    entry = XlaEntry(
        order=order, gates=gates, inside=inside, witnessed=witnessed, places=places, **made
    )
    if chained:
        collectives.require_chain(entry)
    return entry


def _given_to_gates(pg: PartitionedGraph, gates: Sequence[Gate]) -> dict[int, tuple[int, ...]]:
    """Values inside of regions that gates wait for, by region."""
    given: dict[int, tuple[int, ...]] = {}
    owner = {index: region for region in pg.regions for index in region.ops}
    for value in dict.fromkeys(d for gate in gates for d in gate.deps):
        producer = pg.graph.values[value].producer
        region = owner.get(producer)
        if region is not None and value not in region.outputs:
            given[region.id] = (*given.get(region.id, ()), value)
    return given


def _merges(pg: PartitionedGraph, split: Split | None) -> Iterator[tuple[int, list[int], int]]:
    """Results that are put together from whole values: the result, its parts, the axis."""
    for join in pg.graph.joins:
        yield join.value, list(join.parts), join.axis
    if split is None:
        return
    for region, reads in split.expanded.merge_reads.items():
        origin = split.expanded.origins[region]
        if isinstance(origin, MergeSpec) and origin.how == "concat":
            if all(cut is None for _, cut in reads):
                (whole,) = pg.regions[region].outputs
                yield whole, [value for value, _ in reads], origin.axis


class Program:
    """A scheduled flat function with derivatives in both modes.

    JAX differentiates the scheduled program itself. Only where the function holds rules of its own
    (``custom_jvp``, ``custom_vjp``, ``remat``), which a capture looks through, is the differentiated
    program made from a second plan that keeps the operators with such rules whole.

    Attributes:
        entry: The plan.
    """

    def __init__(self, made: XlaEntry, traced: Any, build_entry: Callable[..., Any]):
        self.entry, self.split = made, made.split
        closed = traced.jaxpr
        self._call: Callable[..., Any] = made
        if made.order.chained and any(r.resource == "network" for r in made.pg.regions):
            self._call = jax.custom_jvp(lambda *flat: made(*flat))
            self._call.defjvp(  # type: ignore[attr-defined]
                functools.partial(collectives.refuse_derivative, made.options.name)
            )
            return
        # The loop bodies of a split keep the operators with such rules whole anyway.
        in_loops = made.split is None
        if not capture.holds_custom_rules(closed.jaxpr, in_loops=in_loops):
            return

        @functools.cache
        def whole() -> XlaEntry:
            captured = capture.capture(
                closed, len(traced._consts), made.options.name, keep_rules=True
            )
            try:
                entry: XlaEntry = build_entry(captured, made.options)
            except RuleError:  # a rule for an operator that is now inside a whole one
                entry = build_entry(captured, replace(made.options, rules=None, default_cut=True))
            return entry

        if capture.ordering_effects(closed.effects):
            self._call = whole()  # custom_jvp and custom_vjp refuse effects
            return
        if capture.has_reverse_rules(closed.jaxpr):
            self._call = jax.custom_vjp(lambda *flat: made(*flat))
            self._call.defvjp(  # type: ignore[attr-defined]
                lambda *flat: jax.vjp(whole(), *flat), lambda vjp, cotangents: vjp(cotangents)
            )
            return
        self._call = jax.custom_jvp(lambda *flat: made(*flat))

        @self._call.defjvp  # type: ignore[attr-defined]
        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            return jax.jvp(whole(), tuple(primals), tuple(tangents))

    def __call__(self, *flat: Any) -> list[Any]:
        """Flat inputs (closed-over values first) to flat outputs."""
        return list(self._call(*flat))

    def pairs(self) -> list[Any]:
        """Scheduled derivatives: none, JAX makes them of the program."""
        return []


def shared_matmul_operand(made: XlaEntry) -> bool:
    """Whether regions that may overlap multiply by the same value: XLA would merge their products.

    The same are also values that two regions compute alike: XLA computes them once.
    """
    readers: dict[int, list[int]] = {}
    same = _representatives(made.pg.graph)
    for launch in made.order.launches:
        for index in made.pg.regions[launch.region].ops:
            op = made.pg.graph.ops[index]
            if op.kind == "dot_general":
                for value in op.inputs:
                    readers.setdefault(same.get(value, value), []).append(launch.region)
    before = made.order.before
    # A product whose result waits has operands that do not.
    early = {gate.region for gate in made.gates.values() if gate.products}
    return any(
        a != b and (a in early or (not before(a, b) and not before(b, a)))
        for regions in readers.values()
        for a in regions
        for b in regions
    )


def _representatives(graph: Graph) -> dict[int, int]:
    """Values that the same operators compute from the same values -> the first of them."""
    same: dict[int, int] = {}
    first: dict[Any, Sequence[int]] = {}
    for op in graph.ops:
        params = getattr(op.payload, "params", None)
        if params is None or op.outer or any(jcore.jaxprs_in_params(params)):
            continue
        inputs = tuple(same.get(v, v) for v in op.inputs)
        atoms = tuple(str(x) for x in op.payload.invars if isinstance(x, jcore.Literal))
        key = (op.kind, inputs, atoms, str(sorted(params.items(), key=lambda item: item[0])))
        for mine, known in zip(op.outputs, first.setdefault(key, op.outputs), strict=True):
            same[mine] = known
    return same
