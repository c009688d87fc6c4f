"""A planned torch graph that runs on XLA, as lane programs or one program.

The functional aten graph becomes a jaxpr (``to_jax``) and takes the path of a JAX function from
there. With ``ffi`` the engine runs it on the tensors' own memory: arguments are read where they lie,
results are written into tensors that PyTorch allocated. Other programs get tensors through DLPack.
Everything is traced and compiled with 64-bit types enabled, so none is narrowed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import torch
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.ffi import xla
from dynaflow_xla.frontends.jax.capture import capture as jax_capture, provenance
from dynaflow_xla.frontends.jax.capture.tracing import Capturing
from dynaflow_xla.frontends.jax.lanes.entry import build_stages
from dynaflow_xla.frontends.jax.signature import entry as jax_entry
from dynaflow_xla.frontends.jax.xla.xla_backend import XlaEntry as XlaPlan
from dynaflow_xla.frontends.torch._compat.modes import FakeTensorMode, with_data
from dynaflow_xla.frontends.torch.capture.capture import CAPTURE_OPTIONS, capture
from dynaflow_xla.frontends.torch.capture.captured import Captured
from dynaflow_xla.frontends.torch.capture.for_sizes import ForSizes, boxed
from dynaflow_xla.frontends.torch.on_xla import aten_table, to_jax
from dynaflow_xla.frontends.torch.on_xla.engine_call import EngineCall
from dynaflow_xla.frontends.torch.on_xla.result_places import ResultPlace, result_places
from dynaflow_xla.frontends.torch.on_xla.to_jax import DimensionOrder, JaxFunction
from dynaflow_xla.frontends.torch.rewrite import recurrent as _recurrent  # noqa: F401
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.planning.plan import Plan
from dynaflow_xla.settings import Settings

aten_table.register_recurrent(torch.ops.dynaflow_xla)  # defined by ``recurrent``


class Way(Protocol):
    """What differs between lane programs and one program; see ``OnXla``."""

    settings: Settings

    def refuse(self, captured: Captured) -> None:
        """Raises UnsupportedError for a graph that it cannot run."""

    def jax_settings(self) -> dict[str, Any]:
        """What the JAX frontend's settings say of the backend."""


def _in_memory(tensor: torch.Tensor, layout: DimensionOrder) -> torch.Tensor:
    """The contiguous tensor over the same memory, or a copy if there is none."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return (tensor if layout.plain else tensor.permute(layout.order)).contiguous()


@dataclass
class JaxProgram:
    """A graph with fixed sizes, planned and compiled.

    Attributes:
        function: The graph as a JAX function.
        call: The planned entry of the JAX frontend, callable with tensors.
        shares: Number of a tensor that each nano-batch gets a share of -> the shares.
        places: Position of a result -> where it lies in memory.
        copied: How many argument tensors had to be copied in the last call, for ``explain``.
    """

    function: JaxFunction
    call: EngineCall
    shares: Mapping[int, Sequence[float]] = field(default_factory=dict)
    places: Mapping[int, ResultPlace] = field(default_factory=dict)
    copied: int = 0

    def __call__(self, inputs: Sequence[Any], run: Any = None) -> list[Any]:
        """Flat inputs of the torch graph to its flat outputs.

        Args:
            inputs: Tensors, and numbers where the graph takes sizes.
            run: What to do with contiguous tensors in place of ``call``.
        """
        function = self.function
        captured = function.captured
        arrays = [inputs[i] for i in function.tensors]
        arrays += [x for draw in function.draws for x in draw.make()]
        given = [_in_memory(x, la) for x, la in zip(arrays, function.layouts, strict=True)]
        self.copied = sum(a.data_ptr() != b.data_ptr() for a, b in zip(arrays, given, strict=True))
        if self.shares:
            given = [
                x if share is None else x * share
                for n, x in enumerate(given)
                for share in self.shares.get(n, (None,))
            ]
        physical = (run or self.call)(given)
        results = {
            v: x if layout.plain else x.permute(layout.inverse)
            for v, x, layout in zip(
                function.results, physical, function.result_layouts, strict=True
            )
        }
        env = dict(zip(captured.graph.inputs, inputs, strict=True))
        env.update(function.constants)
        env.update(results)
        for written, value in captured.epilogue:
            env[written].copy_(env[value])
        made = [out[1] if isinstance(out, tuple) else env[out] for out in captured.outputs]
        for position, place in self.places.items():
            made[position] = place.put(made[position], inputs)
        return made


@dataclass
class XlaEntry:
    """A planned torch graph that runs on XLA; same surface as the ``NativeEntry``.

    Attributes:
        kind: "inference", "forward" or "backward".
        program: The program of the sizes at capture.
        prepare: From the inputs of a call to those of the program, if they are others.
        finish: From the results of the program to those of a call, if they are others.
        notes: Lines for ``explain``.
        later: Makes the plan of the backward when asked for.
        seconds: Time spent by step: "partition", "plan", "compile".
    """

    way: Way
    kind: str
    gm: Any
    name: str
    program: JaxProgram
    seconds: dict[str, float]
    backward: Any = None
    symbolic: bool = False
    programs: ForSizes[JaxProgram] = field(default_factory=ForSizes)
    warn: Callable[[str], None] | None = None
    prepare: Callable[[Sequence[Any]], list[Any]] | None = None
    later: Callable[[], Any] | None = None
    finish: Callable[[list[Any]], list[Any]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def options(self) -> Settings:
        """What the user asked for."""
        return self.way.settings

    @property
    def captured(self) -> Any:
        """The jaxpr's graph."""
        return self.program.call.made.captured

    @property
    def program_ns(self) -> float:
        """What the framework takes if any region is wide, see ``strategies.base.Context``."""
        return self.program.call.made.program_ns  # type: ignore[no-any-return]

    @property
    def caller_ns(self) -> float:
        """What one lane may take to run on the thread that calls, see ``strategies.base.Context``."""
        return self.program.call.made.caller_ns  # type: ignore[no-any-return]

    @property
    def streams(self) -> bool:
        """Whether it computes on an accelerator, whose lanes have no cores."""
        return self.program.call.made.streams

    graphed = False

    def release(self) -> None:
        """There is nothing: XLA has the memory."""

    @property
    def pg(self) -> PartitionedGraph:
        """Its regions."""
        return self.program.call.made.pg  # type: ignore[no-any-return]

    @property
    def plan(self) -> Plan:
        """The validated plan."""
        return self.program.call.made.plan  # type: ignore[no-any-return]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Flat inputs to flat outputs; a list of inputs is emptied."""
        xla.check_process()
        if self.prepare is not None:
            inputs = self.prepare(inputs)
        given = boxed(inputs)
        results = (self.program_for(given) or self._as_captured)(given)
        return results if self.finish is None else self.finish(results)

    def program_for(self, inputs: Sequence[Any]) -> JaxProgram | None:
        """The program for these sizes: one, or where sizes may change one for each of some."""
        if not self.symbolic:
            return self.program

        def make() -> JaxProgram:
            gm = specialised(self.gm, inputs)
            return build_program(capture(gm, self.name), self.way, self.kind)

        return self.programs.get(_sizes(inputs), make)

    def _as_captured(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the graph in PyTorch, for sizes that came once only."""
        warn, self.warn = self.warn, None
        if warn is not None:
            warn(
                f"{self.name!r} has come in many sizes, and XLA compiles for fixed ones: "
                f"{self.programs.describe('programs are compiled')}"
            )
        with torch.no_grad():
            return list(self.gm(*inputs))

    @property
    def without_python(self) -> int:
        """How many of PyTorch's operators run without Python between them."""
        return 0

    def describe(self) -> list[str]:
        """Lines of ``explain`` behind the table of regions."""
        made = self.program.call.made
        if isinstance(made, XlaPlan):
            return [f"one XLA program; {made.summary()}", *self._notes()]
        stages = [stage for stage, _ in made.stages if stage is not None]
        lines = [
            f"lanes {self.plan.lanes}, events {self.plan.events}; arguments are read in place, "
            f"results written into their tensors; tensors made contiguous for the last call: "
            f"{self.program.copied}"
        ]
        copied = sum(p.copied_views for s in stages for p in s.lane_programs)
        if copied:
            lines.append(
                f"note: {copied} inputs do not begin at a multiple of 64 bytes and are copied at each "
                "call (weights of a mapped file: parameter.data = parameter.data.clone())"
            )
        return lines + self._notes()

    def _notes(self) -> list[str]:
        lines = []
        if self.program.function.draws:
            lines.append(
                f"note: {len(self.program.function.draws)} random operators are drawn by PyTorch "
                "before the program runs"
            )
        if self.symbolic:
            lines.append(f"note: {self.programs.describe('programs are compiled')}")
        return lines

    def stamped(self) -> Stamped:
        """The same with time stamps, for ``profile``."""
        return Stamped(self)


class Stamped:
    """A program with time stamps at region ends."""

    def __init__(self, entry: XlaEntry) -> None:
        made = entry.program.call.made
        if not made.stages:
            raise UnsupportedError(
                "profile needs backend='ffi' or 'torch': one XLA program has no lanes of its own"
            )
        with jax.enable_x64(True):
            stages = build_stages(made, profile=True)
        self.entry, self.stage = entry, stages[0][0]

    def run(self, inputs: Sequence[Any], measured: Any) -> list[Any]:
        """As a call; adds what was measured."""
        program = self.entry.program
        records: list[Any] = []
        outs = program(inputs, lambda given: program.call.run_stage(self.stage, given, records))
        measured.add_stage(self.entry.plan.instructions, records[-1])
        return outs


def _sizes(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        (tuple(map(_hint, x.shape)), tuple(map(_hint, x.stride())))
        if isinstance(x, torch.Tensor)
        else _hint(x)
        if isinstance(x, torch.SymInt)
        else x
        for x in inputs
    )


def _hint(n: Any) -> int:
    return int(n.node.hint) if isinstance(n, torch.SymInt) else int(n)


class _Numbers(FakeTensorProp):
    """Notes numbers beside tensors, which ``FakeTensorProp`` leaves out before torch 2.13."""

    def run_node(self, n: Any) -> Any:
        result = super().run_node(n)
        if isinstance(result, int | float):
            n.meta.setdefault("val", result)
        return result


def specialised(gm: Any, inputs: Sequence[Any]) -> Any:
    """The graph for the sizes of ``inputs``: tensors, or numbers where the graph takes sizes."""
    made = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node, original in zip(made.graph.nodes, gm.graph.nodes, strict=True):
        node.meta = {k: v for k, v in original.meta.items() if k not in ("val", "tensor_meta")}
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # constants of the graph

    def fake(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            sizes, strides = [_hint(n) for n in x.shape], [_hint(n) for n in x.stride()]
            with mode:
                return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)
        return _hint(x) if isinstance(x, int | torch.SymInt) else x

    _Numbers(made, mode).propagate_dont_convert_inputs(*[fake(x) for x in inputs])
    return made


def build_entry(gm: Any, way: Way, kind: str, name: str, batched: Any = None) -> XlaEntry:
    """Captures, partitions, plans, validates and compiles a functional aten graph for XLA.

    ``batched``: see ``program_of``.

    Raises:
        UnsupportedError: an operator has no lowering; a tensor is on another device.
    """
    examples = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    symbolic = any(
        isinstance(x, torch.SymInt)
        or (isinstance(x, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in x.shape))
        for x in examples
    )
    program = build_program(
        capture(specialised(gm, examples) if symbolic else gm, name), way, kind, batched
    )
    seconds = program.call.made.seconds
    entry = XlaEntry(way, kind, gm, name, program, seconds, symbolic=symbolic)
    if symbolic:
        entry.programs.get(_sizes(examples), lambda: program)
    return entry


def build_program(captured: Captured, way: Way, kind: str, batched: Any = None) -> JaxProgram:
    """Traces, plans and compiles a graph with fixed sizes; ``batched``: see ``program_of``."""
    return program_of(to_jax.jax_function(captured), way, kind, batched=batched)


def traced(function: JaxFunction) -> tuple[Any, Any]:
    """The function as a closed jaxpr, and as the JAX frontend's graph."""
    graph = function.captured.graph
    with jax.enable_x64(True), matmul_precision():
        with Capturing():
            closed = jax.make_jaxpr(function)(*function.specs())
        made = provenance.settle(jax_capture.capture(closed, 0, graph.name), graph.ops)
        return closed, replace(made, graph=replace(made.graph, part=graph.part))


def program_of(
    function: JaxFunction,
    way: Way,
    kind: str,
    trace: tuple[Any, Any] | None = None,
    batched: Any = None,
    shares: Mapping[int, Sequence[float]] | None = None,
) -> JaxProgram:
    """Traces, plans and compiles a function.

    Args:
        function: A graph with fixed sizes.
        way: As lane programs, or as one.
        kind: "inference", "forward" or "backward".
        trace: What ``traced`` made of it, if that is there.
        batched: What is needed to split it, or its number of rows; see ``frontends.jax.split``.
        shares: See ``JaxProgram``.
    """
    captured = function.captured
    way.refuse(captured)
    t0 = time.perf_counter()
    closed, found = traced(function) if trace is None else trace
    with jax.enable_x64(True), matmul_precision():
        options = jax_options(way, captured.graph.name)
        with with_data():  # the strategy's own tensors are no part of the capture
            made = jax_entry.build_entry(found, options, batched, derived=kind != "inference")
    made.seconds["trace"] = time.perf_counter() - t0 - sum(made.seconds.values())
    consts = closed.consts if made.split is None else made.split.inputs(closed.consts)
    results = [(layout.physical, layout.dtype) for layout in function.result_layouts]
    places = {} if kind == "backward" else result_places(function)
    return JaxProgram(function, EngineCall(made, consts, results), shares or {}, places)


def matmul_precision() -> Any:
    """Context in which products of float32 have the digits that PyTorch is set to."""
    wanted = torch.get_float32_matmul_precision()
    return jax.default_matmul_precision(wanted if wanted in ("highest", "high") else "default")


def jax_options(way: Way, name: str) -> Settings:
    """The JAX frontend's options for a graph of that name."""
    options = way.settings
    made: dict[str, Any] = {
        "name": name,
        "strategy": options.strategy,
        "rules": options.rules,
        "lanes": options.lanes,
        "user": options.user,
        "compiler_options": {
            k: v for k, v in (options.compiler_options or {}).items() if k not in CAPTURE_OPTIONS
        }
        or None,
    }
    return Settings(**made, **way.jax_settings())
