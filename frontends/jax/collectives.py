"""Communication between devices in one XLA program: what keeps it apart, and what runs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from dynaflow_xla.frontends.jax.xla_dump import Instruction, Thunk

if TYPE_CHECKING:
    from dynaflow_xla.frontends.jax.xla_backend import XlaEntry

_FAMILIES = {
    "all_reduce": "psum psum_invariant pmax pmin",
    "all_gather": "all_gather all_gather_invariant",
    "reduce_scatter": "reduce_scatter psum_scatter",
    "collective_permute": "ppermute",
}
_FAMILY = {kind: family for family, kinds in _FAMILIES.items() for kind in kinds.split()}


class Overlap(msgspec.Struct, frozen=True):
    """A collective of the compiled program and what computes while it is under way.

    Attributes:
        region: Region of the plan that it belongs to, "" if none.
        name: Name of the instruction that starts it.
        asynchronous: Whether it has a start and a done; if not, nothing runs beside it.
        beside: Regions with kernels between its start and its done -> how many kernels.
    """

    region: str
    name: str
    asynchronous: bool
    beside: dict[str, int]


def split_options(made: XlaEntry) -> dict[str, str]:
    """Options that keep XLA from making one collective of those of two regions.

    XLA combines collectives of one kind that do not depend on each other, so that a nano-batch would
    wait for the other's data. The thresholds hold for the whole program: the collectives inside one
    region are not combined either.
    """
    depends: dict[int, int] = {}
    seen: dict[str, int] = {}
    options: dict[str, str] = {}
    for launch in made.order.launches:
        region = launch.region
        bits = 0
        for pred in made.order.data[region]:
            bits |= depends[pred] | 1 << pred
        depends[region] = bits
        kinds = {made.pg.graph.ops[i].kind for i in made.pg.regions[region].ops}
        for family in {_FAMILY[kind] for kind in kinds & _FAMILY.keys()}:
            if seen.get(family, 0) & ~bits:
                options[f"xla_gpu_{family}_combine_threshold_bytes"] = "0"
            seen[family] = seen.get(family, 0) | 1 << region
    return options


_STEPS = frozenset(
    "kAllReduce kAllGather kReduceScatter kAllToAll kRaggedAllToAll kCollectivePermute "
    "kCollectiveBroadcast".split()
)


def overlaps(
    thunks: list[Thunk],
    instructions: dict[str, Instruction],
    computes: dict[int, str],
    names: dict[str, str],
) -> tuple[Overlap, ...]:
    """The collectives of a program, in the order in which they start.

    Args:
        thunks: Its steps, in order.
        instructions: Its instructions, by name.
        computes: By ``id`` of a step that computes, the region it belongs to.
        names: By name scope, the region.
    """
    found: list[Overlap] = []
    under_way: dict[str, Overlap] = {}
    for thunk in _steps(thunks):
        if thunk.kind == "kAsyncDone":
            under_way.pop(thunk.async_id, None)
        for leaf in thunk.leaves():
            if leaf.kind in _STEPS:
                asynchronous = thunk.kind == "kAsyncStart"
                made = instructions.get(leaf.name)
                region = "" if made is None else names.get(made.region, "")
                found.append(Overlap(region, leaf.name, asynchronous, {}))
                if asynchronous:
                    under_way[thunk.async_id] = found[-1]
            elif region := computes.get(id(leaf), ""):
                for other in under_way.values():
                    if region != other.region:
                        other.beside[region] = other.beside.get(region, 0) + 1
    return tuple(found)


def _steps(thunks: list[Thunk]) -> Iterator[Thunk]:
    """The steps of a program and of its loops and branches, in order."""
    for thunk in thunks:
        if thunk.children and thunk.kind not in ("kAsyncStart", "kCommandBuffer"):
            yield from _steps(thunk.children)
        else:
            yield thunk
