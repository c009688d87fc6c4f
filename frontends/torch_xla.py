"""torch_xla as the way to XLA: an exported program becomes StableHLO, the IR, and lane programs.

torch_xla 2.9.0, the last release, works with exactly torch 2.9.0, and importing this module elsewhere
says so. Its lowering covers inference with fixed sizes; the programs run on the engine through jaxlib,
not on torch_xla's own runtime, so models may live on the CPU or on an ``xla`` device.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynaflow_xla.errors import UnsupportedError

TORCH, TORCH_XLA = "2.9.0", "2.9.0"


def _check() -> None:
    """Raises ImportError where torch_xla cannot work."""
    found = torch.__version__.split("+")[0]
    how = (
        "Both are installed by: pip install 'dynaflow-xla[torch-xla,jax]' (in an environment of its "
        "own: the extras torch and torch-xla exclude each other)."
    )
    if found != TORCH:
        raise ImportError(
            f"dynaflow_xla.frontends.torch_xla needs torch {TORCH}, because torch-xla {TORCH_XLA}, its "
            f"last release, works with no other; found torch {found}. {how} With this torch, "
            "dfx.schedule(model, backend='ffi') runs a model on XLA without torch_xla."
        )
    try:
        import torch_xla
    except ImportError as error:
        raise ImportError(
            f"dynaflow_xla.frontends.torch_xla needs torch-xla {TORCH_XLA}, which cannot be imported "
            f"({error}). {how}"
        ) from error
    if torch_xla.__version__.split("+")[0] != TORCH_XLA:
        raise ImportError(
            f"dynaflow_xla.frontends.torch_xla needs torch-xla {TORCH_XLA}; found "
            f"{torch_xla.__version__}. {how}"
        )


_check()

import jax  # noqa: E402
from torch_xla import stablehlo as _to_stablehlo  # noqa: E402

from dynaflow_xla.caches.recent import Recent  # noqa: E402
from dynaflow_xla.frontends.jax.capture import (  # noqa: E402
    capture as jax_capture,
    provenance,
)
from dynaflow_xla.frontends.jax.capture.stablehlo import StableHLOFunction  # noqa: E402
from dynaflow_xla.frontends.jax.capture.tracing import Capturing  # noqa: E402
from dynaflow_xla.frontends.jax.lanes.entry import build_stages  # noqa: E402
from dynaflow_xla.frontends.jax.signature import entry as jax_entry  # noqa: E402
from dynaflow_xla.frontends.torch.commands import (  # noqa: E402
    about as about,
    cases as cases,
    copies as copies,
    example as example,
    opponents as opponents,
    wait as wait,
)
from dynaflow_xla.frontends.torch.core import Core, class_forward  # noqa: E402
from dynaflow_xla.frontends.torch.dynamo import running  # noqa: E402
from dynaflow_xla.frontends.torch.on_xla.engine_call import EngineCall  # noqa: E402
from dynaflow_xla.frontends.torch.on_xla.flat import Flat, state_of, strip  # noqa: E402
from dynaflow_xla.frontends.torch.serving import (  # noqa: E402
    inlines as inlines,
    kinds as kinds,
    serving as serving,
)
from dynaflow_xla.ir.graph import Source  # noqa: E402
from dynaflow_xla.protocols import BoundFunction  # noqa: E402
from dynaflow_xla.settings import Settings  # noqa: E402

_MAX_PROGRAMS = 128
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


def _location(text: str) -> provenance.Location | None:
    """The place that torch_xla wrote into an operator's location."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(data, dict) or not data:
        return None
    scope: list[str] = []
    classes: list[str] = []
    calls = []
    for part in filter(None, data.get("nn_module_stack", "").split(";")):
        key, path, kind = part.split(",", 2)
        _, at, repeat = key.partition("@")
        scope = [p for p in path.split(".") if p]
        if at and scope:
            scope[-1] += f"@{repeat}"
        scope = strip(scope)
        classes = classes[: len(scope)] + [""] * (len(scope) - len(classes))
        if scope:
            classes[-1] = kind.rsplit(".", 1)[-1]
        calls.append(f"{kind.rsplit('.', 1)[-1]}#{path}")
    frames = _FRAME.findall(data.get("stack_trace", ""))
    library = torch.__file__.rsplit("/", 1)[0]
    own = [f for f in frames if not f[0].startswith(library) and f[0] != __file__]
    file, line, function = (own or frames or [("", "0", "")])[-1]
    source = Source(file, int(line), function) if file else None
    return provenance.Location(tuple(scope), tuple(classes), tuple(calls), None, source)


@dataclass
class Entry:
    """A program of one signature, planned and compiled; same surface as the torch frontend's.

    Attributes:
        kind: "inference".
        call: The planned entry of the JAX frontend, callable with tensors.
        arguments: For each argument of the StableHLO function: ("state", name) or ("input", position)
            or ("constant", tensor).
        out_tree: Structure of the results.
        seconds: Time spent by step.
    """

    options: Settings
    call: EngineCall
    arguments: list[tuple[str, Any]]
    out_tree: Any
    seconds: dict[str, float]
    kind: str = "inference"
    backward: Any = None

    @property
    def captured(self) -> Any:
        """The jaxpr's graph."""
        return self.call.made.captured

    @property
    def pg(self) -> Any:
        """Its regions."""
        return self.call.made.pg

    @property
    def plan(self) -> Any:
        """The validated plan."""
        return self.call.made.plan

    @property
    def program_ns(self) -> float:
        """What the framework takes if any region is wide, see ``strategies.base.Context``."""
        return self.call.made.program_ns  # type: ignore[no-any-return]

    @property
    def caller_ns(self) -> float:
        """What one lane may take to run on the thread that calls, see ``strategies.base.Context``."""
        return self.call.made.caller_ns  # type: ignore[no-any-return]

    def __call__(self, state: dict[str, Any], leaves: Sequence[Any], run: Any = None) -> list[Any]:
        """Runs on a module's state and the flat tensors of a call; returns flat results."""
        have: dict[str, Any] = {"state": state, "input": leaves}
        given = [
            (x if kind == "constant" else have[kind][x]).detach().cpu().contiguous()
            for kind, x in self.arguments
        ]
        return (run or self.call)(given)  # type: ignore[no-any-return]

    def describe(self) -> list[str]:
        """Lines of ``explain`` behind the table of regions."""
        return [
            f"lanes {self.plan.lanes}, events {self.plan.events}; StableHLO made by torch_xla "
            f"{TORCH_XLA}; arguments are read in place, results written into their tensors"
        ]

    def stamped(self) -> _Stamped:
        """The same with time stamps, for ``profile``."""
        return _Stamped(self)


class _Stamped:
    def __init__(self, entry: Entry) -> None:
        made = entry.call.made
        with jax.enable_x64(True):
            self.stage = build_stages(made, profile=True)[0][0]
        self.entry = entry

    def run(self, inputs: Sequence[Any], measured: Any) -> list[Any]:
        """As a call; adds what was measured."""
        records: list[Any] = []
        state, leaves = inputs
        outs = self.entry(
            state, leaves, lambda given: self.entry.call.run_stage(self.stage, given, records)
        )
        measured.add_stage(self.entry.plan.instructions, records[-1])
        return outs


def build_entry(program: torch.export.ExportedProgram, options: Settings) -> Entry:
    """Lowers an exported program through torch_xla, then partitions, plans and compiles it.

    Raises:
        UnsupportedError: the program writes into buffers or arguments, returns what is no tensor, has
            sizes that may change or keyword arguments, or torch_xla cannot lower an operator.
    """
    _refuse(program)
    t0 = time.perf_counter()
    try:
        bundle = _to_stablehlo.exported_program_to_stablehlo(
            program,
            _to_stablehlo.StableHLOExportOptions(
                export_node_metadata=True, export_weights=False, include_human_readable_text=False
            ),
        )._bundle
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UnsupportedError(f"torch_xla cannot lower {options.name!r}: {error}") from error
    function = bundle.stablehlo_funcs[0]
    arguments: list[tuple[str, Any]] = []
    for location in function.meta.input_locations:
        if location.type_ is _to_stablehlo.VariableType.PARAMETER:
            arguments.append(("state", location.name))
        elif location.type_ is _to_stablehlo.VariableType.INPUT_ARG:
            arguments.append(("input", location.position))
        else:
            constant = torch.as_tensor(bundle.additional_constants[location.position])
            arguments.append(("constant", constant))
    t1 = time.perf_counter()
    with jax.enable_x64(True):
        read = StableHLOFunction(function.bytecode, _location)
        with Capturing():
            closed = jax.make_jaxpr(read)(*read.specs)
        captured = provenance.settle(jax_capture.capture(closed, 0, options.name), read.locations)
        made = jax_entry.build_entry(
            captured,
            Settings(
                name=options.name,
                strategy=options.strategy,
                rules=options.rules,
                lanes=options.lanes,
                user=options.user,
                compiler_options=options.compiler_options,
            ),
        )
    results = [(tuple(s.shape), getattr(torch, str(s.dtype))) for s in read.out_specs]
    made.seconds["torch_xla"] = t1 - t0
    call = EngineCall(made, closed.consts, results)
    return Entry(options, call, arguments, program.call_spec.out_spec, made.seconds)


def _refuse(program: torch.export.ExportedProgram) -> None:
    functional = program.run_decompositions({})
    kind = torch.export.graph_signature.OutputKind
    for spec in functional.graph_signature.output_specs:
        if spec.kind is not kind.USER_OUTPUT:
            raise UnsupportedError(
                f"the program changes {spec.target!r} in place, which torch_xla's export drops; put "
                "the module into eval mode, or return the new value"
            )
        if not isinstance(spec.arg, torch.export.graph_signature.TensorArgument):
            raise UnsupportedError(f"a result that is no tensor ({spec.arg}) through torch_xla")
    if program.range_constraints:
        raise UnsupportedError(
            "sizes that may change do not go through torch_xla; export fixed ones"
        )
    if program.example_inputs is not None and program.example_inputs[1]:
        raise UnsupportedError("a program exported with keyword arguments; export positional ones")


class _XlaCore(Core):
    """Schedules through torch_xla: a program for each signature, no gradients."""

    def __init__(self, original: Any, options: Settings) -> None:
        program = original if isinstance(original, torch.export.ExportedProgram) else None
        super().__init__(original if program is None else program.module(), options)
        self._program = program
        self._made: Recent[Any, Entry] = Recent(_MAX_PROGRAMS)
        self._once = threading.Lock()

    def _signature(self, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        parts = tuple(
            (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else (type(x), repr(x))
            for x in leaves
        )
        training = bool(getattr(self.original, "training", False))
        forward = None if self._program is not None else class_forward(self.original)
        return (str(tree), parts, training, forward), leaves

    def current(self) -> Core:
        """This: it has a program for each ``forward`` of the module's class."""
        return self

    def entry(self, args: Any, kwargs: Any) -> Entry:
        """The program of these arguments; made at the first call."""
        key, leaves = self._signature(args, kwargs)
        with self._once:
            made = self._made.get(key)
            if made is None:
                made = self._made[key] = build_entry(
                    self._export(args, kwargs, leaves), self.options
                )
                self.entries.append(made)  # type: ignore[arg-type]
            return made

    def _export(self, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        if self._program is not None:
            want = [
                n.meta["val"]
                for n, spec in zip(
                    (n for n in self._program.graph.nodes if n.op == "placeholder"),
                    self._program.graph_signature.input_specs,
                    strict=True,
                )
                if spec.kind is torch.export.graph_signature.InputKind.USER_INPUT
            ]
            for i, (x, example) in enumerate(zip(leaves, want, strict=True)):
                if (x.shape, x.dtype) != (example.shape, example.dtype):
                    raise UnsupportedError(
                        f"argument {i} was exported as {example.dtype}{list(example.shape)}; got "
                        f"{x.dtype}{list(x.shape)}"
                    )
            return self._program
        flat = Flat(self.original, args, kwargs)
        tensors = [x.detach() for x in leaves if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in (*tensors, *flat.state_dict().values())}
        if devices - {"cpu", "xla"}:
            raise UnsupportedError(f"tensors on {sorted(devices)}; torch_xla takes cpu and xla")
        with torch.no_grad():
            return torch.export.export(flat, tuple(tensors), strict=False)

    def all_planned(self, args: Any, kwargs: Any, *, front: bool = True) -> list[Any]:
        """The one graph of these arguments' signature: an export has no graph breaks."""
        return [self.target(args, kwargs).entry(args, kwargs)]  # type: ignore[attr-defined]

    def made_for(self, strategy: Any, compiler: str) -> Core:
        """This model under another strategy."""
        original = self._program if self._program is not None else self.original
        return _XlaCore(original, replace(self.options, strategy=strategy))

    def _with_arrays(self, args: Any, kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{self.options.name!r} is scheduled for PyTorch and got a JAX array; convert it with "
            "torch.from_dlpack before the call"
        )

    def _invoke(self, args: Any, kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        state = self._state()
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *state.values())):
            raise UnsupportedError(
                "a model scheduled through torch_xla has no backward; call it under torch.no_grad()"
            )
        entry = self.entry(args, kwargs)
        device = next((x.device for x in (*tensors, *state.values())), torch.device("cpu"))
        observer = running.observer(entry)
        if observer is not None:
            outs = observer((state, tensors))
        else:
            running.note_run(entry)
            outs = entry(state, tensors)
        return pytree.tree_unflatten([x.to(device) for x in outs], entry.out_tree)

    def _state(self) -> dict[str, Any]:
        if self._program is None:
            return state_of(self.original)
        module: Any = self.original
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class ScheduledThroughXla:
    """A model or function that runs scheduled through torch_xla; called like the original.

    Attributes:
        original: What was given to ``schedule`` (for an exported program its module).
    """

    def __init__(self, original: Any, options: Settings) -> None:
        self._dfx_core = _XlaCore(original, options)
        self.original = self._dfx_core.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same values as the original, on the device of its arguments.

        Raises:
            UnsupportedError: gradients are wanted, or torch_xla cannot lower the model.
            EngineError: a region failed while it ran.
        """
        return self._dfx_core.call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "original":
            raise AttributeError(name)
        return getattr(self.original, name)

    def __repr__(self) -> str:
        options = self._dfx_core.options
        return f"<scheduled {options.name} with {options.strategy!r}, through torch_xla>"


def schedule(fn: Any, settings: Settings) -> ScheduledThroughXla:
    """The scheduled form of a module, function or exported program.

    Raises:
        UnsupportedError: the settings ask for what needs another PyTorch.
    """
    if settings.in_axes is not None:
        raise UnsupportedError(
            "nano-batches of a PyTorch model need torch >= 2.11, and torch-xla is for 2.9; leave in_axes out"
        )
    if settings.compiler != "eager" or settings.backend not in ("auto", "ffi"):
        raise UnsupportedError(
            f"backend={settings.backend!r} with compiler={settings.compiler!r} needs torch >= 2.11; with "
            "torch-xla models run on backend='ffi', compiled by XLA"
        )
    if settings.selection is not None:
        raise UnsupportedError("select needs torch >= 2.11; give one strategy")
    if settings.gpu is not None:
        settings.gpu.refuse_on_cpu("lanes of XLA executables")
    return ScheduledThroughXla(fn, replace(settings, backend="ffi"))


def unbound(fn: Any) -> BoundFunction:
    """Of several functions of one plan.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError("together needs torch >= 2.11, and torch-xla is for 2.9")
