"""Plans on lanes: of this machine's cores, or streams of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dynaflow_xla import machine
from dynaflow_xla.frontends.jax.backend import Refused
from dynaflow_xla.frontends.jax.capture import sharding
from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.frontends.jax.capture.mutation import in_place, sharing
from dynaflow_xla.frontends.jax.lanes import device_stage
from dynaflow_xla.frontends.jax.lanes.entry import LaneEntry
from dynaflow_xla.frontends.jax.regions import one_pass
from dynaflow_xla.frontends.jax.regions.functions import kernel_function
from dynaflow_xla.ir.graph import Region
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.kernels import CudaKernel
from dynaflow_xla.settings import Settings


class LaneBackend:
    """Lane programs on the CPU or a device: which, is known when a plan is compiled (``device_stage``).

    On a GPU a compile on another thread while a call runs may block both for ever.

    Args:
        settings: Of the function.
    """

    fused = frozenset[str]()
    plans_loops = False
    copies_results = True
    on_several_devices = False

    def __init__(self, settings: Settings) -> None:
        self._on_gpu = settings.gpu_lanes
        self._one_pass = settings.one_pass
        self._candidate = settings.candidate

    def platform(self) -> str:
        """Where the lanes are."""
        return device_stage.platform(self._on_gpu)

    def cores(self) -> int:
        """Those of this process: XLA's own client has a thread for each. A device has one program."""
        return machine.cores() if self.platform() == "cpu" else 0

    def place(self) -> tuple[str, ...]:
        """Lanes of a CPU are the same whatever JAX's default device is called."""
        if self.platform() == "cpu":
            return ("lanes of the cpu",)
        return "ffi", jax.default_backend(), jax.devices()[0].device_kind

    def unavailable(self) -> str:
        """Where JAX's default device is another one."""
        platform = jax.default_backend()
        if platform == "cpu" or (platform == "gpu" and self._on_gpu):
            return ""
        return (
            f"the ffi backend schedules CPU programs; the default JAX backend is {platform!r}, so "
            "the original runs"
        )

    def options_by_plan(self) -> bool:
        """Lane programs are compiled on their own."""
        return False

    def compiler_options(self, made: Any) -> dict[str, Any]:
        """The user's own."""
        return dict(made.options.compiler_options or {})

    def refuse(self, captured: Captured) -> None:
        """Lanes belong to one device, and programs of lanes around them take values.

        A plan without lanes may place values on several; ``Auto`` measures no such function.
        """
        if self._candidate:
            count, eqn = sharding.widest(op.payload for op in captured.graph.ops)
            if count > 1:
                raise Refused(sharding.too_wide(eqn, count, repr(captured.graph.name)))
        for op in captured.graph.ops:
            if sharing.refers(op.payload):
                raise Refused(
                    f"{op.kind}{op.at} inside the scheduled function {captured.graph.name!r} uses an "
                    "array by reference (jax.new_ref), which lanes do not take. Read it and write it outside "
                    "(ref[...] = fast(ref[...])), use backend='xla', or call fast.original."
                )
            if op.kind == "shard_map" and op.payload.params["mesh"].size > 1:
                raise Refused(
                    f"shard_map{op.at} inside the scheduled function {captured.graph.name!r}: lanes "
                    "belong to one device. Schedule the function that shard_map maps, "
                    "jax.shard_map(dfx.schedule(f), ...), or use backend='xla'."
                )
        if any(sharing.is_reference(captured.avals[value]) for value in captured.graph.inputs):
            # No operator of it uses one, but its derivative may (the rule of a `jax.custom_vjp`).
            raise Refused(
                f"an argument of the scheduled function {captured.graph.name!r} is an array by reference "
                "(jax.new_ref), which lanes do not take. Read it and write it outside "
                "(ref[...] = fast(ref[...])), use backend='xla', or call fast.original."
            )

    def rules(self, rules: tuple[Any, ...] | None, captured: Captured) -> tuple[Any, ...] | None:
        """A loop is one operator here."""
        return rules

    def whole(self, captured: Captured) -> Captured:
        """Updates in place stay in the outer program, where XLA keeps them in place."""
        return in_place.kept_outside(captured)

    def regions(self, pg: PartitionedGraph) -> PartitionedGraph:
        """Communication stays in the outer program; lanes of a CPU run some operators in another way."""
        return one_pass.priced(pg) if self._one_pass and self.platform() == "cpu" else pg

    def kernel(
        self, kernel: CudaKernel, captured: Captured, region: Region
    ) -> Callable[..., list[Any]]:
        """On lanes of a GPU the kernel, elsewhere the region as it was written."""
        return kernel_function(kernel, captured, region)

    def build(self, **planned: Any) -> LaneEntry:
        """It is compiled when it first runs."""
        return LaneEntry(**planned)
