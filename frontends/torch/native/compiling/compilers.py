"""Stretches compiled by Inductor or AOTInductor: once for each structure, with weights as inputs.

Operators that follow each other on a lane between two cross-lane edges are one program, whatever regions
they are of: so they fuse across the borders of regions, and no Python runs between them.

What was compiled is kept in memory by structure, and on disk: Inductor's code in PyTorch's own cache,
AOTInductor's libraries beside the decisions of ``Auto``. New structures compile side by side in
processes of their own, which fill the disk caches.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import operator
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from dynaflow_xla import machine
from dynaflow_xla.caches import private_files
from dynaflow_xla.caches.recent import Recent
from dynaflow_xla.errors import UnsupportedError
from dynaflow_xla.ffi import _engine
from dynaflow_xla.frontends.torch._compat import compiling, modes
from dynaflow_xla.frontends.torch.capture import costs
from dynaflow_xla.frontends.torch.capture.captured import Captured, Ref
from dynaflow_xla.frontends.torch.native.compiling import layouts, worker as compile_worker
from dynaflow_xla.frontends.torch.native.stretches.regions import StretchBody
from dynaflow_xla.frontends.torch.native.stretches.source import FusedOperators, Step
from dynaflow_xla.ir.partitioned import PartitionedGraph
from dynaflow_xla.watching import telling

Implementation = Callable[..., Sequence[Any]]

_lock = threading.Lock()
_MAX_KEPT = 1024
_compiled: Recent[str, Implementation] = Recent(_MAX_KEPT)


@dataclass
class Structure:
    """A program apart from its weights.

    Attributes:
        key: Equal for equal structures, settings and versions, in every process.
        module: Its operators as a graph module over its inputs.
        examples: Tensors like its inputs.
        where: The first such program, for messages.
    """

    key: str
    module: torch.fx.GraphModule
    examples: list[torch.Tensor]
    where: str


@dataclass
class Compiler:
    """Makes programs of the operators of stretches.

    Operators that draw random numbers stay as they are: Inductor's random numbers are not the original's.
    So do those with other inputs or results than tensors, those that the compiler has no code for, regions
    that run as a function of their own, and what stands alone between such. Programs get the results of all
    these laid out as PyTorch's rules foresee it. Some operators do otherwise, and AOTInductor does not look.

    Attributes:
        captured: The graph.
        pg: Its regions.
        several: Whether several lanes run, whose programs must not hold the interpreter lock.
        name: "inductor" or "aoti".
        options: For the compiler.
        backward: Whether its inputs are what a forward kept, laid out as it is.

    Raises:
        UnsupportedError: sizes are symbolic; AOTInductor for regions on a GPU.
    """

    captured: Captured
    pg: PartitionedGraph
    several: bool
    name: str
    options: Mapping[str, Any] | None
    backward: bool = False

    def __post_init__(self) -> None:
        if self.name == "aoti" and self.captured.device.type != "cpu":
            raise UnsupportedError(
                f"compiler='aoti' compiles regions for the CPU, and these are on {self.captured.device}; "
                "use compiler='inductor'"
            )
        if self.captured.symbolic:
            raise UnsupportedError(
                f"compiler={self.name!r} compiles for fixed sizes, and this graph was captured with sizes "
                "that may change; leave dynamic out of torch's settings, or use compiler='eager'"
            )

    def settings(self, threads: int) -> dict[str, Any]:
        """Options of the compiler for programs of so many threads; 0: as many as the process has."""
        made = dict(self.options or {})
        if threads and self.captured.device.type == "cpu":
            made["cpp.threads"] = threads  # Inductor writes the number of threads into its kernels
            if self.several and self.name == "inductor":
                # Inductor's Python code holds the interpreter lock in its kernels, its C++ code never.
                made.setdefault("cpp_wrapper", True)
        return made

    def __call__(self, works: Sequence[StretchBody]) -> list[StretchBody]:
        """The same work, with programs in the place of the operators that they are made of."""
        cut = [self._cut(work) for work in works]
        as_it_is = {
            v for parts in cut for part in parts if isinstance(part, Step) for v in part.writes
        }
        if self.backward:
            as_it_is.update(self.captured.graph.inputs)
        # A program is for the strides of one call; those that may change are another call's others.
        as_it_is.update(v for v in self.captured.graph.inputs if self._strides_change(v))
        laid_out: dict[Any, Implementation] = {}
        wanted: dict[int, Structure] = {}
        functions: dict[str, Implementation] = {}
        for threads in dict.fromkeys(work.threads for work in works):
            settings = self.settings(threads)
            found = {
                id(part): self._structure(part, settings)
                for work, parts in zip(works, cut, strict=True)
                for part in parts
                if isinstance(part, _Part) and work.threads == threads
            }
            functions.update(self._functions(list(found.values()), settings))
            wanted.update(found)

        def made(part: Step | _Part) -> Step | FusedOperators:
            if isinstance(part, Step):
                return part
            key = wanted[id(part)].key
            function = functions[key]
            expected = {
                position: layouts.Layout.of(self.captured.examples[v])
                for position, v in enumerate(part.reads)
                if v in as_it_is or layouts.is_lazy(self.captured.examples[v])
            }
            if expected:
                known = (key, *expected.items())
                if known not in laid_out:
                    laid_out[known] = functools.partial(layouts.call, function, expected)
                function = laid_out[known]
            return FusedOperators(
                tuple(part.steps), function, tuple(part.reads), tuple(part.writes)
            )

        return [
            replace(work, steps=list(map(made, parts)))
            for work, parts in zip(works, cut, strict=True)
        ]

    def _cut(self, work: StretchBody) -> list[Step | _Part]:
        """Neighbouring operators together."""
        made: list[Step | _Part] = []
        last: dict[int, int] = {}
        for number, step in enumerate(work.steps):
            last.update(dict.fromkeys(step.reads, number))
        at = 0
        together = itertools.groupby(
            work.steps, lambda step: isinstance(step, Step) and self._takes(step)
        )
        for compiled, found in together:
            steps = [step for step in found if isinstance(step, Step)]
            at += len(steps)
            if not compiled or sum(map(self._computes, steps)) < LEAST:
                made.extend(steps)
                continue
            writes = dict.fromkeys(v for step in steps for v in step.writes)
            reads = dict.fromkeys(v for step in steps for v in step.reads if v not in writes)
            needed = [v for v in writes if v in work.wanted or last.get(v, -1) >= at]
            if needed:
                made.append(_Part(steps, list(reads), needed))
            else:
                made.extend(steps)
        return made

    def _takes(self, step: Step) -> bool:
        """Whether an operator can be part of a program."""
        if step.payload is None or self.pg.regions[step.region].outer:
            return False
        op = self.captured.graph.ops[step.op]
        if op.kind.startswith("dynaflow_xla.") or op.outer or op.once:
            return False
        target = step.payload.target
        named = (self.options or {}).get("aot_inductor.custom_ops_to_c_shims") or ()
        if isinstance(target, FunctionType):
            return False
        if compiling.without_code(target) and target not in named:
            return False
        values = [v for v in (*step.payload.reads(), *step.reads, *step.writes) if v is not None]
        examples = [self.captured.examples[v] for v in values]
        if not all(isinstance(example, torch.Tensor) for example in examples):
            return False
        if compiling.is_miscompiled(target, {example.dtype for example in examples}):
            return False
        # Inductor has no loops over complex numbers: it calls PyTorch's operators, AOTInductor those it can.
        has_complex = any(example.is_complex() for example in examples)
        return self.name != "aoti" or not has_complex or compiling.in_c(target)

    def _computes(self, step: Step) -> bool:
        op = self.captured.graph.ops[step.op]
        return bool(op.flops or op.bytes_moved)

    def _functions(
        self, structures: Sequence[Structure], settings: Mapping[str, Any]
    ) -> dict[str, Implementation]:
        """By key what was compiled, now or earlier."""
        with _lock:
            known = {s.key: s for s in structures}
            new = {key: s for key, s in known.items() if key not in _compiled}
            missing = [s for s in new.values() if not _stored(self.name, s.key)]
            if len(missing) > 1 and self.captured.device.type == "cpu":
                requests = [(s.module, s.examples, _target(self.name, s.key)) for s in missing]
                compile_worker.compile_all(self.name, settings, requests)
            loaded = {key: _compiled[key] for key in known.keys() - new.keys()}
            begin = time.perf_counter()
            for structure in new.values():
                loaded[structure.key] = _load(self.name, structure, settings)
                _compiled[structure.key] = loaded[structure.key]
            took = time.perf_counter() - begin
        if new:
            name = self.captured.graph.name
            telling.count("compiles", len(new))
            telling.count("compile_ns", int(took * 1e9))
            telling.told(
                "compile", f"{name}: {len(new)} programs by {self.name} in {took:.2f} s",
                function=name, programs=len(new), seconds=took, compiler=self.name,
            )  # fmt: skip
        return loaded

    def _strides_change(self, value: int) -> bool:
        """Whether memory may lie otherwise at every call, where sizes do not change."""
        example = self.captured.examples[value]
        return isinstance(example, torch.Tensor) and any(
            isinstance(n, torch.SymInt) for n in example.stride()
        )

    def _structure(self, part: _Part, settings: Mapping[str, Any]) -> Structure:
        """A part as a graph module, with the key that equal structures share."""
        captured = self.captured
        graph = torch.fx.Graph()
        root = torch.nn.Module()
        values: dict[int, Any] = {}
        key: list[Any] = [_FORM, self.name, sorted(settings.items()), *_machine(captured.device)]
        key.append(compiling.surroundings_key())
        for value in part.reads:
            values[value] = graph.placeholder(f"v{len(values)}")
            example = captured.examples[value]
            key.append((tuple(example.size()), costs.strides_of(example), example.dtype))
            key.append(str(example.device))
        for step in part.steps:
            payload = step.payload
            assert payload is not None

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
                for position, result in enumerate(payload.outputs):
                    if result is not None:
                        values[result] = graph.call_function(operator.getitem, (node, position))
            elif payload.outputs and payload.outputs[0] is not None:
                values[payload.outputs[0]] = node
        graph.output(tuple(values[v] for v in part.writes))
        key.append([values[v].name for v in part.writes])
        with modes.apart():
            examples = [_concrete(captured.examples[v]) for v in part.reads]
        text = hashlib.sha256(str(key).encode()).hexdigest()[:32]
        regions = [self.pg.regions[n] for n in dict.fromkeys(step.region for step in part.steps)]
        told = ", ".join(
            f"region {r.name!r}" + ("" if r.source is None else f" (from {r.source})")
            for r in regions[:3]
        )
        where = told + (f" or one of {len(regions) - 3} more" if len(regions) > 3 else "")
        return Structure(text, torch.fx.GraphModule(root, graph), examples, where)


_FORM = 2
"""Of programs: another one where the same structure is compiled otherwise than before."""

LEAST = 2
"""So many operators that compute, at least: one alone runs the same kernel as it is."""


@dataclass
class _Part:
    """Operators of a program to be."""

    steps: list[Step]
    reads: list[int]
    writes: list[int]


def _folder(compiler: str) -> Path:
    """Where a compiler's notes and libraries are kept; of this process if the cache is not trusted."""
    top: Path | None = None
    try:
        top = private_files.cache_folder()
        private_files.make_folder(top)
        private_files.make_folder(top / compiler)
    except private_files.Untrusted as error:
        assert top is not None
        private_files.refused(top, error)
    except OSError as error:
        _cannot_be_kept(top, error)
    else:
        return top / compiler
    return _own(compiler)


def _own(compiler: str) -> Path:
    made = Path(_own_folder().name) / compiler
    private_files.make_folder(made)
    return made


_unwritable: set[str] = set()


def _cannot_be_kept(top: Path | None, error: OSError) -> None:
    """Tells the user once that nothing can be written to a folder, which may be full."""
    if str(top) not in _unwritable:
        _unwritable.add(str(top))
        where = f" in {top}" if top else ""
        telling.fallback(
            f"compiled regions cannot be kept{where} ({error}); each process makes them"
        )


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
        try:
            compile_worker.place(None, note)
        except OSError as error:
            _cannot_be_kept(Path(note).parent.parent, error)
        return made
    library = _library(compiler, structure.key) or _made(compiler, structure, settings, note)
    path = os.fspath(library or note)
    # As many at a time as there may be lanes: regions of one structure share the library.
    model = _engine.AotiModel(path, max(1, len(os.sched_getaffinity(0))))
    run, handles, tensors = model.run, compiling.tensor_handles, compiling.tensors_of_handles

    def call(*inputs: Any) -> Sequence[Any]:
        return tensors(run(handles(inputs)))

    return call


def _made(
    compiler: str, structure: Structure, settings: Mapping[str, Any], note: str
) -> Path | None:
    """A library that is not there yet, in the cache or where that takes none, in a folder of this process."""

    def made_at(note: str) -> Path | None:
        compile_worker.compile_aoti(
            structure.module, structure.examples, settings, note, structure.where
        )
        return compile_worker.kept(Path(note))

    top = Path(note).parent.parent
    if str(top) not in _unwritable:
        try:
            return made_at(note)
        except OSError as error:
            _cannot_be_kept(top, error)
    return made_at(os.fspath(_own(compiler) / Path(note).name))


def _concrete(example: torch.Tensor) -> torch.Tensor:
    """A real tensor like a fake one."""
    return torch.empty_strided(
        example.size(), costs.strides_of(example), dtype=example.dtype, device=example.device
    )


def _fingerprint(constant: Any) -> str:
    if isinstance(constant, torch.Tensor):
        with modes.apart():  # Dynamo's tensors without data would have none here either
            flat = constant.detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes()
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
