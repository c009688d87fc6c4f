"""Which order edges of a plan need a gate in one XLA program, and on which values.

A plan says: a region starts when its predecessors are over. XLA knows data edges only. An operator
of a region that no data edge puts behind a predecessor gets one of its inputs through a gate that
reads what the predecessor makes last. A gate takes its value in place, so the best value is one that
nobody else reads at that time. An argument of the program, or a value that another lane may be
reading, cannot be taken in place; it passes beside the gate: its readers wait for a scalar that does
(``order_gate``). Of a matrix product it is the result that passes beside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dynaflow_xla.frontends.jax.xla import fusion
from dynaflow_xla.frontends.jax.xla.region_order import RegionOrder
from dynaflow_xla.ir.graph import Operator, Region
from dynaflow_xla.ir.partitioned import PartitionedGraph

# Collectives that write their result where their operand was. All other collectives have memory of
# their own for the result.
_IN_PLACE = frozenset("psum psum_invariant pmax pmin".split())


@dataclass(frozen=True)
class Gate:
    """Before ``region``: the values ``xs`` pass a gate that reads the values ``deps``.

    Attributes:
        region: Region id.
        xs, deps: Value ids.
        beside: Those of ``xs`` that pass beside the gate.
        copied: Those of ``xs`` that XLA has to copy: the gate cannot take them in place, and their
            reader is nothing that a maximum could be fused into.
        starts: Operators of the region that read a value of ``beside`` from the gate; the others
            come after these anyway, and read the plain value where a maximum would cost a kernel.
        paths: Operators between those values and these operators.
        products: Products of the region that no value of ``xs`` keeps waiting: their results pass
            beside the gate. XLA computes the maximum at the end of the product's kernel, which
            therefore waits for the scalar as a whole.
    """

    region: int
    xs: tuple[int, ...]
    deps: tuple[int, ...]
    beside: tuple[int, ...]
    copied: tuple[int, ...]
    starts: frozenset[int]
    paths: frozenset[int]
    products: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Start:
    """An operator that reads an input of its region (or what XLA computes inside of it).

    Attributes:
        op: Its index; -1 for a replaced region.
        path: Absorbed operators between the region's inputs and it.
        through: Inputs of the region that could pass the gate for it.
        missing: Values that it must come after and does not, as bits; if any, it needs a gate.
        whole: XLA would not fuse a maximum into it.
    """

    op: int
    path: frozenset[int]
    through: frozenset[int]
    missing: int
    whole: bool


def place_gates(
    pg: PartitionedGraph,
    order: RegionOrder,
    opaque: frozenset[int],
    *,
    inside: bool,
) -> list[Gate]:
    """The gates of a plan, in the order of its launches.

    Args:
        pg: The regions.
        order: The order that they need.
        opaque: Regions that compute something else than their operators.
        inside: Whether gates may wait for values that regions do not give to others.
    """
    return list(_Placer(pg, order, opaque, inside=inside).run())


def overwritten(pg: PartitionedGraph, order: RegionOrder, gates: Iterable[Gate]) -> frozenset[int]:
    """Values that a gate waits for while something that it has no order with may overwrite them.

    XLA would copy such a value. A scalar that is there when the value is does as well: that is what
    the gate has to read instead. Without communication XLA's own order lets nothing be overwritten too
    early, and the scalar would be one kernel more to wait for: a training step was serialised by that.
    """
    if not any(region.resource == "network" for region in pg.regions):
        return frozenset()
    gates = list(gates)
    deps: dict[int, list[int]] = {}
    for gate in gates:
        for value in gate.deps:
            deps.setdefault(value, []).append(gate.region)
    found = {
        value
        for region in pg.regions
        for index in region.ops
        if pg.graph.ops[index].kind in _IN_PLACE
        for value in pg.graph.ops[index].inputs
    }
    for gate in gates:
        for value in gate.xs:
            waiting = [r for r in deps.get(value, ()) if r != gate.region]
            if not all(
                order.before(r, gate.region) or order.before(gate.region, r) for r in waiting
            ):
                found.add(value)
    return frozenset(found & deps.keys())


class _Placer:
    def __init__(
        self, pg: PartitionedGraph, order: RegionOrder, opaque: frozenset[int], *, inside: bool
    ):
        self.pg = pg
        self.order = order
        self.inside = inside
        self.arguments = frozenset((*pg.graph.inputs, *(view.value for view in pg.graph.views)))
        self.replaced = opaque.union(x.region for x in order.launches if x.replace)
        counted = Counter(index for region in pg.regions for index in region.ops)
        # Cheap operators that each reader has for itself: no region is over with one of these.
        self.repeated = frozenset(index for index, count in counted.items() if count > 1)
        self.readers: dict[int, list[int]] = {}
        for region in pg.regions:
            for value in region.inputs:
                self.readers.setdefault(value, []).append(region.id)
        # Per value, as bits: the values that exist whenever it does. Gates add to that for the
        # regions behind them only, so each region works on its own view.
        self.known: dict[int, int] = {}
        self.gained: list[tuple[int, int, int]] = []  # region, value, bits

    def run(self) -> Iterator[Gate]:
        for launch in self.order.launches:
            region = self.pg.regions[launch.region]
            view = self._view(region)
            # Collectives outside of CUDA graphs need no gate: XLA keeps them on one stream of their own,
            # in program order.
            communicates = region.resource == "network"
            gated = self.order.chained if communicates else launch.lane >= 0
            gate = self._gate(region, view) if gated else None
            products: dict[int, int] = {}
            if gate is not None:
                deps = sum(1 << d for d in gate.deps)
                for dep in gate.deps:
                    deps |= self.known.get(dep, 0)
                for x in gate.xs:
                    view[x] |= deps
                    self.gained.append((region.id, x, deps))
                yield gate
                products.update(dict.fromkeys(gate.products, deps))
            self._compute(region, view, products)

    def _view(self, region: Region) -> dict[int, int]:
        view = {v: self.known.get(v, 0) | 1 << v for v in region.inputs}
        for earlier, value, bits in self.gained:
            if value in view and self.order.before(earlier, region.id):
                view[value] |= bits
        return view

    def _compute(self, region: Region, view: dict[int, int], products: dict[int, int]) -> None:
        for op in self._ops(region):
            bits = products.get(op.index, 0)
            for value in op.inputs:
                bits |= view[value]
            for value in op.outputs:
                self.known[value] = bits
                view[value] = bits | 1 << value

    def _ops(self, region: Region) -> list[Operator]:
        return [self.pg.graph.ops[i] for i in region.ops]

    def _last_values(self, region: Region) -> list[int]:
        """One value for each operator that nothing in the region reads: all of it is over then.

        Not those that element-wise operators make of what another one tells to be over: XLA may make
        them where they are read, or not at all.
        """
        if region.id in self.replaced:
            return list(region.outputs)
        ops = self._ops(region)
        read = {v for op in ops for v in op.inputs}
        outputs = set(region.outputs)
        heavy: dict[
            int, int
        ] = {}  # value -> operators behind it that are not element-wise, as bits
        for op in ops:
            bits = 0 if op.kind in fusion.ELEMENTWISE else 1 << op.index
            for value in op.inputs:
                bits |= heavy.get(value, 0)
            heavy.update(dict.fromkeys(op.outputs, bits))
        last = []
        told = 0
        for op in reversed(ops):
            mine = [v for v in op.outputs if v in outputs]
            if mine and read.isdisjoint(op.outputs):
                bits = heavy[mine[0]]
                if op.kind in fusion.ELEMENTWISE and bits and not bits & ~told:
                    continue
                told |= bits
                last += self._made_by_readers(region, op) or [self._smallest(mine)]
        return last

    def _smallest(self, values: Iterable[int]) -> int:
        return min(values, key=lambda v: self.pg.graph.values[v].bytes)

    def _made_by_readers(self, region: Region, last: Operator) -> list[int]:
        """What a region makes last before small reductions whose result XLA computes where it is read.

        A gate that waited for that result would have it stored: a kernel that the original has not.
        Empty where the result is stored anyway: nothing is reduced, or there is more of the result than
        of what it is made of (read back: XLA then stores what is reduced, too).
        """
        if not self.inside or not self._is_read_by_elementwise(last.outputs):
            return []
        producers = {v: op for op in self._ops(region) for v in op.outputs}
        kernels: dict[int, int] = {}
        reduces = False
        elements = 0
        seen, waiting = {last.index}, [last]
        while waiting:
            op = waiting.pop()
            small = fusion.is_small_reduction(self.pg.graph, op)
            reduces |= small
            if op.index in self.repeated:
                continue
            if not small and op.kind not in fusion.ELEMENTWISE:
                kernels[op.index] = self._smallest(op.outputs)
                continue
            elements = max(elements, *(self.pg.graph.values[v].size for v in op.outputs))
            for value in op.inputs:
                producer = producers.get(value)
                if producer is not None and producer.index not in seen:
                    seen.add(producer.index)
                    waiting.append(producer)
        stored = sum(self.pg.graph.values[v].size for v in kernels.values())
        return list(kernels.values()) if reduces and elements <= stored else []

    def _is_read_by_elementwise(self, values: Iterable[int]) -> bool:
        """Whether only element-wise operators of other regions read these values."""
        kept = set(self.pg.graph.outputs).union(v for j in self.pg.graph.joins for v in j.parts)
        for value in values:
            readers = [self.pg.regions[r] for r in self.readers.get(value, ())]
            if value in kept or any(r.id in self.replaced for r in readers):
                return False
            for reader in readers:
                for op in self._ops(reader):
                    if value in op.inputs and op.kind not in fusion.ELEMENTWISE:
                        return False
        return True

    def _gate(self, region: Region, view: dict[int, int]) -> Gate | None:
        need = 0
        for pred in self.order.direct[region.id]:
            for value in self._last_values(self.pg.regions[pred]):
                need |= 1 << value
        found = self._starts(region, dict(view), need)
        starts = [s for s in found if s.missing]
        if not starts:
            return None
        missing = 0
        for start in starts:
            missing |= start.missing
        products = frozenset(s.op for s in starts if self._passes_as_result(s, region))
        starts = [s for s in starts if s.op not in products]
        later = [s for s in found if not s.missing and not s.whole]
        whole = {v for s in starts if s.whole for v in s.through} | self._unbounded(region)
        xs: list[int] = []
        uncovered = list(starts)

        def cost(value: int) -> tuple[float, int]:
            count = sum(value in s.through for s in uncovered)
            outside = self._outside_bytes(value, region)
            return (outside if value in whole else min(outside, 1)) / count, value

        while uncovered:
            best = min({v for s in uncovered for v in s.through}, key=cost)
            xs.append(best)
            uncovered = [s for s in uncovered if best not in s.through]
        for x in xs:  # who read x before is over when the gate takes it
            for reader in self.readers[x]:
                if self.order.before(reader, region.id):
                    for value in self._last_values(self.pg.regions[reader]):
                        missing |= 1 << value & ~view[x]
        deps = tuple(d for d in self._minimal(_set_bits(missing)) if d not in xs)
        outside = [x for x in xs if self._outside_bytes(x, region)]
        beside = tuple(x for x in outside if x not in whole)
        # All who read it and can compute the maximum read the same: XLA fuses a normalisation into
        # one kernel only if it has one value to begin with.
        reading = [s for s in (*starts, *later) if not s.through.isdisjoint(beside)]
        return Gate(
            region.id,
            tuple(xs),
            deps,
            beside,
            tuple(x for x in outside if x in whole),
            frozenset(s.op for s in reading),
            frozenset[int]().union(*(s.path for s in reading)),
            products,
        )

    def _passes_as_result(self, start: _Start, region: Region) -> bool:
        """Whether a start is a product of arguments in whose kernel XLA takes the maximum of its result.

        What the program computes XLA may make in the kernels that read it, and the product would be tied
        to another one of these.
        """
        if start.op < 0 or start.path or not self.arguments.issuperset(start.through):
            return False
        return fusion.ends_in_maximum(self.pg.graph, start.op, self._ops(region))

    def _unbounded(self, region: Region) -> set[int]:
        """Inputs whose type has no maximum with a smallest number."""
        values = self.pg.graph.values
        return {v for v in region.inputs if not values[v].dtype.startswith(fusion.BOUNDED)}

    def _starts(self, region: Region, view: dict[int, int], need: int) -> list[_Start]:
        outside = {v: frozenset([v]) for v in region.inputs if self._can_pass(v)}
        if region.id in self.replaced:  # what it holds is not known; its inputs stand for it
            have = 0
            for value in region.inputs:
                have |= view[value]
            missing = need & ~have
            start = _Start(-1, frozenset(), frozenset(outside), missing, True)
            return [start] if outside else []
        paths: dict[int, frozenset[int]] = {}
        starts = []
        joining = self._joining(region, view, need)
        for op in self._ops(region):
            bits = 0
            for value in op.inputs:
                bits |= view[value]
            through = frozenset[int]().union(*(outside.get(v, frozenset()) for v in op.inputs))
            path = frozenset[int]().union(*(paths.get(v, frozenset()) for v in op.inputs))
            missing = need & ~bits
            if op.generator or op.kind in fusion.ABSORBED or op.index in joining:
                outside.update(dict.fromkeys(op.outputs, through))
                paths.update(dict.fromkeys(op.outputs, path | {op.index}))
            elif through:
                starts.append(_Start(op.index, path, through, missing, op.kind in fusion.UNFUSED))
                bits |= missing
            for value in op.outputs:
                view[value] = bits | 1 << value
        return starts

    def _joining(self, region: Region, view: dict[int, int], need: int) -> set[int]:
        """Operators that XLA computes together with one that comes after all that is needed.

        The moments of an optimizer are arguments, and their decay could start at any time; but it is
        in the kernel that reads the gradient, and needs no gate to wait for that.
        """
        known = dict(view)
        behind = set()
        for op in self._ops(region):
            bits = 0
            for value in op.inputs:
                bits |= known[value]
            if op.kind not in fusion.ELEMENTWISE:
                bits |= need  # by a gate, if not by data
            if not need & ~bits:
                behind.add(op.index)
            for value in op.outputs:
                known[value] = bits | 1 << value
        joining: set[int] = set()
        readers: dict[int, list[Operator]] = {}
        outside = {v for v in region.outputs if v in self.readers}
        for op in reversed(self._ops(region)):
            mine = [r for v in op.outputs for r in readers.get(v, ())]
            if (
                op.kind in fusion.ELEMENTWISE
                and op.index not in behind
                and outside.isdisjoint(op.outputs)
                and mine
                and all(r.index in behind or r.index in joining for r in mine)
                and all(r.kind in fusion.ELEMENTWISE or r.kind.startswith("reduce_") for r in mine)
            ):
                joining.add(op.index)
            for value in op.inputs:
                readers.setdefault(value, []).append(op)
        return joining

    def _can_pass(self, value: int) -> bool:
        graph = self.pg.graph
        producer = graph.values[value].producer
        # XLA makes what is generated where it is read, whatever it has passed.
        generated = producer >= 0 and graph.ops[producer].generator
        return graph.values[value].bytes > 0 and not generated

    def _outside_bytes(self, value: int, region: Region) -> int:
        """Bytes of a value that a gate in front of this region cannot take in place, else 0."""
        mine = region.id
        others = [r for r in self.readers[value] if r != mine]
        in_place = value not in self.arguments and all(
            self.order.before(mine, r) or self.order.before(r, mine) for r in others
        )
        return 0 if in_place else self.pg.graph.values[value].bytes

    def _minimal(self, values: Iterable[int]) -> tuple[int, ...]:
        """Values that no other one of them comes after."""
        kept = list(values)
        return tuple(
            v for v in kept if not any(self.known.get(w, 0) >> v & 1 for w in kept if w != v)
        )


def _set_bits(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
