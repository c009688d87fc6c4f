"""One signature of a scheduled function: captured, partitioned, planned, lowered, callable."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from dynaflow_xla import progress
from dynaflow_xla.errors import PlanError, UnsupportedError
from dynaflow_xla.ffi import _engine, blas, xla
from dynaflow_xla.frontends.jax.batch import split as splitting
from dynaflow_xla.frontends.jax.capture import capture, in_place
from dynaflow_xla.frontends.jax.capture.physical import from_physical, to_physical
from dynaflow_xla.frontends.jax.lanes import device_stage, lower, stage_primitive
from dynaflow_xla.frontends.jax.signature.planned import Planned
from dynaflow_xla.frontends.jax.xla import gate_placement, loops, xla_backend
from dynaflow_xla.ir.graph import PartitionedGraph
from dynaflow_xla.ir.partition import partition
from dynaflow_xla.ir.rules import as_rules
from dynaflow_xla.kernels import CudaKernel, Lanes
from dynaflow_xla.planning.build import build_plan
from dynaflow_xla.planning.plan import Launch, Plan
from dynaflow_xla.planning.validate import validate
from dynaflow_xla.strategies.base import Context, Strategy, record, sizes_of
from dynaflow_xla.strategies.branches import Branches

_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})


_state = threading.local()


def capturing() -> bool:
    """Whether this thread is inside the capture of a scheduled function (nested ones then inline)."""
    return bool(_engine.capturing())


class _Capturing:
    def __enter__(self) -> None:
        _engine.enter_capture()

    def __exit__(self, *_: object) -> None:
        _engine.leave_capture()


def capturing_inside() -> _Capturing:
    """A block in which scheduled functions are their originals."""
    return _Capturing()


@contextlib.contextmanager
def tracing_afresh() -> Iterator[None]:
    """A block in which scheduled functions are traced at each call, whatever JAX has of them already."""
    before = getattr(_state, "afresh", None)
    _engine.enter_capture()
    _state.afresh = _engine.capture_depth()
    try:
        yield
    finally:
        _engine.leave_capture()
        _state.afresh = before


def afresh() -> bool:
    """Whether this call is one of those, and not inside a capture."""
    at = getattr(_state, "afresh", None)
    return at is not None and at == _engine.capture_depth()


@dataclass(frozen=True)
class Options:
    """What the user asked ``schedule`` for, as far as one entry needs it."""

    name: str
    strategy: Strategy
    rules: tuple[Any, ...] | None
    lanes: int
    user: Any = field(default_factory=dict, hash=False, compare=False)
    in_axes: Any = None
    out_axes: Any = 0
    batch_size: int | None = None
    compiler_options: dict[str, Any] | None = field(default=None, hash=False, compare=False)
    default_cut: bool = False
    backend: str = "ffi"
    target: str | None = None
    gpu_lanes: bool = False
    gpu: Lanes | None = None


@dataclass(kw_only=True)
class Entry(Planned):
    """A planned signature of the backend ``ffi``.

    Attributes:
        compiled: ``stages`` if they were needed already, else empty.
    """

    _stages: list[tuple[lower.Stage | None, Launch | None]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def compiled(self) -> list[tuple[lower.Stage | None, Launch | None]]:
        """``stages`` if they were needed already, else empty."""
        return self._stages or []

    @property
    def stages(self) -> list[tuple[lower.Stage | None, Launch | None]]:
        """Stages with the outer launch that follows each; compiled when first needed."""
        with self._lock:
            if self._stages is None:
                t0 = time.perf_counter()
                xla.ensure_registered()
                lanes = len({i.lane for i in self.plan.instructions if isinstance(i, Launch)})
                with progress.report(f"compiling {self.options.name!r}: {lanes} lane programs"):
                    self._stages = build_stages(
                        self.captured, self.pg, self.plan, self.functions, self.options
                    )
                blas.register()  # lowering the first program that needs LAPACK has loaded it
                self.seconds["compile"] = time.perf_counter() - t0
            return self._stages

    def __call__(self, *inputs: Any) -> list[Any]:
        """Evaluates on flat inputs of the function (closed-over values first); returns flat outputs."""
        captured = self.captured
        env = self.bind(inputs)
        for stage, outer in self.stages:
            if stage is not None:
                args = [env[v] for v in stage.inputs]
                physical = [
                    to_physical(x, captured.avals[v])
                    for v, x in zip(stage.inputs, args, strict=True)
                ]
                results = stage_primitive.bind(stage, physical)
                for value, x in zip(stage.outputs, results, strict=True):
                    env[value] = from_physical(x, captured.avals[value])
            if outer is not None:
                self._run_plain(outer, env)
        return self.flat_outputs(env)


def capture_function(
    fn: Callable[..., Any], specs: Sequence[Any], n_consts: int, name: str
) -> capture.Captured:
    """Traces a flat function over flat values and captures it, with the constants that it meets."""
    with _Capturing():
        closed = jax.make_jaxpr(fn)(*specs)
    return replace(capture.capture(closed, n_consts, name), consts=tuple(closed.consts))


def build_entry(
    captured: capture.Captured,
    options: Options,
    batched: splitting.Splitting | None = None,
) -> Entry | xla_backend.XlaEntry:
    """Partitions, plans and validates a captured function; it is compiled when it first runs.

    Args:
        captured: The function at its full size.
        options: What the user asked for.
        batched: The same function with what is needed to split it, if it has a batch.
    """
    with _types(captured):
        return _build(captured, options, batched)


def _types(captured: capture.Captured) -> Any:
    """Context in which 64-bit values keep their type, whatever the caller's setting."""
    wide = any(getattr(a.dtype, "name", "") in _WIDE for a in captured.avals)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def _build(
    captured: capture.Captured, options: Options, batched: splitting.Splitting | None
) -> Entry | xla_backend.XlaEntry:
    t0 = time.perf_counter()
    strategy = options.strategy
    graph = captured.graph
    if options.backend == "ffi":
        _refuse_shard_map(captured)
    rules = options.rules
    if rules is None and not options.default_cut:
        made = strategy.rules(graph)
        rules = None if made is None else as_rules(made)
    if options.backend == "xla" and rules is not None:
        rules = loops.rules_here(rules, captured)
    context = Context(
        batch_size=None if batched is None else batched.batch,
        shapes=tuple(graph.values[v].shape for v in graph.inputs),
        platform="cuda" if options.backend == "xla" else device_stage.platform(options.gpu_lanes),
        lanes=options.lanes,
        user=options.user,
    )
    fused = gate_placement.ELEMENTWISE if options.backend == "xla" else frozenset[str]()
    split = None
    sizes, assume_separable = () if batched is None else batched.sizes, True
    if not sizes:
        sizes, asked = sizes_of(strategy, context)
        assume_separable = asked.assume_separable
    if sizes and batched is not None:
        split = splitting.split(
            batched, sizes, rules, assume_separable=assume_separable, fused=fused
        )
        captured, pg = split.captured, split.pg
    else:
        if options.backend == "ffi":
            captured = in_place.kept_outside(captured)
        pg = partition(captured.graph, rules, fused=fused)
    if options.backend == "xla":
        pg = _with_network(pg)
        if split is not None:
            split = replace(split, expanded=replace(split.expanded, pg=pg))
    t1 = time.perf_counter()
    # Nothing is proved of residuals that several nano-batches would share.
    derived = batched is not None and bool(batched.sizes)
    recording = record(strategy, pg, context, joint=not derived)
    if split is not None:
        split, recording = split.grouped(recording)
        captured, pg = split.captured, split.pg
    plan = build_plan(pg, recording, lanes=options.lanes, strategy_text=repr(strategy))
    validate(plan, pg)
    t2 = time.perf_counter()
    if options.backend == "xla":
        parts = [captured] if split is None else list(split.resolved.at.values())
        for part in parts:
            loops.schedule_bodies(part, options, build_entry, keep_rules=split is not None)
    functions: dict[int, Callable[..., list[Any]]] = {}
    for decision in recording.decisions:
        region = pg.regions[decision.region]
        if region.outer and decision.replace is not None:
            raise PlanError(
                f"region {region.name!r} stays in the outer program and cannot be replaced"
            )
        if split is not None:
            functions[region.id] = split.function(region.id, decision)
        elif decision.replace is None:
            functions[region.id] = lower.region_function(captured, region)
        elif isinstance(decision.replace, CudaKernel):
            functions[region.id] = lower.kernel_function(
                decision.replace, captured, region, options.backend
            )
        else:
            functions[region.id] = lower.replaced_function(
                decision.replace, captured, region, str(decision.source)
            )
    if options.backend == "xla":
        seconds = {"partition": t1 - t0, "plan": t2 - t1}
        return xla_backend.build(
            options=options, captured=captured, pg=pg, plan=plan, functions=functions,
            seconds=seconds, split=split,
        )  # fmt: skip
    seconds = {"partition": t1 - t0, "plan": t2 - t1}
    return Entry(
        options=options, captured=captured, pg=pg, plan=plan, functions=functions,
        seconds=seconds, split=split,
    )  # fmt: skip


def _refuse_shard_map(captured: capture.Captured) -> None:
    for op in captured.graph.ops:
        if op.kind == "shard_map" and op.payload.params["mesh"].size > 1:
            raise UnsupportedError(
                f"shard_map at {op.source} inside the scheduled function {captured.graph.name!r}: lanes "
                "belong to one device. Schedule the function that shard_map maps, "
                "jax.shard_map(dfx.schedule(f), ...), or use backend='xla'."
            )


def _with_network(pg: PartitionedGraph) -> PartitionedGraph:
    """Communication as regions with a lane: one XLA program holds them as it does all others."""
    regions = tuple(
        replace(r, outer=False, tags=r.tags - {"outer"})
        if r.outer and r.resource == "network"
        else r
        for r in pg.regions
    )
    return replace(pg, regions=regions)


def build_stages(
    captured: capture.Captured,
    pg: PartitionedGraph,
    plan: Plan,
    functions: dict[int, Callable[..., list[Any]]],
    options: Options,
    *,
    profile: bool = False,
) -> list[tuple[lower.Stage | None, Launch | None]]:
    """Lowers and compiles every stage of a plan."""
    cut = lower.split_stages(plan)
    launched = [
        [i.region for i in instructions if isinstance(i, Launch)] for instructions, _ in cut
    ]
    stages: list[tuple[lower.Stage | None, Launch | None]] = []
    for number, (instructions, outer) in enumerate(cut):
        if not launched[number]:
            stages.append((None, outer))
            continue
        needed = set(captured.graph.outputs)
        later = [outer.region] if outer is not None else []
        for other, (_, other_outer) in zip(launched[number + 1 :], cut[number + 1 :], strict=True):
            later += other
            if other_outer is not None:
                later.append(other_outer.region)
        for region in later:
            needed.update(pg.regions[region].inputs)
        build = device_stage.builder(
            options.gpu_lanes,
            captured,
            pg,
            plan,
            instructions,
            functions,
            needed,
            options.compiler_options,
            gpu=options.gpu,
        )
        with _types(captured):
            stage = build(profile=profile)
        stage.replan = _replanner(options)
        stages.append((stage, outer))
    return stages


def _replanner(options: Options) -> Callable[..., list[Any]]:
    """For vmap: schedules the batched stage anew. User rules may not fit its graph: default cut."""

    def replan(fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
        captured = capture_function(fn, specs, 0, f"{options.name}.vmap")
        # The batch axes are others now, and nano-batches are in the stage already.
        strategy = Branches() if options.in_axes is not None else options.strategy
        settings = replace(options, rules=None, default_cut=True, in_axes=None, strategy=strategy)
        entry = build_entry(captured, settings)
        return entry(*captured.consts, *args)

    return replan
