"""From a functional aten graph to what runs: PyTorch's own operators on lanes, or JAX programs."""

from __future__ import annotations

from typing import Any

from dynaflow_xla.frontends.torch.capture.capture import capture
from dynaflow_xla.frontends.torch.signature.entry import graph_name, whole_entry
from dynaflow_xla.settings import Settings


def build_entry(
    gm: Any, options: Settings, kind: str, number: int, batch: int | None = None
) -> Any:
    """Captures, partitions, plans, validates and compiles a functional aten graph.

    Args:
        gm: The graph.
        options: What the user asked for.
        kind: "inference", "forward" or "backward".
        number: Which graph of the scheduled callable it is.
        batch: Rows of the batch, where it is too small to be split, or not in this graph.

    Raises:
        RuleError, PlanError, UnsupportedError: see the steps.
    """
    name = graph_name(options, kind, number)
    if options.backend == "torch":
        return whole_entry(capture(gm, name), options, kind, batch)
    if options.gpu is not None and options.backend == "ffi":
        options.gpu.refuse_on_cpu("lanes of XLA executables")
    # JAX is optional, and only these backends need it.
    from dynaflow_xla.frontends.torch.on_xla import xla_backend

    if batch is None:
        return xla_backend.build_entry(gm, options, kind, name)
    from dynaflow_xla.frontends.torch.on_xla import xla_split

    return xla_backend.build_entry(gm, options, kind, name, xla_split.rows(batch))
