"""One planned signature of a function: what all backends share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from dynaflow_xla.errors import PlanError, UnsupportedError
from dynaflow_xla.frontends.jax.batch import split as splitting
from dynaflow_xla.frontends.jax.capture import capture
from dynaflow_xla.frontends.jax.regions import on_caller
from dynaflow_xla.frontends.jax.regions.functions import KernelRegion, cut_rows
from dynaflow_xla.ir.graph import Graph
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.instructions import Launch, Merge, Slice
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.settings import Settings
from dynaflow_xla.timelines.timeline import Timeline


class BufferValues:
    """What a plan's buffers hold while its regions are evaluated one after another, outside of lanes.

    Args:
        plan: The plan.
        graph: Its graph.
        inputs: Values of the graph's inputs.

    Attributes:
        values: What was made last, by value: for what looks beside the plan's buffers.
    """

    def __init__(self, plan: Plan, graph: Graph, inputs: Sequence[Any]):
        self._plan = plan
        self.values: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True))
        self._held = {
            b.id: inputs[b.index] for b in plan.buffers if b.kind == "arg" and b.offset < 0
        }
        self._made_of: dict[int, Slice | Merge] = {
            i.out: i for i in plan.instructions if isinstance(i, Slice | Merge)
        }
        self._results = {b.index: b.id for b in plan.buffers if b.kind == "result" and b.offset < 0}

    def __getitem__(self, number: int) -> Any:
        """What a buffer holds: written to it, or what a slice or a merge says.

        Raises:
            PlanError: nothing was written to it.
        """
        if number not in self._held:
            made_of = self._made_of.get(number)
            if isinstance(made_of, Slice):
                x = cut_rows(self[made_of.src], made_of)
            elif isinstance(made_of, Merge):
                x = jax.lax.concatenate([self[part] for part in made_of.srcs], made_of.axis)
            else:
                raise PlanError(f"buffer {number} is read before anything is written to it")
            self.put([number], x)
        return self._held[number]

    def put(self, numbers: Sequence[int], x: Any) -> None:
        """Writes the same to some buffers."""
        for number in numbers:
            self._held[number] = x
            self.values[self._plan.buffers[number].value] = x

    def write(self, launch: Launch, made: Mapping[int, Any]) -> None:
        """Writes what a launch makes, by value, to the buffers that it says."""
        for number in launch.outs:
            self.put([number], made[self._plan.buffers[number].value])

    def result(self, index: int, value: int) -> Any:
        """A result; what no buffer is for is one of the arguments as it is."""
        number = self._results.get(index)
        return self.values[value] if number is None else self[number]


def refuse_shapes(caller: str, *given: Any) -> None:
    """Raises UnsupportedError if what is given holds no values; ``caller`` runs the function."""
    leaves = jax.tree_util.tree_leaves(given)
    if any(isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in leaves):
        raise UnsupportedError(
            f"{caller} runs the function: it takes arrays, not shapes or tracers"
        )


def own_device(inputs: Sequence[Any]) -> Any:
    """The device that a call with these inputs computes on: theirs, or else the default one."""
    for x in inputs:
        if isinstance(x, jax.Array) and x.committed and len(x.devices()) == 1:
            return next(iter(x.devices()))
    chosen = jax.config.jax_default_device  # a device, the name of a platform, or None
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


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
        program_ns: See ``Context``.
        apart: It is the plan of calls that are programs of their own; as a part of a larger one the function
            has another.
    """

    options: Settings
    captured: capture.Captured
    pg: PartitionedGraph
    plan: Plan
    functions: dict[int, Callable[..., list[Any]]]
    seconds: dict[str, float]
    split: splitting.SplitCapture | None = None
    compared: bool = False
    notes: list[str] = field(default_factory=list)
    program_ns: float = 0.0
    apart: bool = False

    def __call__(self, *inputs: Any) -> list[Any]:
        """Evaluates on flat inputs of the function (closed-over values first); returns flat outputs."""
        raise NotImplementedError

    @property
    def streams(self) -> bool:
        """Whether it computes on an accelerator, whose lanes have no cores."""
        return bool(own_device(()).platform != "cpu")

    @property
    def on_caller(self) -> bool:
        """Whether its only lane is the thread that calls the program, see ``regions.on_caller``."""
        return False

    @property
    def caller_ns(self) -> float:
        """See ``strategies.base.Context``; 0 where its only lane is not that thread."""
        return on_caller.MAX_NS if self.on_caller else 0.0

    @property
    def own_options(self) -> Mapping[str, Any]:
        """XLA's options that its program is compiled with where it is not a part of a larger one."""
        return {}

    @property
    def unproven(self) -> bool:
        """Whether nobody knows yet that the split keeps the values."""
        proof = self.split.resolved.proof if self.split is not None else None
        return proof is not None and proof.status != "separable" and not self.compared

    def bind(self, inputs: Sequence[Any]) -> BufferValues:
        """The plan's buffers with flat inputs of the function (closed-over values first) in them."""
        if self.split is not None:
            inputs = self.split.inputs(tuple(inputs))
        return BufferValues(self.plan, self.captured.graph, inputs)

    def flat_outputs(self, memory: BufferValues) -> list[Any]:
        """Flat outputs of the function."""
        position = itertools.count()
        return [
            memory.result(next(position), out) if is_value else out
            for out, is_value in zip(
                self.captured.outputs, self.captured.output_is_value, strict=True
            )
        ]

    def reference(self, *inputs: Any) -> list[Any]:
        """The same on plain operators, without schedule; inputs are those of the plan's graph."""
        memory = BufferValues(self.plan, self.captured.graph, inputs)
        for launch in self.plan.instructions:
            if isinstance(launch, Launch):
                self._run_plain(launch, memory)
        return self.flat_outputs(memory)

    def _run_plain(self, launch: Launch, memory: BufferValues) -> None:
        beside = [memory.values[v] for v in self._beside(launch.region)]
        outs = self.functions[launch.region](*[memory[b] for b in launch.ins], *beside)
        memory.write(launch, dict(zip(self.pg.regions[launch.region].outputs, outs, strict=True)))

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
        merged = self.captured.merged
        once = [f"operators that others repeat run once: {merged} were left out"] if merged else []
        unused = capture.marks_inside(self.captured)
        return [*self.pg.notes, *once, *self.plan.notes, *self.notes, *unused, *kernels]
