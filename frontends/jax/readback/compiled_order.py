"""The order of a plan beside that of the compiled program."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dynaflow_xla.frontends.jax.readback import xla_dump
from dynaflow_xla.frontends.jax.readback.xla_dump import Thunk
from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry


class OrderReport(msgspec.Struct, frozen=True):
    """The plan's order beside the program's. Pairs are (earlier region, later region).

    Attributes:
        held: The plan's edges that every kernel of the two keeps. What communication waits for is
            the data that it reads, not the whole region that makes it. A kernel that only lays a
            region's result out for the kernels of others counts to none of them.
        fused: Edges between regions that share all kernels of one, or of which the second computes again
            in its own kernels what it reads of the first: there is nothing left to order.
        broken: Edges that some kernel does not keep.
        parallel: Pairs that neither the plan nor the program orders.
        extra: Pairs that the plan leaves free and the program orders completely.
        partly: Pairs that the plan leaves free and whose kernels the program orders in part.
        merged: Pairs that the plan leaves free and for which one kernel makes results of both, or
            computes products for both.
        common: Pairs that the plan leaves free and that are parallel but for what XLA computes once for
            both: a part that they have in common, a normalisation of the same value, say.
        donated: Pairs that the plan leaves free and whose order donation asks for: the first reads an
            argument that the second writes its result over (or is before or after such a pair).
        conflicts: Edges of the CUDA graph that neither data nor the plan asks for, between regions
            that the plan and donation leave free: (kernel, its region, kernel that waits for it, its region).
            Mostly the second writes where a temporary of the first was.
    """

    held: tuple[tuple[str, str], ...]
    fused: tuple[tuple[str, str], ...]
    broken: tuple[tuple[str, str], ...]
    parallel: tuple[tuple[str, str], ...]
    extra: tuple[tuple[str, str], ...]
    partly: tuple[tuple[str, str], ...]
    merged: tuple[tuple[str, str], ...]
    donated: tuple[tuple[str, str], ...] = ()
    common: tuple[tuple[str, str], ...] = ()
    conflicts: tuple[tuple[str, str, str, str], ...] = ()


def compare(
    made: XlaEntry,
    owned: dict[int, set[int]],
    sharing: dict[int, set[int]],
    results: dict[int, set[int]],
    graph: xla_dump.GraphOrder,
    leaves: dict[int, Thunk],
    aliases: dict[int, int],
    reads: dict[int, set[int]],
    products: set[int],
) -> OrderReport:
    """Compares the order of a plan with that of its program.

    Args:
        made: The plan.
        owned: Region -> the program's leaves that are its own.
        sharing: Leaf -> regions of which it holds operations.
        results: Leaf -> regions of its results.
        graph: The order of the leaves.
        leaves: Leaf by number.
        aliases: Result -> the argument that it is written over.
        reads: Leaf -> leaves whose results it needs.
        products: Leaves that multiply matrices; two regions' products in one kernel have one name.
    """
    before = graph.before
    free = _free_pairs(made, aliases)
    name = {region.id: region.name for region in made.pg.regions}
    fields = [field for field in OrderReport.__struct_fields__ if field != "conflicts"]
    sets: dict[str, list[tuple[str, str]]] = {field: [] for field in fields}
    inner = [launch.region for launch in made.order.launches if launch.lane >= 0]
    by_data = {region.id for region in made.pg.regions if region.resource == "network"}
    for second in inner:
        for first in sorted({*made.order.direct[second], *made.order.data[second]}):
            pair = (name[first], name[second])
            ones, others = owned.get(first, set()), owned.get(second, set())
            if not ones or not others:
                sets["fused"].append(pair)
            elif second in by_data and first in made.order.data[second]:
                sets["held"].append(pair)
            elif all(a == b or a in before[b] for a in ones for b in others):
                sets["held"].append(pair)
            elif first in made.order.data[second] and all(
                _made_again(first, b, others, sharing, before) or ones <= before[b] for b in others
            ):
                sets["fused"].append(pair)
            else:
                sets["broken"].append(pair)
    for position, second in enumerate(inner):
        for first in inner[:position]:
            if made.order.before(first, second) or made.order.before(second, first):
                continue
            pair = (name[first], name[second])
            if not free(first, second):
                sets["donated"].append(pair)
                continue
            ones, others = owned.get(first, set()), owned.get(second, set())
            both = {a for a in ones if any(a in reads[b] for b in others)}
            both |= {b for b in others if any(b in reads[a] for a in ones)}
            made_by_one = any({first, second} <= results.get(x, set()) for x in ones | others)
            if made_by_one or both & products:
                sets["merged"].append(pair)
            ordered = [
                1 if a in before[b] else -1 if b in before[a] else 0
                for a in ones - both
                for b in others - both
                if a != b
            ]
            if ordered and (all(o == 1 for o in ordered) or all(o == -1 for o in ordered)):
                sets["extra"].append(pair if ordered[0] == 1 else pair[::-1])
            elif any(ordered):
                sets["partly"].append(pair)
            elif both:
                sets["common"].append(pair)
            elif ordered:
                sets["parallel"].append(pair)
    region_of = {leaf: region for region, mine in owned.items() for leaf in mine}
    conflicts = []
    for leaf, waits in graph.edges.items():
        for other in waits:
            a, b = region_of.get(other), region_of.get(leaf)
            if a is None or b is None or a == b or other in reads[leaf]:
                continue
            if free(a, b) and b not in results[other]:
                conflicts.append((leaves[other].name, name[a], leaves[leaf].name, name[b]))
    found = {field: tuple(pairs) for field, pairs in sets.items()}
    return OrderReport(**found, conflicts=tuple(conflicts))


def that_compute(steps: set[int], layouts: set[int], reads: dict[int, set[int]]) -> set[int]:
    """A region's steps without those that only lay its results out for other regions.

    XLA makes a transposed residual, say, shortly before the kernel that reads it, long after the
    region whose operator that was; gates leave such an operator to its readers, too.

    Args:
        steps: The region's steps.
        layouts: Steps that put a value into another form and compute nothing.
        reads: Step -> steps whose results it needs.
    """
    handed_on = {
        step
        for step in steps & layouts
        if any(step in needed for needed in reads.values())
        and not any(step in reads[other] for other in steps - layouts)
    }
    return steps - handed_on or steps


def _made_again(
    first: int,
    kernel: int,
    kernels: set[int],
    sharing: dict[int, set[int]],
    before: dict[int, set[int]],
) -> bool:
    """Whether a region's kernel, or one of its kernels before that, computes what ``first`` computes."""
    return any(first in sharing[k] for k in kernels if k == kernel or k in before[kernel])


def _free_pairs(made: XlaEntry, aliases: dict[int, int]) -> Callable[[int, int], bool]:
    """Whether neither the plan nor donation orders two regions.

    What reads a donated argument has to be over before its memory is written again.
    """
    order = made.order
    before = {x.region: {*order.direct[x.region], *order.data[x.region]} for x in order.launches}
    graph = made.pg.graph
    producer = made.pg.producer_region()
    numbers = {name: value for name, value in zip(graph.input_names, graph.inputs, strict=False)}
    for result, argument in aliases.items():
        value = made.captured.outputs[result] if result < len(made.captured.outputs) else None
        given = numbers.get(f"arg_{argument}")
        if given is None or not isinstance(value, int) or value not in producer:
            continue
        writer = producer[value]
        for region in made.pg.regions:
            if given in region.inputs and region.id != writer:
                if not order.before(writer, region.id):
                    before[writer].add(region.id)
    known: dict[int, set[int]] = {}

    def all_before(region: int) -> set[int]:
        if region not in known:
            known[region] = set()  # donation may ask for what the plan forbids; then XLA copies
            for pred in before[region]:
                known[region] |= {pred} | all_before(pred)
        return known[region]

    return lambda a, b: a not in all_before(b) and b not in all_before(a)
