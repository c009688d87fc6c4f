"""Clusters of operators on their way to regions: seeding, growing in program order, merging.

A cluster graph stays acyclic by construction. Growing: an operator joins a cluster only if none of
its producers runs behind that cluster. Merging: an edge is contracted only where no path leaves the
pair and comes back (the source has one successor, or its others run behind the target, or the
target's other predecessors run before the source), and where no expensive cluster gets a predecessor it
did not have, because a region starts only when all its inputs are there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dynaflow_xla.ir.graph import Graph, Resource
from dynaflow_xla.ir.phases import ONE_PHASE, Phases

COMPUTE_INTENSITY = 4.0
"""Operations a byte from which operators count as compute-bound (a core's ratio of the two)."""

TINY_SHARE = 0.02
TINY_NS = 50_000.0


@dataclass(frozen=True)
class Seed:
    """Why an operator starts, or belongs to, a cluster of its own.

    Attributes:
        key: Operators with the same key go together.
        name: Name of the region to be.
        fixed: Made by a rule or a mark: nothing else may join.
        outer: The operator stays in the outer program.
    """

    key: Hashable
    name: str
    fixed: bool = False
    outer: bool = False
    resource: Resource | None = None
    tags: frozenset[str] = frozenset()
    rule: str = "default"


@dataclass
class Cluster:
    """Operators of one phase and function that run together; ``before`` is a bit set of earlier clusters."""

    id: int
    seed: Seed | None
    ops: list[int] = field(default_factory=list)
    preds: set[int] = field(default_factory=set)
    before: int = 0
    cost_ns: float = 0.0
    phase: Hashable = 0
    computes: bool = False  # one of its operators computes much for what it moves

    @property
    def fixed(self) -> bool:
        """Whether nothing else may join."""
        return self.seed is not None and (self.seed.fixed or self.seed.outer)


def grow(
    graph: Graph,
    live: list[int],
    seeds: dict[int, Seed],
    fused: frozenset[str] = frozenset(),
    phases: Phases = ONE_PHASE,
) -> list[Cluster]:
    """Puts every live operator into a cluster, in program order; kinds of ``fused`` cost nothing."""
    clusters: list[Cluster] = []
    home: dict[int, int] = {}
    open_for: dict[Hashable, int] = {}
    last_outer = -1

    def new(seed: Seed | None, phase: Hashable) -> int:
        clusters.append(Cluster(len(clusters), seed, phase=phase))
        return clusters[-1].id

    def join(target: int, op: int, preds: set[int]) -> None:
        cluster = clusters[target]
        cluster.ops.append(op)
        if graph.ops[op].kind not in fused:
            cluster.cost_ns += graph.ops[op].cost_ns
        cluster.computes |= resource_of(graph.ops[op].flops, graph.ops[op].bytes_moved) == "compute"
        preds = preds - {target}
        cluster.preds |= preds
        before = cluster.before
        for pred in preds:
            before |= clusters[pred].before | 1 << pred
        if before != cluster.before:
            cluster.before = before
            for other in clusters:  # whoever runs behind this cluster runs behind the new ones too
                if other.before >> target & 1:
                    other.before |= before
        for value in graph.ops[op].outputs:
            home[value] = target

    for index in live:
        op = graph.ops[index]
        read = {*op.inputs, *(v for i in phases.copies.get(index, ()) for v in graph.ops[i].inputs)}
        preds = {home[v] for v in read if v in home}
        phase = (phases.phase(index), op.function)
        seed = seeds.get(index)
        if seed is not None:
            if seed.outer and last_outer >= 0:
                preds.add(last_outer)
            target = open_for.get((phase, seed.key), -1)
            if target < 0 or any(clusters[p].before >> target & 1 for p in preds):
                target = open_for[phase, seed.key] = new(seed, phase)
            join(target, index, preds)
            if seed.outer:
                last_outer = target
            continue
        # The latest producer, if all others run before it: joining it delays nothing.
        target = next(
            (
                p
                for p in preds
                if not clusters[p].fixed
                and clusters[p].phase == phase
                and all(q == p or clusters[p].before >> q & 1 for q in preds)
            ),
            -1,
        )
        join(new(None, phase) if target < 0 else target, index, preds)
    return clusters


def contract(clusters: list[Cluster], max_regions: int) -> list[Cluster]:
    """Merges clusters until nothing is left to merge and, where possible, at most ``max_regions`` remain.

    Of more than these first branches are put together, the shortest ones, in pairs: a reader that took one
    branch after another would run them one after another. Where no two branches are alike, ever longer ones
    go into what they continue, or into their readers.
    """
    total = sum(c.cost_ns for c in clusters) or 1.0
    tiny = min(TINY_NS, TINY_SHARE * total)
    clusters = _in_rounds(clusters, tiny)
    while (more := len(clusters) - max_regions) > 0:
        # Few at a time: what is behind two branches of one layer goes with them then.
        merged = _pair(clusters, max(1, more // 4))
        if merged is clusters:
            if tiny > total or sum(not c.fixed for c in clusters) < 2:
                break
            tiny *= 4
        clusters = _in_rounds(merged, tiny)
    return clusters


def _in_rounds(clusters: list[Cluster], tiny: float) -> list[Cluster]:
    while (merged := _round(clusters, tiny)) is not clusters:
        clusters = merged
    return clusters


def _pair(clusters: list[Cluster], most: int) -> list[Cluster]:
    """Merges up to ``most`` pairs of branches that read and are read by the same clusters.

    The shortest first, and the last two of a layer only where there are no others.
    """
    succs = successors(clusters)
    alike: dict[Hashable, list[Cluster]] = {}
    for cluster in clusters:
        if not cluster.fixed:
            around = frozenset(cluster.preds), frozenset(c.id for c in succs[cluster.id])
            alike.setdefault((cluster.phase, *around), []).append(cluster)
    pairs: list[tuple[bool, float, int, int]] = []
    for branches in alike.values():
        branches.sort(key=lambda c: c.cost_ns)
        for one, other in zip(branches[::2], branches[1::2], strict=False):
            pairs.append((len(branches) == 2, one.cost_ns + other.cost_ns, one.id, other.id))
    chosen = sorted(pairs)[:most]
    if any(not last for last, *_ in chosen):
        chosen = [pair for pair in chosen if not pair[0]]
    into = {source: target for _, _, target, source in chosen}
    return _renumber(clusters, into) if into else clusters


def resource_of(flops: float, bytes_moved: int) -> Resource:
    """What bounds operators that compute and move so much."""
    return "compute" if flops > COMPUTE_INTENSITY * bytes_moved else "memory"


def _next(cluster: Cluster, after: Sequence[Cluster]) -> Cluster | None:
    """The only one of a cluster's readers, or the one that all others run behind; else None.

    The latter (a normalization, whose mean and variance read what it then scales) only between loops over
    elements, which a compiler fuses: operators that compute may gain by more cores where others do not.
    """
    if len(after) == 1:
        return after[0]
    for target in after:
        if all(other is target or other.before >> target.id & 1 for other in after):
            return None if cluster.computes or target.computes else target
    return None


def _round(clusters: list[Cluster], tiny: float) -> list[Cluster]:
    succs = successors(clusters)
    by_id = {c.id: c for c in clusters}
    into: dict[int, int] = {}
    touched: set[int] = set()

    def merge(source: int, target: int) -> None:
        into[source] = target
        touched.update((source, target))

    for cluster in clusters:
        if cluster.fixed or cluster.id in touched:
            continue
        after = succs[cluster.id]
        target = _next(cluster, after)
        if target is not None:
            series = target.preds == {cluster.id}
            if (
                not target.fixed
                and target.phase == cluster.phase
                and target.id not in touched
                and (series or cluster.cost_ns <= tiny)
            ):
                merge(cluster.id, target.id)
                continue
        if cluster.cost_ns <= tiny and cluster.preds:
            for pred in cluster.preds:
                target = by_id[pred]
                if target.fixed or pred in touched or target.phase != cluster.phase:
                    continue
                if all(q == pred or target.before >> q & 1 for q in cluster.preds):
                    merge(cluster.id, pred)
                    break
    if not into:
        return clusters
    return _renumber(clusters, into)


def _renumber(clusters: list[Cluster], into: dict[int, int]) -> list[Cluster]:
    kept = [c for c in clusters if c.id not in into]
    number = {c.id: i for i, c in enumerate(kept)}
    for source, destination in into.items():
        number[source] = number[destination]
    merged = [Cluster(i, c.seed, phase=c.phase) for i, c in enumerate(kept)]
    best = [c.cost_ns if c.seed else -1.0 for c in kept]
    for cluster in clusters:
        target = merged[number[cluster.id]]
        target.ops += cluster.ops
        target.cost_ns += cluster.cost_ns
        target.computes |= cluster.computes
        target.preds |= {number[p] for p in cluster.preds} - {target.id}
        if cluster.seed is not None and cluster.cost_ns > best[target.id]:
            target.seed, best[target.id] = cluster.seed, cluster.cost_ns
    for cluster in topological(merged):
        for pred in cluster.preds:
            cluster.before |= merged[pred].before | 1 << pred
    for cluster in merged:
        cluster.ops.sort()
    return merged


def sink(graph: Graph, clusters: list[Cluster], fused: frozenset[str]) -> None:
    """Moves what only one other cluster reads into that, where less is handed over then.

    An optimizer's first operators on a gradient would else stay with the gradient: two values to hand
    over for one. Nothing that is before a cluster is behind it then, since its readers were behind it.
    """
    home = {i: cluster for cluster in clusters for i in cluster.ops}
    readers: dict[int, list[int]] = {}
    for index in home:
        for value in graph.ops[index].inputs:
            readers.setdefault(value, []).append(index)
    for cluster in clusters:
        if cluster.fixed:
            continue
        goal: dict[int, Cluster] = {}
        for index in sorted(cluster.ops, reverse=True):
            op = graph.ops[index]
            if op.kind not in fused:
                continue
            places = [goal.get(r, home[r]) for v in op.outputs for r in readers.get(v, ())]
            if not places or places[0] is cluster or places[0].phase != cluster.phase:
                continue
            if all(p is places[0] for p in places):
                goal[index] = places[0]
        for target in {p.id: p for p in goal.values() if not p.fixed}.values():
            moving = _without_heads(graph, {i for i, place in goal.items() if place is target})
            stays = set(cluster.ops) - moving
            made = {v for i in cluster.ops for v in graph.ops[i].outputs}
            left = {v for i in stays for v in graph.ops[i].outputs}
            read = {v for i in target.ops for v in graph.ops[i].inputs}
            read_too = read | {v for i in moving for v in graph.ops[i].inputs}
            if not stays or _bytes(graph, left & read_too) >= _bytes(graph, made & read):
                continue
            cluster.ops = sorted(stays)
            target.ops = sorted({*target.ops, *moving})
            for index in moving:
                home[index] = target
                for value in graph.ops[index].inputs:
                    producer = graph.values[value].producer
                    if producer in home and home[producer] is not target:
                        target.preds.add(home[producer].id)


def _without_heads(graph: Graph, ops: set[int]) -> set[int]:
    """The operators without those at the start that hand over as much as they read."""
    kept = set(ops)
    for index in sorted(ops):
        inputs, outputs = graph.ops[index].inputs, graph.ops[index].outputs
        alone = all(
            i == index or inputs[0] not in graph.ops[i].inputs for i in kept if len(inputs) == 1
        )
        first = all(graph.values[v].producer not in kept for v in inputs)
        if len(inputs) == 1 and first and alone:
            if _bytes(graph, set(outputs)) <= _bytes(graph, set(inputs)):
                kept.discard(index)
    return kept


def _bytes(graph: Graph, values: set[int]) -> int:
    return sum(graph.values[v].bytes for v in values)


def successors(clusters: list[Cluster]) -> dict[int, list[Cluster]]:
    """By number of a cluster, those that it is a predecessor of, in their order here."""
    succs: dict[int, list[Cluster]] = {c.id: [] for c in clusters}
    for cluster in clusters:
        for pred in cluster.preds:
            succs[pred].append(cluster)
    return succs


def topological(clusters: list[Cluster]) -> list[Cluster]:
    """Clusters in an order that respects ``preds``, by first operator where free to choose."""
    import heapq

    by_id = {c.id: c for c in clusters}
    missing = {c.id: len(c.preds) for c in clusters}
    succs = successors(clusters)
    heap = [(min(c.ops), c.id) for c in clusters if not c.preds]
    heapq.heapify(heap)
    order = []
    while heap:
        _, number = heapq.heappop(heap)
        order.append(by_id[number])
        for succ in succs[number]:
            missing[succ.id] -= 1
            if missing[succ.id] == 0:
                heapq.heappush(heap, (min(succ.ops), succ.id))
    return order
