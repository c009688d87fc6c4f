"""Regions compiled by Inductor or AOTInductor: once for each structure, with weights as inputs.

What was compiled is kept in memory by structure, and on disk: Inductor's code in PyTorch's own cache,
AOTInductor's libraries beside the decisions of ``Auto``. New structures compile side by side in
processes of their own, which fill the disk caches.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynaflow_xla import machine
from dynaflow_xla.caches import private_files
from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.ffi import _engine
from dynaflow_xla.frontends.torch._compat import compiling, modes
from dynaflow_xla.frontends.torch.capture.captured import Captured, Payload, Ref
from dynaflow_xla.frontends.torch.native.compiling import worker as compile_worker
from dynaflow_xla.ir.graph import Region
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.tuning import autotune
from dynaflow_xla.watching import telling

Implementation = Callable[..., Sequence[Any]]

_lock = threading.Lock()
_MAX_KEPT = 1024
_compiled: Recent[str, Implementation] = Recent(_MAX_KEPT)


@dataclass
class Structure:
    """A region apart from its weights.

    Attributes:
        key: Equal for equal structures, settings and versions, in every process.
        module: The region as a graph module over its inputs.
        examples: Tensors like its inputs.
        where: The first such region, for messages.
    """

    key: str
    module: torch.fx.GraphModule
    examples: list[torch.Tensor]
    where: str


def compile_regions(
    captured: Captured,
    pg: PartitionedGraph,
    lanes_used: int,
    made: dict[int, Implementation],
    compiler: str,
    options: Mapping[str, Any] | None,
) -> None:
    """Adds a compiled function to ``made`` for each region that can have one.

    Regions that draw random numbers run operator by operator: Inductor's random numbers are not the
    original's. So do those with other inputs or outputs than tensors.

    Raises:
        UnsupportedError: sizes are symbolic; AOTInductor for regions on a GPU.
    """
    if compiler == "aoti" and captured.device.type != "cpu":
        raise UnsupportedError(
            f"compiler='aoti' compiles regions for the CPU, and these are on {captured.device}; use "
            "compiler='inductor'"
        )
    if captured.symbolic:
        raise UnsupportedError(
            f"compiler={compiler!r} compiles for fixed sizes, and this graph was captured with sizes that "
            "may change; leave dynamic out of torch's settings, or use compiler='eager'"
        )
    settings = {**(options or {})}
    if lanes_used > 1:
        settings["cpp.threads"] = 1  # Inductor writes the number of threads into its kernels
    wanted: dict[int, Structure] = {}
    for region in pg.regions:
        if region.id in made or region.outer:
            continue
        if not _compilable(captured, region):
            captured.notes.append(f"region {region.name!r} runs operator by operator")
            continue
        wanted[region.id] = _structure(captured, region, compiler, settings)
    with _lock:
        new = {s.key: s for s in wanted.values() if s.key not in _compiled}
        missing = [s for s in new.values() if not _stored(compiler, s.key)]
        if len(missing) > 1 and captured.device.type == "cpu":
            requests = [(s.module, s.examples, _target(compiler, s.key)) for s in missing]
            compile_worker.compile_all(compiler, settings, requests)
        loaded = {key: _compiled[key] for key in {s.key for s in wanted.values()} - set(new)}
        begin = time.perf_counter()
        for structure in new.values():
            loaded[structure.key] = _load(compiler, structure, settings)
            _compiled[structure.key] = loaded[structure.key]
        took = time.perf_counter() - begin
    if new:
        telling.count("compiles", len(new))
        telling.count("compile_ns", int(took * 1e9))
        telling.told(
            "compile", f"{captured.graph.name}: {len(new)} regions by {compiler} in {took:.2f} s",
            function=captured.graph.name, programs=len(new), seconds=took, compiler=compiler,
        )  # fmt: skip
    for number, structure in wanted.items():
        made[number] = loaded[structure.key]


def _folder(compiler: str) -> Path:
    """Where a compiler's notes and libraries are kept; of this process if the cache is not trusted."""
    top = autotune.cache_dir()
    try:
        private_files.make_folder(top)
        private_files.make_folder(top / compiler)
    except private_files.Untrusted as error:
        private_files.refused(top, error)
    except OSError as error:
        if str(top) not in _unwritable:
            _unwritable.add(str(top))
            telling.fallback(
                f"compiled regions cannot be kept in {top} ({error}); each process makes them"
            )
    else:
        return top / compiler
    made = Path(_own_folder().name) / compiler
    private_files.make_folder(made)
    return made


_unwritable: set[str] = set()


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dynaflow_xla-")  # goes with the process


def _target(compiler: str, key: str) -> str:
    """The note of a structure: its library, or for Inductor that PyTorch's cache has it."""
    return os.fspath(_folder(compiler) / f"{key}.json")


def _stored(compiler: str, key: str) -> bool:
    return _library(compiler, key) is not None


def _library(compiler: str, key: str) -> Path | None:
    """What was kept for a structure; a note or a library that is not as it was written is made again."""
    note = Path(_target(compiler, key))
    try:
        return compile_worker.kept(note)
    except private_files.Untrusted as error:
        private_files.refused(note.parent, error)
    except (private_files.Broken, OSError) as error:
        telling.fallback(f"the compiled region {note} cannot be read ({error}); it is made again")
    with contextlib.suppress(OSError):
        note.unlink()
    return None


def _load(compiler: str, structure: Structure, settings: Mapping[str, Any]) -> Implementation:
    note = _target(compiler, structure.key)
    if compiler == "inductor":
        made = compiling.inductor(structure.module, structure.examples, settings)
        compile_worker.place(None, note)
        return made
    library = _library(compiler, structure.key)
    if library is None:
        compile_worker.compile_aoti(
            structure.module, structure.examples, settings, note, structure.where
        )
        library = compile_worker.kept(Path(note))
    path = os.fspath(library or note)
    # As many at a time as there may be lanes: regions of one structure share the library.
    model = _engine.AotiModel(path, max(1, len(os.sched_getaffinity(0))))
    run, handles, tensors = model.run, compiling.tensor_handles, compiling.tensors_of_handles

    def call(*inputs: Any) -> Sequence[Any]:
        return tensors(run(handles(inputs)))

    return call


def _compilable(captured: Captured, region: Region) -> bool:
    tensors = all(
        isinstance(captured.examples[v], torch.Tensor) for v in (*region.inputs, *region.outputs)
    )
    ops = [captured.graph.ops[i] for i in region.ops]
    own = any(op.kind.startswith("dynaflow_xla.") or op.outer for op in ops)
    return bool(tensors and region.outputs and not own and not any(op.once for op in ops))


def _concrete(example: torch.Tensor) -> torch.Tensor:
    """A real tensor like a fake one."""
    return torch.empty_strided(
        example.size(), example.stride(), dtype=example.dtype, device=example.device
    )


def _structure(
    captured: Captured, region: Region, compiler: str, settings: Mapping[str, Any]
) -> Structure:
    """The region as a graph module, with the key that equal structures share."""
    graph = torch.fx.Graph()
    root = torch.nn.Module()
    values: dict[int, Any] = {}
    key: list[Any] = [compiler, sorted(settings.items()), *_machine(captured.device)]
    for value in region.inputs:
        values[value] = graph.placeholder(f"v{len(values)}")
        example = captured.examples[value]
        key.append((tuple(example.size()), tuple(example.stride()), example.dtype))
    for index in region.ops:
        payload: Payload = captured.graph.ops[index].payload

        def read(arg: Any) -> Any:
            if isinstance(arg, Ref):
                return values[arg.value]
            if not isinstance(arg, torch.Tensor | torch.nn.Module):
                return arg
            name = f"constant{len(key)}_{len(graph.nodes)}"
            setattr(root, name, arg)
            key.append(_fingerprint(arg))
            return graph.get_attr(name)

        args, kwargs = torch.fx.node.map_aggregate((payload.args, payload.kwargs), read)
        node = graph.call_function(payload.target, args, kwargs)
        key.append((str(payload.target), str(args), str(kwargs)))
        if payload.multiple:
            for position, part in enumerate(payload.outputs):
                if part is not None:
                    values[part] = graph.call_function(operator.getitem, (node, position))
        elif payload.outputs and payload.outputs[0] is not None:
            values[payload.outputs[0]] = node
    graph.output(tuple(values[v] for v in region.outputs))
    key.append([values[v].name for v in region.outputs])
    with modes.apart():
        examples = [_concrete(captured.examples[v]) for v in region.inputs]
    text = hashlib.sha256(str(key).encode()).hexdigest()[:32]
    where = f"region {region.name!r} (from {region.source})"
    return Structure(text, torch.fx.GraphModule(root, graph), examples, where)


def _fingerprint(constant: Any) -> str:
    if isinstance(constant, torch.Tensor):
        data = constant.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(data).hexdigest()
        return f"{constant.dtype} {tuple(constant.shape)} {digest}"
    inner = [f"{name} {_fingerprint(t)}" for name, t in constant.state_dict().items()]
    return f"{getattr(constant, 'code', constant)} {inner}"


def _machine(device: torch.device) -> tuple[Any, ...]:
    """What compiled code depends on beside the region."""
    if device.type == "cuda":
        return torch.__version__, str(device), torch.cuda.get_device_capability(device)
    # Inductor compiles for the very processor; a folder of libraries may be seen by several machines.
    capability = torch.backends.cpu.get_cpu_capability()
    return torch.__version__, capability, machine.cpu_model(), torch.get_num_threads()
