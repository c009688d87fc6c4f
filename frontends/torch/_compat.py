"""The private PyTorch names that the frontend uses, each with the reason, in one place."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import inspect
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dynaflow_xla.recent import Recent


def aot_backend(
    forward: Callable[..., Any], backward: Callable[..., Any], inference: Callable[..., Any]
) -> Callable[..., Any]:
    """A Dynamo backend that hands functional aten graphs to the three compilers.

    The public way to it is a ``torch.compile`` backend, but AOTAutograd itself has only this name.
    The default partitioner keeps every forward value that the backward reads: nothing is computed
    again, so gradients have the original's bits.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=default_partition,
        decompositions={},
    )


def bare(target: Any) -> Callable[..., Any]:
    """What an operator of ``torch.ops`` calls, without the frames of Python around it."""
    made: Callable[..., Any] = getattr(target, "_op", target)
    return made


def python_functions(target: Any) -> list[Callable[..., Any]]:
    """Functions in C of an operator's name that Python code calls: methods, those of torch and of nn."""
    name = target.overloadpacket.__name__
    places = (torch.Tensor, torch._C._VariableFunctions, torch._C._nn)
    found = [getattr(place, name, None) for place in places]
    in_c = (types.MethodDescriptorType, types.BuiltinFunctionType)
    return [f for f in found if isinstance(f, in_c)]


_REMOVED = ("cholesky", "qr")
"""Operators of ``torch.ops.aten`` that newer versions lack and torchax 0.0.13 names as it is loaded."""


@contextlib.contextmanager
def removed_operators() -> Iterator[frozenset[object]]:
    """While open, names of removed operators are there and stand for nothing; gives what they stand for."""
    aten = torch.ops.aten
    stand_ins = {name: object() for name in _REMOVED if not hasattr(aten, name)}
    for name, nothing in stand_ins.items():
        setattr(aten, name, nothing)
    try:
        yield frozenset(stand_ins.values())
    finally:
        for name in stand_ins:
            delattr(aten, name)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks are registered on a module or its parameters; there is no public way to ask."""
    of_module = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    of_tensor = ("_backward_hooks", "_post_accumulate_grad_hooks")
    parameters = module.parameters(recurse=False)
    return any(getattr(module, name) for name in of_module) or any(
        getattr(p, name) for p in parameters for name in of_tensor
    )


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Apart from any capture that is going on: no tracing, tensors are real."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._guards.tracing(None), _disable_current_modes():
        yield


def inductor(
    gm: Any, examples: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Sequence[Any]]:
    """Compiles a functional graph module; apart from any capture that is going on."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile as inductor_compile
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor looks into its cache on disk only where there are shapes to guard on.
    context = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
    with apart(), tracing(context), torch.no_grad():
        return inductor_compile(gm, list(examples), options=dict(options))  # type: ignore[no-any-return]


def aot_compile(gm: Any, examples: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Path:
    """Compiles a functional graph module to a library; its path."""
    from torch._inductor import aot_compile as inductor_aot_compile

    with apart(), torch.no_grad():
        settings = {**options, "aot_inductor.package": False}
        return Path(str(inductor_aot_compile(gm, tuple(examples), options=settings)))


tensor_handles: Callable[[Sequence[torch.Tensor]], list[Any]] = (
    torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
)
"""Tensors to handles of AOTInductor's C interface, which the receiver owns."""

tensors_of_handles: Callable[[list[Any]], list[torch.Tensor]] = (
    torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
)
"""Handles to tensors, which own them."""


def boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Marks a compiled function as one that takes a list it may empty, so that inputs die early."""
    fn._boxed_call = True  # type: ignore[attr-defined]
    return fn


def allow_second_backward() -> None:
    """Called while a backward is compiled: nobody writes into what its forward saved.

    AOTAutograd otherwise refuses ``backward(retain_graph=True)``, for the sake of compilers that do.
    """
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def writes_inputs() -> bool:
    """Called while a forward is compiled: whether it changes the data of an input."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return True  # not known
    return any(info.mutates_data for info in context.fw_metadata.input_info)


def _views_of_merged(gm: Any) -> Iterator[tuple[list[Any], int, Any]]:
    """Called while a forward is compiled: results that are views of arguments which share memory.

    Where one of such arguments is written, the graph gets their common base in their place. Gives what
    AOTAutograd knows of all results, which of them it is, and its example.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return
    inputs = list(gm.graph.find_nodes(op="placeholder"))
    (output,) = gm.graph.find_nodes(op="output")
    told = zip(output_descriptions(gm), output.args[0], strict=False)
    results = {
        d.idx: node.meta.get("val") for d, node in told if type(d).__name__ == "PlainAOTOutput"
    }
    infos = context.fw_metadata.output_info
    for number, info in enumerate(infos):
        base = None if info.base_idx is None or number not in results else inputs[info.base_idx]
        if base is None or type(base.meta.get("desc")).__name__ not in _MERGED:
            continue
        if _place(results[number]) != _place(base.meta["val"]):
            yield infos, number, results[number]


_MERGED = ("ViewBaseAOTInput", "SyntheticBaseAOTInput")


def _place(x: Any) -> Any:
    return x.shape, x.stride(), x.storage_offset()


def mend_views_of_merged(gm: Any) -> None:
    """A written argument that is returned comes back as the view it is.

    AOTAutograd before torch 2.13 gives back the base, if it has the argument's number among inputs.
    """
    from torch._functorch._aot_autograd.schemas import OutputType

    for infos, number, _ in _views_of_merged(gm):
        if infos[number].output_type is OutputType.is_input:
            infos[number] = dataclasses.replace(
                infos[number], output_type=OutputType.alias_of_input
            )


def needs_places(gm: Any) -> bool:
    """Whether a result must lie as in the original: AOTAutograd makes a view of an argument like it."""
    return any(x.storage_offset() or not x.is_contiguous() for _, _, x in _views_of_merged(gm))


def guard_names() -> dict[str, Any]:
    """What Dynamo's names of objects may refer to beside ``L`` and ``G``."""
    from torch._dynamo import guards

    made = getattr(guards, "_get_closure_vars", None)
    return dict(made()) if made is not None else dict(getattr(guards, "CLOSURE_VARS", {}))


def break_reason(gm: Any) -> tuple[str, Any] | None:
    """(reason, innermost frame) if a graph ended because Dynamo could not go on, else None."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    stack = list(getattr(reason, "user_stack", ()))
    return str(reason.reason), stack[-1] if stack else None


def break_counts() -> Counter[str]:
    """How often this process ended a graph for which reason; without a graph there is no other trace."""
    return Counter(torch._dynamo.utils.counters["graph_break"])


def reason_of_break(before: Mapping[str, int]) -> str:
    """The reason that was added last; "" if there is none."""
    added = [r for r, n in break_counts().items() if n > before.get(r, 0)]
    if not added:
        return ""
    lines = [line.strip() for line in added[-1].splitlines()]
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    explained = told.get("Explanation", "").strip().rstrip(".")
    context = told.get("Developer debug context", "").strip()
    return explained or (f"{lines[0]}: {context}" if context else lines[0])


@contextlib.contextmanager
def sizes_apart() -> Iterator[None]:
    """Sizes that are equal by accident stay two sizes in a capture."""
    from torch.fx.experimental import _config

    with _config.patch(use_duck_shape=False):
        yield


def where_fixed(size: Any) -> str:
    """Where in the program an open size became a number, as far as PyTorch remembers."""
    node: Any = getattr(size, "node", None)
    for guard in getattr(getattr(node, "shape_env", None), "guards", ()):
        if node._expr in guard.expr.free_symbols:
            return f" (at {_with_whole_path(str(guard.sloc).rpartition('#')[2].strip())})"
    return ""


def _with_whole_path(place: str) -> str:
    """A place in a program as PyTorch shortens it: without what its file's path shares with PyTorch's own.

    Of a path that shares only the root it cuts a letter, too.
    """
    name, colon, rest = place.partition(":")
    for folder in Path(torch.__file__).parents:
        if (folder / name).is_file():
            return f"{folder / name}{colon}{rest}"
    found = [] if glob.has_magic(name) else glob.glob(f"/?{name}")
    return f"{found[0]}{colon}{rest}" if len(found) == 1 else place


def given_tensor(node: Any) -> Any:
    """The caller's tensor that an input of a Dynamo graph stands for, or None."""
    argument = node.meta.get("grapharg")
    try:
        return None if argument is None else argument.example
    except AssertionError:  # it is gone already
        return None


def sources_of_inputs(gm: Any) -> list[str]:
    """Where the inputs of a Dynamo graph come from, as Dynamo writes it."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        name: Any = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
        found.append(str(name() if callable(name) else name))  # a method before torch 2.12
    return found


LABELS = "dynaflow_xla_labels"
"""Key of a graph's ``meta``: what the user calls each input of the Dynamo graph it was made of."""


def input_labels(gm: Any) -> dict[str, str]:
    """Name of an input of AOTAutograd's graph -> what the user calls it, as far as is known."""
    labels = gm.meta.get(LABELS, ())
    found = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        number = getattr(node.meta.get("desc"), "idx", None)
        if isinstance(number, int) and number < len(labels) and labels[number]:
            if type(node.meta["desc"]).__name__ == "PlainAOTInput":
                found[node.name] = labels[number]
    return found


def output_descriptions(gm: Any) -> list[Any]:
    """What each output of AOTAutograd's graph is, as it says itself."""
    (output,) = [node for node in gm.graph.nodes if node.op == "output"]
    return list(output.meta.get("desc") or ())


def is_saved(description: Any) -> bool:
    """Whether an output of a forward is kept for the backward."""
    return type(description).__name__.startswith("SavedForBackwards")


def is_update(description: Any) -> bool:
    """Whether an output is what an argument or a buffer is to hold after the call."""
    return type(description).__name__ == "InputMutationAOTOutput"


def tangent_of(node: Any) -> Any:
    """The description of the forward's output whose gradient an input of a backward is."""
    return getattr(node.meta.get("desc"), "output", None)


def never_compile(code: types.CodeType) -> None:
    """Keeps Dynamo from compiling a frame of this code by itself; inlining it stays possible."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


class CompilationSettings:
    """Dynamo's settings while it compiles for us, and only then.

    Recurrent modules are captured (Dynamo breaks graphs at them by default), and hooks that modules
    get after the capture are noticed. Dynamo settings belong to a thread; to set them at each call
    would cost 20 us.

    Args:
        ours: Whether the compilation that starts now on this thread is for a scheduled call.
        around: Makes what else is open while it lasts.
    """

    WANTED: Mapping[str, Any] = {"allow_rnn": True, "skip_nnmodule_hook_guards": False}

    def __init__(
        self, ours: Callable[[], bool], around: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        self._ours, self._around = ours, around
        self._here = threading.local()
        # A backward is compiled inside of the captured function if that calls ``backward``. Dynamo would
        # then compile the hooks too, and wait for the lock under which it calls them.
        self._hooks = torch.compiler.disable(self._start), torch.compiler.disable(self._end)

    def ensure(self) -> None:
        """Registers the hooks; ``torch._dynamo.reset`` may have removed them."""
        handler = torch._dynamo.callback.callback_handler
        start, end = self._hooks
        if start not in handler.start_callbacks:
            handler.register_start_callback(start)
            handler.register_end_callback(end)

    def _start(self, _: Any) -> None:
        self._here.patch = None
        if self._ours():
            self._here.patch = contextlib.ExitStack()
            self._here.patch.enter_context(torch._dynamo.config.patch(**self.WANTED))
            self._here.patch.enter_context(self._around())

    def _end(self, _: Any) -> None:
        patch = getattr(self._here, "patch", None)
        if patch is not None:
            self._here.patch = None
            patch.close()


_TAKES_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters


def captures_kept(count: int) -> dict[str, Any]:
    """Arguments of ``torch.compile`` by which so many captures are kept; it has none before torch 2.13."""
    return {"recompile_limit": count} if _TAKES_LIMIT else {}


def capture_limit(count: int) -> int:
    """How many captures are kept if ``count`` are asked for."""
    return count if _TAKES_LIMIT else int(torch._dynamo.config.recompile_limit)


def captures_of(fn: types.FunctionType, given: Mapping[str, Any]) -> tuple[int, str]:
    """How many captures of a function are kept, and why the last does not fit a call.

    Args:
        fn: The function.
        given: The call's local names.
    """
    from torch._dynamo import eval_frame

    entries = eval_frame._debug_get_cache_entry_list(fn.__code__)
    if not entries:
        return 0, ""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    scope = {**given, **{name: cell.cell_contents for name, cell in cells}}
    told = entries[-1].guard_manager.check_verbose(scope).verbose_code_parts
    reason = str(told[0]).partition("#")[0].strip() if told else "a guard of the last fails"
    return len(entries), reason


_SHORTCUT_TESTED = frozenset({"2.11", "2.12", "2.13", "2.14", "2.15"})


class Shortcut:
    """What Dynamo compiled for a function, called without Dynamo where its guards hold.

    The wrapper of ``torch.compile`` puts Dynamo into the interpreter for whatever the function may
    call, which costs 8 us. Code that is one whole graph calls nothing else. PyTorch calls its own
    precompiled functions in this way: guards, then code. The names are private, so this is for the
    versions that it was tested with; in others every call goes through the wrapper.

    Args:
        fn: A function of ``*args`` and ``**kwargs``, and what it closes over.
    """

    def __init__(self, fn: types.FunctionType) -> None:
        from torch._dynamo import eval_frame, guards

        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        self._fn = fn
        self._closed = {name: cell.cell_contents for name, cell in cells}
        self._state: Any = eval_frame
        self._entries: Any = getattr(eval_frame, "_debug_get_cache_entry_list", None)
        self._callback: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
        self._valid = getattr(guards, "GuardManagerWrapper", None)
        names = (self._entries, self._callback, getattr(eval_frame, "_stance", None), self._valid)
        tested = ".".join(torch.__version__.split(".")[:2]) in _SHORTCUT_TESTED
        self.usable = tested and None not in names
        self._made: Recent[int, tuple[types.CodeType, types.FunctionType | None]] = Recent(64)

    def find(self, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """What was compiled for such arguments, or None: the wrapper has to be asked."""
        if not self.usable or self._callback() is not None:  # inside of somebody's torch.compile
            return None
        stance = self._state._stance
        if stance.stance != "default" or stance.backend is not None:
            return None
        if torch._C._is_tracing() or modes_active():
            return None
        given = {"args": args, "kwargs": kwargs, **self._closed}
        # Looked up anew: entries go when Dynamo is reset, and when something guarded is freed.
        for entry in self._entries(self._fn.__code__):
            manager = entry.guard_manager
            if type(manager) is self._valid and manager.check(given):
                return self._function(entry.code)
        return None

    def _function(self, code: types.CodeType) -> Callable[..., Any] | None:
        known = self._made.get(id(code))
        if known is None:
            graphs = [n for n in code.co_names if n.startswith("__compiled_fn")]
            whole = len(graphs) == 1 and not any(n.startswith("__resume") for n in code.co_names)
            fn = self._fn
            made = types.FunctionType(code, fn.__globals__, fn.__name__, None, fn.__closure__)
            known = self._made[id(code)] = (code, made if whole else None)
        return known[1]


def lstm_is_onednn(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether ``torch.lstm`` with biases runs oneDNN's layers on these tensors, as far as is known."""
    return (
        torch.backends.mkldnn.is_available()
        and torch._C._get_mkldnn_enabled()
        and not torch.is_autocast_enabled("cpu")
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
        and tensors[0].numel() > 0
    )


def reversed_lstm(
    x: torch.Tensor, hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor], train: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One layer of an LSTM from the last step to the first, by the operator that ``torch.lstm`` uses.

    ``x`` is [T, B, I], the states [1, B, H]; returns [T, B, H] and the last states.
    """
    lstm_mode = 2
    y, h, c, _ = torch.ops.aten.mkldnn_rnn_layer.default(
        x.contiguous(), *params, hx[0][0], hx[1][0], True, [], lstm_mode, hx[0].shape[-1], 1, True,
        True, False, train,
    )  # fmt: skip
    return y, h.reshape(hx[0].shape), c.reshape(hx[1].shape)


def replace_steps(replacements: Mapping[str, Callable[[Sequence[Any]], Any]]) -> None:
    """Asks before a recurrent operator is decomposed into one operator for each time step.

    PyTorch keeps its decompositions in a table of each operator; there is no public way to another one for
    some captures only. What is put there asks and goes on to PyTorch's own, so nobody else notices.

    Args:
        replacements: Name of an operator -> function of its arguments; it answers None to go on.
    """

    def asking(replacement: Callable[[Sequence[Any]], Any], steps: Callable[..., Any]) -> Any:
        def call(*args: Any) -> Any:
            made = replacement(args)
            return steps(*args) if made is None else made

        return call

    for name, replacement in replacements.items():
        operator = getattr(torch.ops.aten, name).input
        for key, steps in operator.py_kernels.items():
            operator.py_kernels[key] = asking(replacement, steps)
        operator._dispatch_cache.clear()


_LAYERS_OF_ANY_SIZE = (
    torch.ops.aten._transformer_encoder_layer_fwd.default.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.Meta
    )
)
"""Whether Dynamo can follow a whole transformer layer with an open batch; not before torch 2.13."""


def layers_of_any_size() -> contextlib.AbstractContextManager[None]:
    """Context in which modules can be captured with an open batch."""
    return contextlib.nullcontext() if _LAYERS_OF_ANY_SIZE else unfused_layers()


@contextlib.contextmanager
def unfused_layers() -> Iterator[None]:
    """Context: no operators that are a whole transformer layer; they have no decomposition."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def says_nothing() -> tuple[type[BaseException], ...]:
    """What an operator raises on tensors without data where it needs the data, or has no kernel for them."""
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )


def told_by_fake(error: BaseException) -> str:
    """What one of these says, which may be the operator alone."""
    named = getattr(error, "func", None)
    return f"{named} needs the data of its tensors" if named is not None else str(error)


def inner_error(error: BaseException) -> BaseException:
    """What a backend raised, without Dynamo's wrapping."""
    return getattr(error, "inner_exception", None) or error


def backend_failed() -> type[BaseException]:
    """The class in which Dynamo wraps a backend's exception."""
    from torch._dynamo.exc import BackendCompilerFailed

    return BackendCompilerFailed


def of_dynamo() -> type[Exception]:
    """What Dynamo raises for itself: that it starts a capture again, skips a frame, or gives up."""
    return torch._dynamo.exc.TorchDynamoException


def capture_failed() -> tuple[type[BaseException], ...]:
    """Classes of Dynamo's errors where an operator fails on the shapes of a call, or Dynamo itself does."""
    from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError

    return TorchRuntimeError, InternalTorchDynamoError


def raised_by_capture(error: BaseException) -> bool:
    """Whether an operator raised this on tensors without data, while Dynamo followed the function.

    Dynamo lets errors of some classes through (``IndexError`` among them), with its own words added, which
    it remembers on the error. Its own classes are no operator's.
    """
    followed = hasattr(error, "innermost_user_frame_summary")
    return followed and not isinstance(error, of_dynamo())


_TRANSFORMS = {
    "Vmap": "torch.func.vmap",
    "Grad": "torch.func.grad (or vjp, jacrev)",
    "Jvp": "torch.func.jvp (or jacfwd)",
    "Functionalize": "torch.func.functionalize",
}


def tracer_around() -> str | None:
    """The functorch transform or the trace that a call is in, by its public name."""
    if torch._C._is_tracing():
        return "torch.jit.trace"
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is None:
        return None
    kind = interpreter.key().name
    return _TRANSFORMS.get(kind, f"a transform of torch.func ({kind})")


def modes_active() -> bool:
    """Whether a dispatch or function mode of this thread would miss what other threads do."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def watched_by_autograd() -> bool:
    """Whether a functorch transform or hooks on saved tensors are open here: they would see what is measured.

    ``torch.utils.checkpoint`` works by such hooks.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or in_transform()


def saved_is_read() -> bool:
    """Whether somebody will look at what a forward that runs now keeps: hooks, or compiled autograd."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (
        hooks is not None or in_compiled_autograd() or bool(torch._dynamo.config.compiled_autograd)
    )


def in_compiled_autograd() -> bool:
    """Whether compiled autograd is enabled on this thread, or runs now."""
    made = torch._dynamo.compiled_autograd
    return bool(getattr(made, "compiled_autograd_enabled", False)) or bool(
        getattr(made, "in_compiled_autograd_region", False)
    )


def in_transform() -> bool:
    """Whether a functorch transform is open: its tensors have no memory to look at."""
    return torch._C._functorch.peek_interpreter_stack() is not None


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""The bare setter: the public one is a context object, made anew for each step."""


def keep_views_plain() -> bool:
    """Views of this thread take no note of how to make them anew, as AOTAutograd asks for around a forward.

    Autograd keeps apart what a captured graph returns, so that nobody asks. Each view would cost twice as
    much. Returns what ``restore_views`` needs.
    """
    before = bool(torch._C._is_view_replay_enabled())
    if before:
        torch._C._set_view_replay_enabled(False)
    return before


def restore_views(before: bool) -> None:
    """Undoes ``keep_views_plain`` on the same thread."""
    if before:
        torch._C._set_view_replay_enabled(True)
