"""Cutting a graph into regions, by rules, marks and defaults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeAlias

from dynaflow_xla import machine
from dynaflow_xla.ir.clusters import (
    Cluster,
    Seed,
    contract,
    grow,
    resource_of,
    sink,
    successors,
    topological,
)
from dynaflow_xla.ir.graph import Graph, Operator, OuterKind, Region, Resource, Source
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.phases import ONE_PHASE, Phases
from dynaflow_xla.ir.rules import Rule, as_rules, check_matches
from dynaflow_xla.ir.work import spread_over

CALL_SHARE, CALL_NS = 0.05, 20_000.0
"""A nested function call is a region of its own from this share of the cost and this long."""

CALL_MAX_SHARE = 0.5
"""A call with more than this share is looked into: it may hold the branches."""

OP_SHARE, OP_NS = 0.02, 100_000.0
"""An operator is expensive from this share of the cost, or this long."""

REPLICATE_NS, REPLICATE_SHARE = 5_000.0, 0.01
"""Preparation of inputs is repeated in each region that needs it, where that is cheaper than handing
it over. What takes longer than this and more than this share of the function's cost is never repeated: it
may run on its readers' lane, where nothing is handed over."""

Nesting: TypeAlias = tuple[str, ...]
"""Names of nested calls or scopes, outermost first."""


def partition(
    graph: Graph,
    rules: Sequence[Rule] | None = None,
    *,
    max_regions: int = 64,
    fused: frozenset[str] = frozenset(),
    phases: Phases = ONE_PHASE,
) -> PartitionedGraph:
    """Cuts a graph.

    Operators under a ``dfx.mark`` or matched by a rule (the first that matches) form one region an
    instance, in several pieces if something between them must run elsewhere. Without rules,
    expensive operators and nested calls start regions. The rest joins what it continues; regions
    that would run one after another anyway are merged; independent branches stay apart.

    Args:
        graph: The graph; operators nobody needs are dropped, except those with effects.
        rules: See ``dynaflow_xla.ir.rules``; None for the default cut.
        max_regions: Branches, then cheap regions are merged until at most so many remain, where possible.
        fused: Kinds of operators that a compiler computes together with what is around them: no
            region is made for their sake.
        phases: Operators that may not share a region.

    Raises:
        RuleError: a rule matches nothing, or is no rule.
    """
    needed = live(graph)
    notes: list[str] = []
    seeds = _seeds(graph, needed, rules, notes, fused)
    generated = _generated(graph, needed, seeds, phases)
    placed = [i for i in needed if i not in generated]
    clusters = contract(grow(graph, placed, seeds, fused, phases), max_regions)
    sink(graph, clusters, fused)
    order = topological(clusters)
    ops_of = _replicate(graph, order, phases, one_program=bool(fused))
    for ops in ops_of.values():
        copies = {i for index in ops for i in phases.copies.get(index, ())}
        # Those a region does not read are dropped below.
        ops[:] = sorted({*ops, *generated, *copies})
    regions = _regions(graph, [c for c in order if c.id in ops_of], ops_of)
    if phases.copies:
        regions = _read(graph, regions)
    dead = len(graph.ops) - len(needed)
    if dead:
        notes.append(f"{dead} operators whose results nobody reads were left out")
    return PartitionedGraph(graph, tuple(regions), tuple(notes))


def live(graph: Graph) -> list[int]:
    """Operators that the graph's outputs need, and those that run in any case."""
    needed = set(graph.outputs)
    found = []
    for op in reversed(graph.ops):
        if _runs_in_any_case(op) or any(v in needed for v in op.outputs):
            needed.update(op.inputs)
            found.append(op.index)
    return found[::-1]


def _runs_in_any_case(op: Operator) -> bool:
    """Whether an operator does more than to compute; to be of a type that is not handed over is nothing."""
    reason = op.outer_reason
    return op.once or (op.outer and (reason is None or reason.kind is not OuterKind.LAYOUT))


def _generated(graph: Graph, needed: list[int], seeds: dict[int, Seed], phases: Phases) -> set[int]:
    """Generators to repeat in every reader; not those that a rule, the caller or an outer region has."""
    taken = set(graph.outputs)
    for index in needed:
        if graph.ops[index].outer:
            taken.update(graph.ops[index].inputs)
    generated: set[int] = set()
    repeated: set[int] = set()  # values
    for index in needed:
        op = graph.ops[index]
        fixed = (index in seeds and seeds[index].fixed) or index in phases.once
        # What reads a generator that stays where it is must run after that.
        if op.generator and not fixed and taken.isdisjoint(op.outputs) and repeated >= {*op.inputs}:
            generated.add(index)
            repeated.update(op.outputs)
    return generated


def _seeds(
    graph: Graph,
    needed: list[int],
    rules: Sequence[Rule] | None,
    notes: list[str],
    fused: frozenset[str],
) -> dict[int, Seed]:
    seeds: dict[int, Seed] = {}
    for index in needed:
        op = graph.ops[index]
        if op.outer:
            communicates = op.outer_reason is not None and op.outer_reason.kind is OuterKind.NETWORK
            resource: Resource = "network" if communicates else "host"
            seeds[index] = Seed(
                ("outer", index), op.kind, outer=True, resource=resource, rule="outer"
            )
        elif op.mark is not None:
            mark = op.mark
            seeds[index] = Seed(
                ("mark", mark.name, mark.instance), mark.name, fixed=True,
                resource=mark.resource, tags=mark.tags, rule=f"mark({mark.name!r})",
            )  # fmt: skip
    alive = set(needed)
    for number, rule in enumerate(() if rules is None else as_rules(rules)):
        before = len(seeds)
        groups = check_matches(rule, graph)
        for instance, (name, ops) in enumerate(groups):
            seed = Seed(
                ("rule", number, instance), rule.name or name, fixed=True,
                resource=rule.resource, tags=rule.tags, rule=rule.text(),
            )  # fmt: skip
            for index in ops:
                if index in alive:
                    seeds.setdefault(index, seed)
        if not groups:
            notes.append(
                f"rule {rule.text()} matches nothing in this graph, which is one of several"
            )
        elif len(seeds) == before:
            notes.append(
                f"rule {rule.text()} has no effect: what it matches is left out, or has a mark or an "
                "earlier rule"
            )
    if rules is None:
        _default_seeds(graph, needed, seeds, fused)
    return seeds


def _default_seeds(
    graph: Graph, needed: list[int], seeds: dict[int, Seed], fused: frozenset[str]
) -> None:
    total = sum(graph.ops[i].cost_ns for i in needed) or 1.0
    by_call = _costs_by_prefix((graph.ops[i].call_path, graph.ops[i].cost_ns) for i in needed)
    by_scope = _costs_by_prefix((graph.ops[i].scope, graph.ops[i].cost_ns) for i in needed)
    least, most = max(CALL_SHARE * total, CALL_NS), CALL_MAX_SHARE * total

    def first(path: Nesting, costs: dict[Nesting, float]) -> Nesting | None:
        """The outermost part of a path that is expensive, but does not have most of the work."""
        return next((part for part in _prefixes(path) if least <= costs[part] <= most), None)

    for index in needed:
        if index in seeds:
            continue
        op = graph.ops[index]
        call, scope = first(op.call_path, by_call), first(op.scope, by_scope)
        if call is not None:
            seeds[index] = Seed(("call", call), call[-1].split("#", 1)[0].strip("_"))
        elif scope is not None:
            seeds[index] = Seed(("scope", scope), scope[-1])
        elif op.kind not in fused and (
            op.cost_ns >= OP_NS or op.cost_ns >= max(OP_SHARE * total, 1_000.0)
        ):
            seeds[index] = Seed(("op", index), op.kind)


def _prefixes(path: Nesting) -> Iterator[Nesting]:
    return (path[:depth] for depth in range(1, len(path) + 1))


def _costs_by_prefix(paths: Iterable[tuple[Nesting, float]]) -> dict[Nesting, float]:
    costs: dict[Nesting, float] = {}
    for path, cost_ns in paths:
        for part in _prefixes(path):
            costs[part] = costs.get(part, 0.0) + cost_ns
    return costs


def _read(graph: Graph, regions: list[Region]) -> list[Region]:
    """Without the regions that nobody reads since their readers repeat what they make."""
    while True:
        read = {v for region in regions for v in region.inputs} | set(graph.outputs)
        kept = [
            region
            for region in regions
            if region.outer
            or any(graph.ops[i].once for i in region.ops)
            or not read.isdisjoint(region.outputs)
        ]
        if len(kept) == len(regions):
            return [replace(region, id=number) for number, region in enumerate(kept)]
        regions = kept


def _replicate(
    graph: Graph, order: list[Cluster], phases: Phases, *, one_program: bool
) -> dict[int, list[int]]:
    """Operators of each cluster, after cheap clusters that read inputs only went into their readers.

    In one program no hand-over is saved by that, only a region.
    """
    ops_of = {c.id: list(c.ops) for c in order}
    outputs = set(graph.outputs)
    most_ns = max(REPLICATE_NS, REPLICATE_SHARE * sum(c.cost_ns for c in order))
    succs = successors(order)
    for cluster in order:
        readers = succs[cluster.id]
        if (
            cluster.preds
            or cluster.fixed
            or sum(graph.ops[i].cost_ns for i in cluster.ops)
            > (REPLICATE_NS if one_program else min(most_ns, _handover_ns(graph, cluster)))
            or not readers
            or any(graph.ops[i].once for i in cluster.ops)
            or any(reader.fixed and reader.seed and reader.seed.outer for reader in readers)
            or any(v in outputs for i in cluster.ops for v in graph.ops[i].outputs)
            or not all(phases.repeatable(cluster.ops[0], r.ops[0]) for r in readers if r.ops)
        ):
            continue
        for reader in readers:
            ops_of[reader.id] = sorted({*ops_of[reader.id], *ops_of[cluster.id]})
            reader.preds.discard(cluster.id)
        del ops_of[cluster.id]
    return ops_of


def _handover_ns(graph: Graph, cluster: Cluster) -> float:
    made = {v for i in cluster.ops for v in graph.ops[i].outputs}
    used = {v for i in cluster.ops for v in graph.ops[i].inputs}
    crossing = sum(graph.values[v].bytes for v in made - used)
    return machine.numbers().hand_over(crossing)


def _regions(graph: Graph, order: list[Cluster], ops_of: dict[int, list[int]]) -> list[Region]:
    region_ops = [_needed_only(graph, ops_of[c.id], c.ops) for c in order]
    read_by: dict[int, set[int]] = {}
    for number, ops in enumerate(region_ops):
        made = {v for i in ops for v in graph.ops[i].outputs}
        for i in ops:
            for value in graph.ops[i].inputs:
                if value not in made:
                    read_by.setdefault(value, set()).add(number)
    outputs = set(graph.outputs)
    names: set[str] = set()
    regions = []
    for number, (cluster, ops) in enumerate(zip(order, region_ops, strict=True)):
        made = {v for i in ops for v in graph.ops[i].outputs}
        own = [v for i in cluster.ops for v in graph.ops[i].outputs]
        inputs = dict.fromkeys(v for i in ops for v in graph.ops[i].inputs if v not in made)
        members = [graph.ops[i] for i in ops]
        costliest = max(members, key=lambda op: op.cost_ns)
        seed = cluster.seed
        name = seed.name if seed is not None else costliest.kind
        if name in names:
            name = next(free for k in count(1) if (free := f"{name}_{k}") not in names)
        names.add(name)
        flops = sum(op.flops for op in members)
        moved = sum(op.bytes_moved for op in members)
        outer = bool(seed and seed.outer)
        regions.append(
            Region(
                id=number,
                name=name,
                ops=tuple(ops),
                inputs=tuple(inputs),
                outputs=tuple(v for v in own if v in outputs or v in read_by),
                tags=(seed.tags if seed else frozenset()) | ({"outer"} if outer else set()),
                resource=(seed.resource if seed else None) or resource_of(flops, moved),
                flops=flops,
                bytes_moved=moved,
                cost_ns=sum(op.cost_ns for op in members),
                spread=spread_over(op.spread for op in members),
                outer=outer,
                rule=seed.rule if seed else "glue",
                source=costliest.source or _first_source(members),
                function=graph.ops[cluster.ops[0]].function,
            )
        )
    return regions


def _needed_only(graph: Graph, ops: list[int], own: list[int]) -> list[int]:
    """Drops replicated operators that a region does not read."""
    keep = set(own)
    needed = {v for i in own for v in graph.ops[i].inputs}
    for index in sorted(ops, reverse=True):
        if index not in keep and any(v in needed for v in graph.ops[index].outputs):
            keep.add(index)
            needed.update(graph.ops[index].inputs)
    return [i for i in ops if i in keep]


def _first_source(ops: list[Operator]) -> Source | None:
    return next((op.source for op in ops if op.source is not None), None)
