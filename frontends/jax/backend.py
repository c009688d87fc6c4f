"""What differs between the ways to run a plan, from a captured function to what runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.frontends.jax.capture.capture import Captured
from dynaflow_xla.frontends.jax.planned import Planned
from dynaflow_xla.ir.graph import Region
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.kernels import CudaKernel


class Refused(UnsupportedError):
    """A function holds what no plan of a backend can run, however it is cut: ``Auto`` keeps the original."""


class Backend(Protocol):
    """One way to run plans, for one function's settings.

    A new one is a folder with such a class, and a row in ``dynaflow_xla/backends.py``. Its executable is a
    ``Planned``.

    Attributes:
        fused: Kinds of operators that cost nothing beside their neighbours.
        plans_loops: Whether the bodies of loops have plans of their own.
        copies_results: Whether results are made elsewhere and copied, into donated arguments, too.
        on_several_devices: Whether a plan can be a program for several devices.
    """

    fused: frozenset[str]
    plans_loops: bool
    copies_results: bool
    on_several_devices: bool

    def platform(self) -> str:
        """``"cpu"`` or ``"cuda"``: where regions run."""

    def cores(self) -> int:
        """Cores that a region has which runs in the outer program; 0: only what must run there does."""

    def place(self) -> tuple[str, ...]:
        """What a measured decision depends on of where programs run, for keys on disk."""

    def unavailable(self) -> str:
        """Why the original runs in this process, whatever the plan; "" if plans run."""

    def options_by_plan(self) -> bool:
        """Whether each plan is compiled with XLA options of its own, so that one program cannot serve all."""

    def compiler_options(self, made: Any) -> dict[str, Any]:
        """Options for the program around one of its plans: what its order takes, then the user's."""

    def refuse(self, captured: Captured) -> None:
        """Raises UnsupportedError for a function that it cannot run."""

    def rules(self, rules: tuple[Any, ...] | None, captured: Captured) -> tuple[Any, ...] | None:
        """The rules that are for this function and not for a loop's body in it."""

    def whole(self, captured: Captured) -> Captured:
        """A function before its cut, where its batch stays whole."""

    def regions(self, pg: PartitionedGraph) -> PartitionedGraph:
        """The cut, with what has a lane here and stays outside elsewhere."""

    def kernel(
        self, kernel: CudaKernel, captured: Captured, region: Region
    ) -> Callable[..., list[Any]]:
        """A region with a CUDA kernel in its place; UnsupportedError where there can be none."""

    def build(self, **planned: Any) -> Planned:
        """The executable of a validated plan, from the fields of ``Planned``."""
