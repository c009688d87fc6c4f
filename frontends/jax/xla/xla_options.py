"""The XLA options under which a GPU program has its plan's order, by jaxlib version.

XLA builds a CUDA graph ("command buffer") from a compiled program. In its default mode the graph is a
chain, or keeps the compiler's own order; in the mode CONCURRENT its edges are exactly what the
operations' buffers ask for, which the order gates use. Each row of the table was read back from
compiled programs (``tests/deviceless``, docs/xla-backend.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import jaxlib
from jax.extend import core as jcore

from dynaflow_xla.frontends.jax.xla import collectives
from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry
from dynaflow_xla.ir.graph import Graph
from dynaflow_xla.watching import telling

CONCURRENT = {
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_gpu_graph_min_graph_size": "1",
}
"""A CUDA graph with the edges that buffers ask for."""

PROVED: dict[tuple[int, int], dict[str, str]] = {
    (0, 10): CONCURRENT,
    (0, 11): CONCURRENT,
    (0, 12): CONCURRENT,
}
"""(major, minor) of jaxlib -> options whose effect was read back."""

NO_DOT_MERGER = {"xla_gpu_dot_merger_threshold_mb": "0"}
"""XLA merges products that share an operand into one kernel: overlapping regions would become one."""


NO_SIBLING_FUSION = {"xla_disable_hlo_passes": "multi_output_fusion"}
"""XLA makes one kernel of two nano-batches' first operators, if both read one argument."""


NO_SLICE_FUSION = {"xla_gpu_enable_dynamic_slice_fusion": False}
"""XLA puts a gate whose operands are slices into a fusion with these, where it is not in place any more: then
it copies (``gate_handlers.cc``)."""


def version(text: str | None = None) -> tuple[int, int]:
    """(major, minor) of a jaxlib version; default the installed one's."""
    found = re.match(r"(\d+)\.(\d+)", text or jaxlib.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def for_entry(made: XlaEntry) -> dict[str, Any]:
    """The options for a plan; the user's own win.

    Warns:
        FallbackWarning: this jaxlib is not in the table; the newest row is used, unproved.
    """
    mine = version()
    if mine not in PROVED:
        telling.fallback(unproved())
    options: dict[str, Any] = dict(PROVED.get(mine, PROVED[max(PROVED)]))
    if mine >= (0, 11):  # older ones have no such pass
        options.update(NO_SLICE_FUSION)
    plans = [made]
    for plan in plans:
        plans += [body for _, body in plan.bodies()]
    if any(map(_shared_matmul_operand, plans)):
        options.update(NO_DOT_MERGER)
    if any(plan.split is not None for plan in plans):
        options.update(NO_SIBLING_FUSION)
    for plan in plans:
        options.update(collectives.split_options(plan))
    options.update(made.options.compiler_options or {})
    return options


def unproved() -> str:
    """A sentence about an unknown jaxlib, "" for a known one."""
    if version() in PROVED:
        return ""
    known = ", ".join(f"{a}.{b}" for a, b in sorted(PROVED))
    return (
        f"no XLA options are proved for jaxlib {jaxlib.__version__} (known: {known}); those of the newest "
        "known version are used, and the CUDA graph may not have the plan's order. "
        "dfx.explain(fast, *args, deep=True) shows what it has."
    )


PLANS_IN_TRACES = "DYNAFLOW_XLA_PLANS_IN_TRACES"
"""Variable of the environment: "1" has plans inside of larger traced programs on a GPU, too."""

_warned = False


def plan_inside_trace(name: str) -> bool:
    """Whether a call that is a part of a larger program has its plan there; says once what is to be known.

    One computed wrong values on an H100, where XLA had made slices of what gates pass on (docs/gpu.md). Gates
    copy these since then; until a GPU has run that, larger programs, whose options are not the plan's and
    which gain nothing by it, have the original.
    """
    global _warned
    wanted = os.environ.get(PLANS_IN_TRACES) == "1"
    if not _warned:
        _warned = True
        what = (
            "Without those of the plan its CUDA graph is serial: "
            "jax.jit(outer, compiler_options=dfx.compiler_options(fast, *args)). On an H100 such a plan has "
            "computed wrong values: compare them."
            if wanted
            else "On an H100 a plan has computed wrong values there, so the original runs. Call what is "
            f"scheduled at top level; {PLANS_IN_TRACES}=1 has the plan all the same, for whoever compares."
        )
        telling.fallback(
            f"scheduled function {name!r} is called inside another traced function, which decides the XLA "
            f"options. {what}",
        )
    return wanted


def _shared_matmul_operand(made: XlaEntry) -> bool:
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
