"""What runs beside the communication between devices in a compiled program."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from dynaflow_xla.frontends.jax.readback.xla_dump import Instruction, Thunk


class Overlap(msgspec.Struct, frozen=True):
    """A collective of the compiled program and what computes while it is under way.

    Attributes:
        region: Region of the plan that it belongs to, "" if none.
        name: Name of the instruction that starts it.
        asynchronous: Whether it has a start and a done, or is a node of a CUDA graph; if not, nothing
            runs beside it.
        beside: Regions with kernels between its start and its done -> how many kernels; in a CUDA
            graph, with kernels that no path of the graph puts before or after it.
    """

    region: str
    name: str
    asynchronous: bool
    beside: dict[str, int]


_STEPS = frozenset(
    "kAllReduce kAllGather kReduceScatter kAllToAll kRaggedAllToAll kCollectivePermute "
    "kCollectiveBroadcast".split()
)


def overlaps(
    thunks: list[Thunk],
    instructions: dict[str, Instruction],
    computes: dict[int, str],
    names: dict[str, str],
    before: Mapping[int, set[int]],
) -> tuple[Overlap, ...]:
    """The collectives of a program, in the order in which they start.

    Args:
        thunks: Its steps, in order.
        instructions: Its instructions, by name.
        computes: By ``id`` of a step that computes, the region it belongs to.
        names: By name scope, the region.
        before: By ``id`` of a step, those that are over when it starts.
    """
    found: list[Overlap] = []
    under_way: dict[str, Overlap] = {}
    for thunk in _steps(thunks):
        if thunk.kind == "kAsyncDone":
            under_way.pop(thunk.async_id, None)
        for leaf in thunk.leaves():
            if leaf.kind in _STEPS:
                node = thunk.kind == "kCommandBuffer"
                asynchronous = node or thunk.kind == "kAsyncStart"
                made = instructions.get(leaf.name)
                region = "" if made is None else names.get(made.region, "")
                found.append(Overlap(region, leaf.name, asynchronous, {}))
                if node:
                    free = (
                        computes.get(number, region)
                        for number in map(id, thunk.leaves())
                        if number in before
                        and number not in before[id(leaf)]
                        and id(leaf) not in before[number]
                    )
                    found[-1].beside.update(Counter(other for other in free if other != region))
                elif asynchronous:
                    under_way[thunk.async_id] = found[-1]
            elif region := computes.get(id(leaf), ""):
                for other in under_way.values():
                    if region != other.region:
                        other.beside[region] = other.beside.get(region, 0) + 1
    return tuple(found)


def unordered(thunks: list[Thunk], before: Mapping[int, set[int]]) -> list[str]:
    """A sentence if collectives of one CUDA graph could run at once, which NCCL does not allow.

    Gates order those of the plan; others, outside of the scheduled function, they cannot.
    """
    pairs = [
        (a.name, b.name)
        for thunk in _steps(thunks)
        if thunk.kind == "kCommandBuffer"
        for a, b in itertools.combinations([x for x in thunk.leaves() if x.kind in _STEPS], 2)
        if id(a) not in before[id(b)] and id(b) not in before[id(a)]
    ]
    if not pairs:
        return []
    return [
        f"DANGER: {len(pairs)} pairs of collectives in a CUDA graph have no order, such as {pairs[0]}: "
        "on one communicator they corrupt data or hang. Leave COLLECTIVES out of "
        "xla_gpu_enable_command_buffer, or schedule the function that holds all of them"
    ]


def _steps(thunks: list[Thunk]) -> Iterator[Thunk]:
    """The steps of a program and of its loops and branches, in order."""
    for thunk in thunks:
        if thunk.children and thunk.kind not in ("kAsyncStart", "kCommandBuffer"):
            yield from _steps(thunk.children)
        else:
            yield thunk
