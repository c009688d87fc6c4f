"""One captured graph of a scheduled module or function: partitioned, planned, runnable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynaflow_xla.errors import PlanError, UnsupportedError
from dynaflow_xla.frontends.torch import compilers, cuda, native, regions
from dynaflow_xla.frontends.torch.capture import Captured, capture
from dynaflow_xla.frontends.torch.native import Native
from dynaflow_xla.ir import PartitionedGraph
from dynaflow_xla.kernels import Lanes
from dynaflow_xla.lower_plan import build_plan
from dynaflow_xla.partition import partition
from dynaflow_xla.plan import Plan
from dynaflow_xla.recording import Recording
from dynaflow_xla.rules import Rule
from dynaflow_xla.strategies.base import Context, Strategy, record, sizes_of
from dynaflow_xla.validate import validate

CAPTURE_OPTIONS = frozenset({"dynamic", "fullgraph"})
"""Compiler options that go to ``torch.compile``."""


@dataclass(frozen=True)
class Options:
    """What the user asked ``schedule`` for."""

    name: str
    strategy: Strategy
    rules: tuple[Rule, ...] | None
    lanes: int
    user: dict[str, Any] = field(default_factory=dict)
    compiler: str = "eager"
    compiler_options: dict[str, Any] | None = None
    backend: str = "torch"
    target: str | None = None
    gpu: Lanes | None = None


@dataclass
class Entry:
    """A planned graph.

    Attributes:
        kind: "inference", "forward" or "backward".
        captured: Graph with payloads.
        pg: Its regions.
        plan: The validated plan.
        implementations: Functions of regions that do not run operator by operator.
        native: The runnable plan.
        runner: On CUDA what runs it on streams, or as CUDA graphs.
        seconds: Time spent by step: "partition", "plan", "compile".
    """

    options: Options
    kind: str
    captured: Captured
    pg: PartitionedGraph
    plan: Plan
    implementations: dict[int, Callable[..., Sequence[Any]]]
    native: Native
    seconds: dict[str, float]
    backward: Entry | None = None
    runner: Any = None

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Flat inputs to flat outputs; a list of inputs is emptied."""
        return (self.native if self.runner is None else self.runner)(inputs)  # type: ignore[no-any-return]

    def describe(self) -> list[str]:
        """Lines of ``explain`` behind the table of regions."""
        steps = sum(len(stage.order) for stage, _ in self.native.stages)
        return [
            f"lanes {self.plan.lanes}, events {self.plan.events}, Python steps a call {steps}; "
            "tensors cross lanes by reference, nothing is copied",
            *(f"note: {note}" for note in self.captured.notes),
        ]

    def stamped(self) -> Native:
        """A form for ``profile``: its ``run`` measures the regions one by one, without fused steps."""
        return native.build(
            self.captured, self.pg, self.plan, self.implementations, fuse=False, always=True
        )


def build_entry(gm: Any, options: Options, kind: str, number: int) -> Any:
    """Captures, partitions, plans, validates and compiles a functional aten graph.

    Raises:
        RuleError, PlanError, UnsupportedError: see the steps.
    """
    name = options.name if number == 0 else f"{options.name}.{number}"
    if kind == "backward":
        name += ".backward"
    if options.backend != "torch":
        if options.gpu is not None:
            raise UnsupportedError(
                f"{options.gpu} asks for priorities or multiprocessors, which lanes of XLA executables "
                "have not; give lanes= a number, or use backend='torch'"
            )
        # JAX is optional, and only these backends need it.
        from dynaflow_xla.frontends.torch import xla_backend

        return xla_backend.build_entry(gm, options, kind, name)
    t0 = time.perf_counter()
    captured = capture(gm, name)
    graph = captured.graph
    rules: Sequence[Rule] | None = options.rules
    if rules is None:
        rules = options.strategy.rules(graph)
    if rules is not None and kind == "backward":
        # The backward has other operators than the forward for which the rules were written.
        rules = [rule for rule in rules if not isinstance(rule, Rule) or rule.groups(graph)]
    pg = partition(graph, rules)
    t1 = time.perf_counter()
    context = Context(
        batch_size=None,
        shapes=tuple(graph.values[v].shape for v in graph.inputs),
        platform=captured.device.type,
        lanes=options.lanes,
        user=options.user,
    )
    sizes_of(options.strategy, context)  # there is no batch here: refuses a split
    recording = record(options.strategy, pg, context)
    plan = build_plan(pg, recording, lanes=options.lanes, strategy_text=repr(options.strategy))
    validate(plan, pg)
    t2 = time.perf_counter()
    implementations = _implementations(captured, pg, recording, options)
    runnable = native.build(captured, pg, plan, implementations)
    runner: Any = None
    if captured.device.type == "cuda":
        runner = cuda.on_cuda(
            runnable, captured.device, graph=kind == "inference", lanes=options.gpu
        )
    elif options.gpu is not None:
        raise UnsupportedError(
            f"{options.gpu} asks for priorities or multiprocessors, which lanes of a CPU have not; give "
            "lanes= a number"
        )
    seconds = {"partition": t1 - t0, "plan": t2 - t1, "compile": time.perf_counter() - t2}
    return Entry(
        options, kind, captured, pg, plan, implementations, runnable, seconds, runner=runner
    )


def _implementations(
    captured: Captured, pg: PartitionedGraph, recording: Recording, options: Options
) -> dict[int, Callable[..., Sequence[Any]]]:
    made: dict[int, Callable[..., Sequence[Any]]] = {}
    for decision in recording.decisions:
        region = pg.regions[decision.region]
        if decision.replace is None:
            continue
        if region.outer:
            raise PlanError(
                f"region {region.name!r} stays in the outer program and cannot be replaced"
            )
        made[region.id] = regions.replacement(
            decision.replace, captured, region, str(decision.source)
        )
    if options.compiler != "eager":
        lanes = {d.lane for d in recording.decisions if d.lane >= 0}
        compilers.compile_regions(
            captured, pg, len(lanes), made, options.compiler, options.compiler_options
        )
    return made
