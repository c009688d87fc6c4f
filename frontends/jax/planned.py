"""One planned signature of a function: what all backends share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from dynaflow_xla.frontends.jax.batch import split as splitting
from dynaflow_xla.frontends.jax.capture import capture
from dynaflow_xla.frontends.jax.regions.functions import KernelRegion, cut_view
from dynaflow_xla.ir.graph import PartitionedGraph
from dynaflow_xla.planning.plan import Launch, Plan
from dynaflow_xla.settings import Settings
from dynaflow_xla.timelines.timeline import Timeline


@dataclass(kw_only=True)
class Planned:
    """A planned signature.

    Attributes:
        options: What the user asked for.
        captured: Graph with payloads.
        pg: Its regions.
        plan: The validated plan.
        functions: Region id -> traceable function.
        seconds: Time spent by step: "partition", "plan", "compile".
        split: The split over the batch, if there is one.
        compared: A first call gave the original's values.
        notes: Sentences for explain.
    """

    options: Settings
    captured: capture.Captured
    pg: PartitionedGraph
    plan: Plan
    functions: dict[int, Callable[..., list[Any]]]
    seconds: dict[str, float]
    split: splitting.Split | None = None
    compared: bool = False
    notes: list[str] = field(default_factory=list)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Evaluates on flat inputs of the function (closed-over values first); returns flat outputs."""
        raise NotImplementedError

    @property
    def unproven(self) -> bool:
        """Whether nobody knows yet that the split keeps the values."""
        proof = self.split.resolved.proof if self.split is not None else None
        return proof is not None and proof.status != "separable" and not self.compared

    def bind(self, inputs: tuple[Any, ...]) -> dict[int, Any]:
        """Values by id, from flat inputs of the function (closed-over values first)."""
        if self.split is not None:
            inputs = tuple(self.split.inputs(inputs))
        return dict(zip(self.captured.graph.inputs, inputs, strict=True))

    def flat_outputs(self, env: dict[int, Any]) -> list[Any]:
        """Flat outputs of the function; joins its split results."""
        for join in self.captured.graph.joins:
            if join.value not in env:
                env[join.value] = jax.lax.concatenate([env[v] for v in join.parts], join.axis)
        return [
            env[out] if is_value else out
            for out, is_value in zip(
                self.captured.outputs, self.captured.output_is_value, strict=True
            )
        ]

    def reference(self, *inputs: Any) -> list[Any]:
        """The same on plain operators, without schedule; inputs are those of the plan's graph."""
        graph = self.captured.graph
        env: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
        for view in graph.views:
            env[view.value] = cut_view(view, env[graph.inputs[view.input]])
        for launch in self.plan.instructions:
            if isinstance(launch, Launch):
                self._run_plain(launch, env)
        return self.flat_outputs(env)

    def _run_plain(self, launch: Launch, env: dict[int, Any]) -> None:
        region = self.pg.regions[launch.region]
        for view in self.pg.graph.views:
            if view.value in region.inputs and view.value not in env:
                env[view.value] = cut_view(view, env[self.pg.graph.inputs[view.input]])
        read = (*region.inputs, *self._beside(launch.region))
        outs = self.functions[launch.region](*[env[v] for v in read])
        env.update(zip(region.outputs, outs, strict=True))

    def _beside(self, _region: int) -> tuple[int, ...]:
        """Values that a region's function takes behind its inputs."""
        return ()

    def where(self) -> str:
        """Backend and device, for explain."""
        raise NotImplementedError

    def account(self) -> list[str]:
        """Lines of explain behind the table of regions: what runs, in numbers."""
        raise NotImplementedError

    def ran(self) -> list[str]:
        """Lines of explain about what was compiled and called."""
        return []

    def measured(self, inputs: Sequence[Any], name: str) -> Timeline:
        """A run with time stamps, see ``dynaflow_xla.profile``; inputs as of a call.

        Raises:
            UnsupportedError: nothing can be measured between regions.
        """
        raise NotImplementedError

    def bodies(self) -> Sequence[tuple[str, Planned]]:
        """Plans of loop bodies, by a name."""
        return ()

    def region_notes(self) -> list[str]:
        """Sentences for explain."""
        kernels = [
            f"region {self.pg.regions[region].name!r} is kernel {function.kernel.name!r} on lanes of a GPU; "
            "elsewhere it runs as it was written"
            for region, function in self.functions.items()
            if isinstance(function, KernelRegion)
        ]
        unused = capture.marks_inside(self.captured)
        return [*self.pg.notes, *self.plan.notes, *self.notes, *unused, *kernels]
