"""Operators and modules: what they call, and what stands in their place."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

Operator = torch._ops.OpOverload
"""The type of an operator of ``torch.ops``, one of its overloads."""

Packet = torch._ops.OpOverloadPacket
"""The type of all overloads of one name."""


def is_composite(target: object) -> bool:
    """Whether an operator is written as other operators, whose derivatives are its own."""
    return isinstance(target, Operator) and bool(
        target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    )


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """PyTorch's decompositions, those of the core operators first."""
    return {**torch._decomp.decomposition_table, **torch._decomp.core_aten_decompositions()}


def bare(target: Any) -> Callable[..., Any]:
    """What an operator of ``torch.ops`` calls, without the frames of Python around it."""
    made: Callable[..., Any] = getattr(target, "_op", target)
    return made


def kept_alike(x: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """A view that is kept conjugated or negated where the example is."""
    x = x.conj() if example.is_conj() else x
    return torch._neg_view(x) if example.is_neg() else x


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


def before_all_modules(hook: Callable[[torch.nn.Module, Any], None]) -> RemovableHandle:
    """Registers a hook of ours, which ``hooks_on_all_modules`` does not count."""
    hook._dynaflow = True  # type: ignore[attr-defined]
    return _registry.register_module_forward_pre_hook(hook)


def hooks_on_all_modules() -> bool:
    """Whether somebody registered hooks on every module of the process; there is no public way to ask."""
    return bool(_any_on_all_modules()) and any(
        not hasattr(hook, "_dynaflow")
        for hooks in (
            _registry._global_forward_pre_hooks,
            _registry._global_forward_hooks,
            _registry._global_backward_pre_hooks,
            _registry._global_backward_hooks,
        )
        for hook in tuple(hooks.values())
    )


_registry = torch.nn.modules.module
_any_on_all_modules: Callable[[], object] = _registry._has_any_global_hook


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


@functools.cache
def composites() -> Mapping[Any, Callable[..., Any]]:
    """What operators that are written as others are, for ``ExportedProgram.run_decompositions``.

    Exported programs hold them whole (``linear``, ``conv1d``, ``einsum``); graphs of AOTAutograd never do.
    """
    every = torch.export.default_decompositions().items()
    return {target: made for target, made in every if is_composite(target)}


GO_ON = object()
"""What is answered where PyTorch's own decomposition is wanted, see ``ask_first``."""

_asked = threading.RLock()


def ask_first(
    target: Any, answer: Callable[[bool, tuple[Any, ...]], Any], *, shapes: bool = False
) -> None:
    """Asks before a tracer decomposes an operator by PyTorch's functions in Python.

    PyTorch keeps its decompositions in a table of each operator; there is no public way to another one for
    some captures only. What is put there asks and goes on to PyTorch's own, so nobody else notices.

    Args:
        target: An overload of an operator.
        answer: Function of whether it is only asked what the operator is made of, and of the arguments;
            ``GO_ON`` for PyTorch's own.
        shapes: Whether to ask where shapes alone are wanted, too.
    """

    def asking(key: Any, own: Callable[..., Any]) -> Callable[..., Any]:
        composite = key == torch._C.DispatchKey.CompositeImplicitAutograd

        def call(*args: Any, **named: Any) -> Any:
            made = answer(composite, args) if not named else GO_ON
            return own(*args, **named) if made is GO_ON else made

        return call

    for key, own in target.py_kernels.items():
        if shapes or key != torch._C.DispatchKey.Meta:
            target.py_kernels[key] = asking(key, own)
    target._dispatch_cache.clear()


def tell_shapes(target: Any, shapes: Callable[..., Any]) -> None:
    """Says what results are like, for tracers, where PyTorch says it in C++ or not at all.

    Args:
        target: An overload of an operator.
        shapes: Function of its arguments: an empty tensor like its result.
    """
    if torch._C.DispatchKey.Meta not in target.py_kernels:
        target.py_impl(torch._C.DispatchKey.Meta)(shapes)
        target._dispatch_cache.clear()


def made_of(target: Any, parts: Callable[..., Any]) -> None:
    """Says what a composite operator is made of, for tracers with open sizes, where PyTorch says it in C++.

    Args:
        target: An overload of an operator.
        parts: Function of its arguments; ``GO_ON`` for PyTorch's own.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd

    def call(*args: Any, **named: Any) -> Any:
        made = parts(*args, **named)
        return target._op_dk(key, *args, **named) if made is GO_ON else made

    if key not in target.py_kernels:
        target.py_impl(key)(call)
        target._dispatch_cache.clear()


@contextlib.contextmanager
def without_decomposition(target: Any) -> Iterator[None]:
    """Context in which an operator is traced by PyTorch's kernels in C++, but for its shapes.

    Of the whole process: what another thread traces meanwhile has the operator whole, too.
    """
    with _asked:
        kept = dict(target.py_kernels)
        shapes = {k: v for k, v in kept.items() if k == torch._C.DispatchKey.Meta}
        target.py_kernels.clear()
        target.py_kernels.update(shapes)
        target._dispatch_cache.clear()
        try:
            yield
        finally:
            target.py_kernels.update(kept)
            target._dispatch_cache.clear()


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


_handle: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_handle(device: torch.device) -> int:
    """The handle of a device's current stream; what makes a stream object of it takes ten times as long."""
    if _handle is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(_handle(device.index or 0))


def end_allocations(device: torch.device, pool: Any) -> None:
    """Ends what a capture that failed may have left open: that memory is taken from its pool."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None and pool is not None:
        with contextlib.suppress(RuntimeError):  # it is over
            end(device.index or 0, pool)
