"""Communication between devices in one XLA program: what keeps it apart, and in order in a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry

_FAMILIES = {
    "all_reduce": "psum psum_invariant pmax pmin",
    "all_gather": "all_gather all_gather_invariant",
    "reduce_scatter": "reduce_scatter psum_scatter",
    "collective_permute": "ppermute",
}
_FAMILY = {kind: family for family, kinds in _FAMILIES.items() for kind in kinds.split()}
_KINDS = frozenset((*_FAMILY, "all_to_all"))

GRAPH_OPTION = "xla_gpu_enable_command_buffer"
"""What XLA puts into CUDA graphs, a list of names."""

IN_GRAPH = {
    GRAPH_OPTION: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES"
}
"""XLA's default list, and collectives."""


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


def in_graph(options: Mapping[str, Any] | None) -> bool:
    """Whether the user's compiler options put collectives into the CUDA graph.

    XLA's default leaves them out, and so does a plan: NCCL under several devices' graphs has not been
    run with it.
    """
    return "COLLECTIVES" in str((options or {}).get(GRAPH_OPTION, "")).upper().split(",")


def require_chain(made: XlaEntry) -> None:
    """Refuses a plan whose collectives gates could not put into one order.

    In a CUDA graph nothing but its edges orders them, and a communicator that two of them use at once
    corrupts data or hangs. The body of a scan has a plan of its own, and gates.

    Raises:
        UnsupportedError: a region holds several collectives, or one in a branch or another loop.
    """
    for region in made.pg.regions:
        if region.resource != "network" or made.loops_in(region.id):
            continue
        ops = [made.pg.graph.ops[i] for i in region.ops]
        if [op.kind in _KINDS and len(op.outputs) == 1 for op in ops] == [True]:
            continue
        kinds = ", ".join(f"{op.kind} of {len(op.outputs)} arrays" for op in ops)
        raise UnsupportedError(
            f"{GRAPH_OPTION} has COLLECTIVES, and region {region.name!r}{ops[0].at} holds {kinds}. "
            "In a CUDA graph gates have to put all collectives into one order, and between those of one "
            "region there is none. Call one collective for each array, outside of branches and of loops but "
            "scans, or leave COLLECTIVES out of the option"
        )


def refuse_derivative(name: str, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """Refuses to differentiate a program whose collectives are in a CUDA graph.

    Raises:
        UnsupportedError: always: the derivative's collectives would have no gates.
    """
    raise UnsupportedError(
        f"{GRAPH_OPTION} has COLLECTIVES, and scheduled function {name!r} is differentiated: the collectives "
        "of its derivative would have no order in the CUDA graph. Schedule the function that takes the "
        "derivative, dfx.schedule(jax.value_and_grad(f)), or leave COLLECTIVES out of the option"
    )
