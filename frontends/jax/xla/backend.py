"""A plan as one XLA program, whose CUDA graph has its order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.frontends.jax.xla import build, fusion, loops, xla_options
from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry
from dynaflow_xla.ir.graph import Region
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.kernels import CudaKernel
from dynaflow_xla.settings import Settings


class ProgramBackend:
    """The whole plan as one XLA program, its order held by gates.

    Args:
        settings: Of the function.
    """

    fused = fusion.ELEMENTWISE
    plans_loops = True
    copies_results = False
    on_several_devices = True

    def __init__(self, settings: Settings) -> None:
        pass

    def platform(self) -> str:
        """What plans are made for; a CPU runs them for their values."""
        return "cuda"

    def cores(self) -> int:
        """One program has no other around it."""
        return 0

    def place(self) -> tuple[str, ...]:
        """The default device."""
        return "xla", jax.default_backend(), jax.devices()[0].device_kind

    def unavailable(self) -> str:
        """It runs wherever XLA does."""
        return ""

    def options_by_plan(self) -> bool:
        """The order of a CUDA graph takes options of the compiler."""
        return jax.default_backend() in ("gpu", "cuda")

    def compiler_options(self, made: Any) -> dict[str, Any]:
        """The table's for this plan, then the user's own."""
        return xla_options.for_entry(made)

    def refuse(self, captured: Captured) -> None:
        """Nothing."""

    def rules(self, rules: tuple[Any, ...] | None, captured: Captured) -> tuple[Any, ...] | None:
        """Without those that match inside of loops only."""
        return None if rules is None else loops.rules_here(rules, captured)

    def whole(self, captured: Captured) -> Captured:
        """XLA updates in place by itself."""
        return captured

    def regions(self, pg: PartitionedGraph) -> PartitionedGraph:
        """Communication as regions with a lane: one program holds them as it does all others."""
        regions = tuple(
            replace(r, outer=False, tags=r.tags - {"outer"})
            if r.outer and r.resource == "network"
            else r
            for r in pg.regions
        )
        return replace(pg, regions=regions)

    def kernel(
        self, kernel: CudaKernel, captured: Captured, region: Region
    ) -> Callable[..., list[Any]]:
        """There are no lanes to launch it on."""
        raise UnsupportedError(
            f"kernel {kernel.name!r} in the place of region {region.name!r} needs backend='ffi': one XLA "
            "program launches its kernels itself (write it with Pallas there, or call it by jax.ffi)"
        )

    def build(self, **planned: Any) -> XlaEntry:
        """With its gates placed."""
        return build.build(**planned)
