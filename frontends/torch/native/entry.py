"""One captured graph of a scheduled module or function: partitioned, planned, runnable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from dynaflow_xla.frontends.torch._compat.modes import with_data
from dynaflow_xla.frontends.torch.capture import context as contexts
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.native import first_run, native
from dynaflow_xla.frontends.torch.native.compiling.compilers import Compiler
from dynaflow_xla.frontends.torch.native.cuda.graphs import GraphedPlan, on_cuda
from dynaflow_xla.frontends.torch.native.native import Native
from dynaflow_xla.frontends.torch.native.stretches import regions
from dynaflow_xla.ir.graph import ORDERED
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.ir.phases import ONE_PHASE, Phases
from dynaflow_xla.ir.rules import Rule, as_rules
from dynaflow_xla.kernels import Lanes
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.instructions import Launch
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.planning.recording import Decision, Recording
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.settings import Settings
from dynaflow_xla.strategies.base import record, sizes_of
from dynaflow_xla.strategies.sequential import Sequential

_PLANNED = ("captured", "pg", "plan", "implementations", "native", "runner", "compiler")
"""What of an entry another plan of its graph changes."""


@dataclass
class NativeEntry:
    """A planned graph that runs as PyTorch's own operators; ``backend.Entry`` tells what any has.

    Attributes:
        captured: Graph with payloads.
        implementations: Functions of regions that run neither operator by operator nor compiled.
        native: The runnable plan.
        runner: On CUDA what runs it on streams, or as CUDA graphs.
        compiler: Makes programs of its operators, if there is one.
        watched_first: Plans it anew, if the first call has to tell in which order operators may run.
    """

    options: Settings
    kind: str
    captured: Captured
    pg: PartitionedGraph
    plan: Plan
    implementations: dict[int, Callable[..., Sequence[Any]]]
    native: Native
    seconds: dict[str, float]
    backward: NativeEntry | None = None
    runner: Any = None
    later: Callable[[], NativeEntry | None] | None = None
    prepare: Callable[[Sequence[Any]], list[Any]] | None = None
    finish: Callable[[list[Any]], list[Any]] | None = None
    notes: tuple[str, ...] = ()
    compiler: Compiler | None = None
    watched_first: Callable[[], NativeEntry] | None = None

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Flat inputs to flat outputs; a list of inputs is emptied."""
        if self.prepare is not None:
            inputs = self.prepare(inputs)
        if self.watched_first is not None:
            results = self._first(inputs, self.watched_first)
            return results if self.finish is None else self.finish(results)
        results = (self.native if self.runner is None else self.runner)(inputs)
        return results if self.finish is None else self.finish(results)  # type: ignore[no-any-return]

    def _first(self, inputs: Sequence[Any], planned: Callable[[], NativeEntry]) -> list[Any]:
        """A call that finds out whether operators of the user's draw, and orders those that do."""
        results, news = first_run.run(self.captured, self.native.memory, inputs)
        self.watched_first = None
        if news:
            made = planned()
            for name in _PLANNED:
                setattr(self, name, getattr(made, name))
        return results

    @property
    def program_ns(self) -> float:
        """PyTorch hands no program to other threads."""
        return 0.0

    @property
    def caller_ns(self) -> float:
        """So there is no way around that."""
        return 0.0

    @property
    def streams(self) -> bool:
        """Whether it computes on an accelerator, whose lanes have no cores."""
        return self.captured.device.type != "cpu"

    @property
    def graphed(self) -> bool:
        """Whether calls are replays of one CUDA graph, which costs the host one launch."""
        return isinstance(self.runner, GraphedPlan)

    def release(self) -> None:
        """Gives the memory of graphs back; later calls make them anew."""
        if self.graphed:
            self.runner.release()

    @property
    def on_streams(self) -> bool:
        """Whether lanes are streams, which copy nothing for each other: see ``simulator.ON_STREAMS``."""
        return self.streams

    @cached_property
    def is_original(self) -> bool:
        """Whether it does what the original does: operator by operator in program order, on all cores."""
        plan = self.plan
        others = self.runner, self.compiler, self.prepare, self.finish
        if any(x is not None for x in others) or self.implementations or plan.replaces:
            return False
        if plan.lanes_used or not plan.cores or len(plan.launches) != len(plan.instructions):
            return False
        order = [i.region for i in plan.launches]
        return order == sorted(set(order))  # the program's order, as far as regions have one

    @property
    def without_python(self) -> int:
        """How many operators run without Python between them."""
        return sum(s.interpreted + s.compiled for s in self.native.stretches())

    def describe(self) -> list[str]:
        """Lines of ``explain`` behind the table of regions."""
        steps = sum(len(stage.order) for stage, _ in self.native.stages)
        operators = sum(s.operators for s in self.native.stretches())
        programs = [p for s in self.native.stretches() for p in s.programs]
        compiled = sum(s.compiled for s in self.native.stretches())
        told = []
        if self.is_original:
            told = ["this is the original program: all calls but the first run the original itself"]
            if self.kind == "forward" and self.plan.strategy != repr(Sequential()):
                told[0] += ", once the backward was planned, too"
        if self.compiler is not None:
            told = [
                f"{compiled} of {operators} operators are compiled by {self.compiler.name}, as "
                f"{len(programs)} programs ({len(set(map(id, programs)))} different); the others run "
                "operator by operator"
            ]
        return [
            f"lanes {self.plan.lanes}, events {self.plan.events}, Python steps a call {steps}; "
            "tensors cross lanes by reference, nothing is copied",
            f"{self.without_python} of {operators} operators run without Python between them",
            *told,
            *(self.runner.told() if self.graphed else ()),
            *(f"note: {note}" for note in (*self.captured.notes, *self.notes)),
        ]

    def stamped(self) -> Native:
        """A form for ``profile``: its ``run`` measures the regions one by one, without fused steps."""
        return native.build(
            self.captured, self.pg, self.plan, self.implementations, fuse=False, always=True,
            compiler=self.compiler,
        )  # fmt: skip

    def one_by_one(self, wide: bool) -> Native:
        """As ``stamped``, with the regions one after another: on one lane of one core, or on all cores."""
        order = [i.region for i in self.plan.instructions if isinstance(i, Launch)]
        decisions = tuple(
            Decision(region, -1 if wide or self.pg.regions[region].outer else 0) for region in order
        )
        plan = build_plan(
            self.pg, Recording(decisions), lanes=1, strategy_text=self.plan.strategy,
            cores=self.plan.cores, counted=False,
        )  # fmt: skip
        validate(plan, self.pg)
        return native.build(
            self.captured, self.pg, plan, self.implementations, fuse=False, always=True,
            compiler=self.compiler,
        )  # fmt: skip


def cut(captured: Captured, options: Settings, phases: Phases = ONE_PHASE) -> PartitionedGraph:
    """The regions of a graph by the user's rules, the strategy's, or the default ones."""
    graph = captured.graph
    rules: Sequence[Rule] | None = options.rules
    if rules is None:
        with with_data():  # what the user's code computes is no part of the capture
            made = options.strategy.rules(graph)
        rules = None if made is None else as_rules(made, f"rules of strategy {options.strategy!r}")
    return _with_network(partition(graph, rules, phases=phases))


def _with_network(pg: PartitionedGraph) -> PartitionedGraph:
    """Collectives as regions with a lane, which waits for them while other lanes go on.

    They keep their program order, which is the same in every process: else each could wait for another.
    """
    regions = tuple(
        replace(r, outer=False, tags=(r.tags - {"outer"}) | {ORDERED})
        if r.outer and r.resource == "network"
        else r
        for r in pg.regions
    )
    return replace(pg, regions=regions)


def whole_entry(
    captured: Captured, options: Settings, kind: str, batch: int | None = None
) -> NativeEntry:
    """Plans a graph whose batch stays whole.

    Raises:
        PlanError: the strategy asks for a split.
    """
    t0 = time.perf_counter()
    captured = first_run.ordered(captured)
    pg = cut(captured, options)
    t1 = time.perf_counter()
    context = contexts.context_of(captured, options, batch, kind)
    with with_data():
        if batch is None:
            sizes_of(options.strategy, context)  # there is no batch here: refuses a split
        recording = record(options.strategy, pg, context)
    made = planned_entry(captured, pg, recording, options, kind, t1 - t0, cores=context.cores)
    if len(made.plan.lanes_used) > 1 and first_run.to_be_watched(captured):
        made.watched_first = partial(whole_entry, captured, options, kind, batch)
    return made


def planned_entry(
    captured: Captured,
    pg: PartitionedGraph,
    recording: Recording,
    options: Settings,
    kind: str,
    partition_s: float,
    functions: dict[int, Callable[..., Sequence[Any]]] | None = None,
    *,
    cores: int,
) -> NativeEntry:
    """Makes the plan of a recording and what runs it.

    Args:
        captured: The graph.
        pg: Its regions.
        recording: What the strategy decided.
        options: What the user asked for.
        kind: "inference", "forward" or "backward".
        partition_s: Seconds spent on the regions.
        functions: Of regions that do not run operator by operator, replacements among them;
            default: those of the recording's replacements.
        cores: Of wide launches; 0: there are none.
    """
    t1 = time.perf_counter()
    plan = build_plan(
        pg, recording, lanes=options.lanes_on(captured.device.type == "cuda"),
        strategy_text=repr(options.strategy), cores=cores,
        width=contexts.lane_cores(captured.device, options),
    )  # fmt: skip
    validate(plan, pg)
    t2 = time.perf_counter()
    made = _replacements(captured, pg, recording) if functions is None else functions
    compiler = None
    if options.compiler != "eager":
        several = len(plan.lanes_used) > 1
        compiler = Compiler(
            captured, pg, several, options.compiler, options.compiler_options,
            backward=kind == "backward",
        )  # fmt: skip
    runnable = native.build(captured, pg, plan, made, compiler=compiler)
    runner: Any = None
    if captured.device.type == "cuda":
        runner = on_cuda(
            runnable, captured.device, graph=kind == "inference", lanes=_own(options.gpu)
        )
    elif options.gpu is not None:
        options.gpu.refuse_on_cpu()
    seconds = {"partition": partition_s, "plan": t2 - t1, "compile": time.perf_counter() - t2}
    return NativeEntry(
        options, kind, captured, pg, plan, made, runnable, seconds, runner=runner, compiler=compiler
    )


def _own(lanes: Lanes | None) -> Lanes | None:
    """Lanes whose streams cannot be PyTorch's."""
    return lanes if lanes is not None and lanes.special else None


def _replacements(
    captured: Captured, pg: PartitionedGraph, recording: Recording
) -> dict[int, Callable[..., Sequence[Any]]]:
    made: dict[int, Callable[..., Sequence[Any]]] = {}
    for decision in recording.decisions:
        region = pg.regions[decision.region]
        if decision.replace is None:
            continue
        made[region.id] = regions.replacement(
            decision.replace, captured, region, str(decision.source)
        )
    return made
