"""How each peer of ``compare.py`` runs a model: every split of the cores, and its own sequential mode."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import torch
from common import environment, measure

import dynaflow_xla as dfx
from peers.models import Model, to_jax

CORES = environment.stamp()["cores"]
COMPILE_SECONDS = 60.0
"""Of a compiler in a process of its own."""


class NotPossible(Exception):
    """A peer has no such way for this model."""


def _tensor(x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    return torch.from_numpy(np.array(x[0] if isinstance(x, list | tuple) else x))


@dataclass(frozen=True)
class Way:
    """One way to run a model.

    Attributes:
        run: A call; it ends when the result is there.
        mode: ``sequential``: one operator after another, each on as many threads as it takes.
        threads: PyTorch's, while it is timed.
        value: What makes a tensor of what ``run`` returned.
    """

    run: Callable[[], Any]
    mode: Literal["sequential", "parallel"]
    threads: int = 1
    value: Callable[[Any], torch.Tensor] = _tensor


Ways = Iterator[tuple[str, Callable[[], Way]]]
"""Names, and what makes a way: each can fail by itself."""


# -- ours -----------------------------------------------------------------------------------------------


def ours_jax(model: Model) -> Ways:
    fn, args = model.jax_function()
    axes: dict[str, Any] = {}
    if model.rows:
        axes = {
            "in_axes": (None, *(0 if i in model.rows else None for i in range(len(model.args))))
        }

    def way(strategy: Any, **axes: Any) -> Way:
        fast = dfx.schedule(jax.jit(fn), strategy, **axes)
        return Way(lambda: jax.block_until_ready(fast(*args)), "parallel")

    yield "dynaflow jax, branches", lambda: way(dfx.Branches())
    if model.rows:
        yield "dynaflow jax, nano-batches", lambda: way(dfx.NanoBatch(2), **axes)
    yield "dynaflow jax, auto", lambda: way(dfx.Auto(), **axes)


def ours_torch(model: Model) -> Ways:
    axes: dict[str, Any] = {}
    if model.rows:
        axes = {"in_axes": tuple(0 if i in model.rows else None for i in range(len(model.args)))}

    def way(strategy: Any, mode: Any = "parallel", **axes: Any) -> Way:
        fast = dfx.schedule(model.marked, strategy, backend="torch", **axes)
        return Way(lambda: fast(*model.args), mode, CORES)

    yield "dynaflow torch, one after another", lambda: way(dfx.Sequential(), "sequential")
    yield "dynaflow torch, branches", lambda: way(dfx.Branches())
    if model.rows:
        yield "dynaflow torch, nano-batches", lambda: way(dfx.NanoBatch(2), **axes)
    yield "dynaflow torch, auto", lambda: way(dfx.Auto(), **axes)


# -- JAX ------------------------------------------------------------------------------------------------

XLA_FLAGS: dict[str, dict[str, Any]] = {
    "concurrency scheduler": {"xla_cpu_enable_concurrency_optimized_scheduler": True},
    "xnnpack": {"xla_cpu_use_xnnpack": True},
    "512-bit vectors": {"xla_cpu_prefer_vector_width": 512},
}


def jax_jit(model: Model) -> Ways:
    fn, args = model.jax_function()

    def flags(options: dict[str, Any]) -> Way:
        fast = jax.jit(fn, compiler_options=options)
        return Way(lambda: jax.block_until_ready(fast(*args)), "parallel")

    # XLA runs operators that do not need each other side by side where a program is large enough.
    yield "jax.jit", lambda: flags({})
    yield "jax.jit, no async dispatch", lambda: Way(measure.in_caller(fn, args), "parallel")
    yield "jax.jit, 1 thread", lambda: Way(measure.one_thread(fn, args), "sequential")
    for name, options in XLA_FLAGS.items():
        yield f"jax.jit, {name}", partial(flags, options)


# -- PyTorch --------------------------------------------------------------------------------------------


def pytorch(model: Model) -> Ways:
    def compiled(threads: int, **options: Any) -> Way:
        # A program is compiled for the threads of its first call.
        fast = torch.compile(model.module, options=options or None)
        return Way(lambda: fast(*model.args), "sequential", threads)

    for threads in sorted({1, CORES}):
        yield (
            f"eager, {threads} threads",
            lambda n=threads: Way(lambda: model.module(*model.args), "sequential", n),
        )
        yield f"torch.compile, {threads} threads", partial(compiled, threads)
    yield f"torch.compile, frozen, {CORES} threads", partial(compiled, CORES, freezing=True)


# -- threads by hand ------------------------------------------------------------------------------------


def _chunks(model: Model) -> list[tuple[Any, ...]]:
    return [
        tuple(x.chunk(CORES)[n] if i in model.rows else x for i, x in enumerate(model.args))
        for n in range(CORES)
    ]


def by_hand(model: Model) -> Ways:
    if len(model.parts) < 2 and not model.rows:
        raise NotPossible("one chain: nothing that a thread could take")
    pool = ThreadPoolExecutor(CORES, initializer=partial(torch.set_num_threads, 1))

    def in_torch() -> Way:
        def part(n: int) -> Any:
            with torch.no_grad():  # each thread has a mode of its own
                told = model.parts[n]
                return told.module(*[model.args[i] for i in told.takes])

        def rows(args: Any) -> Any:
            with torch.no_grad():
                return model.module(*args)

        if len(model.parts) > 1:
            every = range(len(model.parts))
            return Way(lambda: model.join(list(pool.map(part, every)), *model.args), "parallel")
        chunks = _chunks(model)
        return Way(lambda: torch.cat(list(pool.map(rows, chunks))), "parallel")

    def in_jax() -> Way:
        from dynaflow_xla.ffi import xla

        lanes = [xla.lane_device(n) for n in range(CORES)]
        fn, (p, *args) = model.jax_function()
        if len(model.parts) < 2:
            given = [
                jax.device_put((p, *map(to_jax, chunk)), lane)
                for chunk, lane in zip(_chunks(model), lanes, strict=True)
            ]
            whole = jax.jit(fn)
            run = partial(pool.map, lambda x: np.asarray(whole(*x)))
            return Way(lambda: np.concatenate(list(run(given))), "parallel")
        parts = []
        for n, told in enumerate(model.parts):
            given = jax.device_put((p[n], *(args[i] for i in told.takes)), lanes[n % CORES])
            parts.append(partial(jax.jit(told.jax), *given))
        join = jax.jit(model.jax_join)
        last, *rest = jax.device_put((p[-1], *args), lanes[0])

        def run_parts() -> Any:
            outs = list(pool.map(lambda part: jax.block_until_ready(part()), parts))
            return jax.block_until_ready(join(last, jax.device_put(outs, lanes[0]), *rest))

        return Way(run_parts, "parallel")

    yield "threads by hand, eager PyTorch", in_torch
    yield "threads by hand, jax.jit", in_jax


# -- ONNX Runtime ---------------------------------------------------------------------------------------


class WithParts(torch.nn.Module):
    """The result of a model, and those of its parts behind it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(part.module for part in model.parts)
        self.takes, self.join = [part.takes for part in model.parts], model.join

    def forward(self, *args: Any) -> Any:
        given = zip(self.parts, self.takes, strict=True)
        outs = [part(*[args[i] for i in takes]) for part, takes in given]
        return self.join(outs, *args), *outs


def to_onnx(module: torch.nn.Module, args: tuple[Any, ...]) -> bytes:
    """A module in ONNX, its arguments named ``x0``, ``x1``, ..."""
    names = [f"x{i}" for i in range(len(args))]
    try:
        file = io.BytesIO()
        torch.onnx.export(module, args, file, dynamo=False, input_names=names)
        return file.getvalue()
    except Exception:
        # The older exporter keeps recurrent layers whole; what it does not know, the newer may.
        made = torch.onnx.export(module, args, dynamo=True, input_names=names, verbose=False)
        return made.model_proto.SerializeToString()  # type: ignore[no-any-return, union-attr]


def onnx_runtime(model: Model) -> Ways:
    import onnxruntime as ort

    ort.set_default_logger_severity(4)
    whole = to_onnx(model.module, model.args)

    def way(beside: int, inside: int, data: bytes = whole, streams: str | None = None) -> Way:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = inside, beside
        parallel = beside > 1
        mode = ort.ExecutionMode
        options.execution_mode = mode.ORT_PARALLEL if parallel else mode.ORT_SEQUENTIAL
        # Else its threads go on spinning when the others are timed.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if streams is not None:
            options.add_session_config_entry("session.node_partition_config_file", streams)
        session = ort.InferenceSession(data, options, ["CPUExecutionProvider"])
        names = [x.name for x in session.get_inputs()]
        given = {n: model.args[int(n[1:])].numpy() for n in names}
        first = [session.get_outputs()[0].name]
        return Way(lambda: session.run(first, given), "parallel" if parallel else "sequential")

    def streams() -> Way:
        with tempfile.TemporaryDirectory() as folder:
            data = to_onnx(WithParts(model), model.args)
            file = Path(folder) / "streams.json"
            file.write_text(json.dumps(partition(model, data, folder)))
            return way(CORES, 1, data, str(file))

    for threads in sorted({1, CORES}):
        yield f"ONNX Runtime, sequential, {threads} threads", partial(way, 1, threads)
    for inside in sorted({1, CORES}):
        yield f"ONNX Runtime, ORT_PARALLEL {CORES} x {inside}", partial(way, CORES, inside)
    yield "ONNX Runtime, streams of our plan", streams


def partition(model: Model, data: bytes, folder: str) -> dict[str, Any]:
    """The lanes of our plan as streams of ONNX Runtime, whose executor then runs the same schedule.

    Nodes are those of the graph that ONNX Runtime made with its fusions. What leads to a part's result is
    on the lane of that part, in front of several on the first one's; what follows is with its producer.

    Args:
        model: What is run.
        data: ``WithParts`` of it in ONNX.
        folder: For a file.
    """
    import onnx
    import onnxruntime as ort

    lanes = lanes_of_parts(model)
    if len(set(lanes.values())) < 2:
        raise NotPossible("our plan has one lane")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
    ort.InferenceSession(data, options, ["CPUExecutionProvider"])
    graph = onnx.load(options.optimized_model_filepath).graph
    makers = {name: node for node in graph.node for name in node.output}
    made: dict[str, int] = {}
    for part, told in enumerate(graph.output[1:]):
        waiting = [told.name]
        while waiting:
            node = makers.get(waiting.pop())
            if node is not None and node.name not in made:
                made[node.name] = lanes[part]
                waiting += node.input
    streams: dict[int, list[str]] = {lane: [] for lane in sorted(set(lanes.values()))}
    for node in graph.node:
        before = [made[makers[x].name] for x in node.input if x in makers]
        made.setdefault(node.name, (before or [min(streams)])[0])
        streams[made[node.name]].append(node.name)
    return {
        "type": "DeviceBasedPartitioner",
        "streams": list(streams.values()),
        "devices": ["0"] * len(streams),
    }


def lanes_of_parts(model: Model) -> dict[int, int]:
    """Part -> the lane that our plan gives it."""
    plan = dfx.plan(
        dfx.schedule(model.marked, dfx.Branches(wide=False), backend="torch"), *model.args
    )
    found: dict[int, int] = {}
    for step in plan.instructions:
        told = re.match(r"part(\d+)", getattr(step, "name", ""))
        if told:
            found.setdefault(int(told[1]), step.lane)  # type: ignore[union-attr]
    if len(found) < len(model.parts):
        raise NotPossible("our plan does not tell parts apart")
    return found


# -- OpenVINO -------------------------------------------------------------------------------------------


def openvino(model: Model) -> Ways:
    import openvino as ov

    core = ov.Core()

    def compiled(module: Any, args: Sequence[torch.Tensor], threads: int, streams: int) -> Any:
        config = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": streams,
                  "INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False}  # fmt: skip
        shapes = [list(x.shape) for x in args]
        made = ov.convert_model(module, example_input=tuple(args), input=shapes)
        return core.compile_model(made, "CPU", config)

    def one(threads: int) -> Way:
        request = compiled(model.module, model.args, threads, 1).create_infer_request()
        given = [x.numpy() for x in model.args]

        def run() -> Any:
            request.infer(given, share_inputs=True)
            return request.get_output_tensor().data

        return Way(run, "sequential")

    def several() -> Way:
        if len(model.parts) > 1:
            made = []
            for part in model.parts:
                args = [model.args[i] for i in part.takes]
                request = compiled(part.module, args, 1, 1).create_infer_request()
                made.append((request, [x.numpy() for x in args]))
        elif model.rows:
            chunks = _chunks(model)
            program = compiled(model.module, chunks[0], CORES, CORES)
            made = [(program.create_infer_request(), [x.numpy() for x in args]) for args in chunks]
        else:
            raise NotPossible("one chain: nothing for a second request")

        def run() -> Any:
            for request, given in made:
                request.start_async(given, share_inputs=True)
            for request, _ in made:
                request.wait()
            outs = [torch.from_numpy(request.get_output_tensor().data) for request, _ in made]
            return model.join(outs, *model.args) if len(model.parts) > 1 else torch.cat(outs)

        return Way(run, "parallel")

    for threads in sorted({1, CORES}):
        yield f"OpenVINO, one request, {threads} threads", partial(one, threads)
    yield "OpenVINO, a request for each part", several


# -- IREE -----------------------------------------------------------------------------------------------


def iree(model: Model) -> Ways:
    import iree.runtime as ir
    from iree.compiler.tools.binaries import find_tool

    fn, args = model.jax_function()
    text = str(jax.jit(fn).lower(*args).compiler_ir("stablehlo"))
    leaves = [np.asarray(x) for x in jax.tree.leaves(args)]
    built: dict[str, bytes] = {}

    def build(favor: str) -> bytes:
        if favor not in built:
            command = [
                find_tool("iree-compile"), "-", "--iree-hal-target-backends=llvm-cpu",
                "--iree-input-type=stablehlo", "--iree-llvmcpu-target-cpu=host", "--iree-opt-level=O3",
                f"--iree-stream-partitioning-favor={favor}",
            ]  # fmt: skip
            done = subprocess.run(
                command, input=text.encode(), capture_output=True, timeout=COMPILE_SECONDS
            )
            if done.returncode:
                lines = [
                    x for x in done.stderr.decode(errors="replace").splitlines() if "error:" in x
                ]
                raise RuntimeError(
                    (lines or ["iree-compile failed"])[0].split("error:")[-1].strip()
                )
            built[favor] = done.stdout
        return built[favor]

    def way(favor: str, driver: str) -> Way:
        config = ir.Config(driver)
        context = ir.SystemContext(config=config)
        context.add_vm_module(ir.VmModule.copy_buffer(context.instance, build(favor)))
        (module,) = (
            getattr(context.modules, n) for n in context.modules.keys() if n.startswith("jit")
        )
        given = [ir.asdevicearray(config.device, x) for x in leaves]
        mode: Any = "sequential" if driver == "local-sync" else "parallel"
        return Way(lambda: module["main"](*given).to_host(), mode)

    yield "IREE, local-sync", lambda: way("max-concurrency", "local-sync")
    for favor in ("min-peak-memory", "max-concurrency"):
        yield f"IREE, local-task, {favor}", partial(way, favor, "local-task")


PEERS: dict[str, tuple[Callable[[Model], Ways], str]] = {
    "jax.jit": (jax_jit, "jax"),
    "PyTorch": (pytorch, "torch"),
    "threads by hand": (by_hand, "torch"),
    "ONNX Runtime": (onnx_runtime, "onnxruntime"),
    "OpenVINO": (openvino, "openvino"),
    "IREE": (iree, "iree"),
}
"""By name, the ways of each, and the package that they need."""
OURS: dict[str, Callable[[Model], Ways]] = {"jax": ours_jax, "torch": ours_torch}


@contextmanager
def quiet() -> Iterator[None]:
    """No gradients, and no warnings of compilers and exporters."""
    import logging
    import warnings

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def installed(package: str) -> bool:
    """Whether a peer's package is there."""
    return importlib.util.find_spec(package) is not None
