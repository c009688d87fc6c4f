"""Several nano-batches of a region as one batch: the graph in which they are one region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

from dynaflow_xla.batch.expansion.expand import Expanded
from dynaflow_xla.batch.expansion.specs import CutSpec, MergeSpec, RegionOrigin
from dynaflow_xla.ir.graph import Region


def group(
    expanded: Expanded, groups: Sequence[tuple[int, ...]], costs: Sequence[Region]
) -> tuple[Expanded, dict[int, int]]:
    """Makes each group of regions (one region of several nano-batches) one region.

    Args:
        expanded: The graph of all nano-batches.
        groups: Ids of the regions to join, none of which reads another of its group.
        costs: For each group its region as it is at the joint size, for the estimates.

    Returns:
        The graph with the groups as regions, in a topological order, and old id -> new id.
    """
    regions = expanded.pg.regions
    first_of = {r: members[0] for members in groups for r in members}
    joint: dict[int, tuple[Region, RegionOrigin | MergeSpec | CutSpec]] = {
        r.id: (r, expanded.origins[r.id]) for r in regions if first_of.get(r.id, r.id) == r.id
    }
    for members, cost in zip(groups, costs, strict=True):
        parts = [regions[m] for m in members]
        origins = [o for m in members if isinstance(o := expanded.origins[m], RegionOrigin)]
        nanos = tuple(n for o in origins for n in o.nanos)
        name = parts[0].name.removesuffix(f"@{parts[0].nano}")
        region = replace(
            parts[0],
            name=f"{name}@{'+'.join(map(str, nanos))}",
            ops=tuple(sorted(i for p in parts for i in p.ops)),
            inputs=tuple(dict.fromkeys(v for p in parts for v in p.inputs)),
            outputs=tuple(v for p in parts for v in p.outputs),
            flops=cost.flops,
            bytes_moved=cost.bytes_moved,
            cost_ns=cost.cost_ns,
            spread=cost.spread,
            outside=cost.outside,
        )
        reads = tuple(r for o in origins for r in o.reads)
        joint[members[0]] = (region, RegionOrigin(nanos, origins[0].region, reads))
    before = {r: set[int]() for r in joint}
    for reader, preds in enumerate(expanded.pg.predecessors()):
        me = first_of.get(reader, reader)
        before[me] |= {first_of.get(p, p) for p in preds} - {me}
    order = list(TopologicalSorter(before).static_order())
    new = {old: position for position, old in enumerate(order)}
    renumber = {r.id: new[first_of.get(r.id, r.id)] for r in regions}
    merge_reads = {renumber[r]: reads for r, reads in expanded.merge_reads.items()}
    made = tuple(replace(joint[old][0], id=position) for position, old in enumerate(order))
    pg = replace(expanded.pg, regions=made)
    origins_now = tuple(joint[old][1] for old in order)
    return (
        replace(expanded, pg=pg, origins=origins_now, merge_reads=merge_reads),
        renumber,
    )
