"""The state of a thread: transforms, traces, modes, tensors without data, and what autograd is told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

with_data = unset_fake_temporarily
"""Where a capture's tensors have no data, those made inside have some."""

DispatchMode = TorchDispatchMode
"""What sees every operator that its thread calls while it is open."""


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Apart from any capture that is going on: no tracing, tensors are real."""
    with torch._guards.tracing(None), _disable_current_modes():
        yield


_TRANSFORMS = {
    "Vmap": "torch.func.vmap",
    "Grad": "torch.func.grad (or vjp, jacrev)",
    "Jvp": "torch.func.jvp (or jacfwd)",
    "Functionalize": "torch.func.functionalize",
}

_DUAL = "torch.autograd.forward_ad.dual_level"


def tracer_around() -> str | None:
    """The functorch transform or the trace that a call is in, by its public name."""
    if torch._C._is_tracing():
        return "torch.jit.trace"
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is None:
        if proxy_tensor.get_proxy_mode() is not None:
            return "make_fx"
        # Dual tensors look like others, and XLA would compute without their tangents.
        return _DUAL if torch.autograd.forward_ad._current_level >= 0 else None
    kind = interpreter.key().name
    return _TRANSFORMS.get(kind, f"a transform of torch.func ({kind})")


def modes_active() -> bool:
    """Whether a dispatch or function mode of this thread would miss what other threads do."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def captured_by_user() -> bool:
    """Whether the current stream is being captured: who waits for the device ends that capture."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def watched_by_autograd() -> bool:
    """Whether a functorch transform or hooks on saved tensors are open here: they would see what is measured.

    ``torch.utils.checkpoint`` works by such hooks.
    """
    return saved_is_hooked() or in_transform()


def saved_is_hooked() -> bool:
    """Whether hooks on saved tensors are open on this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def unseen_by_saved_hooks() -> Iterator[None]:
    """While an operator runs autograd inside: what that keeps is not what the user's graph keeps.

    Hooks are open on the caller's thread only, and which thread runs the operator changes from call to call;
    ``torch.utils.checkpoint`` counts the tensors that its hooks are given. They are closed meanwhile: of what
    goes through hooks autograd does not look whether it was written.
    """
    closed: list[Any] = []
    try:
        while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            closed.append(hooks)
        yield
    finally:
        for pack, unpack in reversed(closed):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def saved_is_read() -> bool:
    """Whether somebody will look at what a forward that runs now keeps: hooks, or compiled autograd."""
    return (
        saved_is_hooked() or in_compiled_autograd() or bool(torch._dynamo.config.compiled_autograd)
    )


def in_compiled_autograd() -> bool:
    """Whether compiled autograd is enabled on this thread, or runs now."""
    made = torch._dynamo.compiled_autograd
    return bool(getattr(made, "compiled_autograd_enabled", False)) or bool(
        getattr(made, "in_compiled_autograd_region", False)
    )


def has_own_storage(x: torch.Tensor) -> bool:
    """Whether no other tensor is known to lie in the same memory."""
    # This tensor, and the object of Python made here.
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata)) <= 2


def in_transform() -> bool:
    """Whether a functorch transform is open: its tensors have no memory to look at."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def of_several(values: Sequence[Any]) -> bool:
    """Whether some of these stand for several tensors: the gradients of ``is_grads_batched=True``."""
    is_one = torch._C._functorch.is_legacy_batchedtensor
    return in_transform() or any(isinstance(x, torch.Tensor) and is_one(x) for x in values)


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


profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler of PyTorch's listens on this thread."""


def filling(fill: Callable[[torch.Tensor], None]) -> contextlib.AbstractContextManager[object]:
    """While open, what operators of this thread allocate without writing to it is given to ``fill``."""

    class Filling(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if allocates(func):
                fill(made)
            return made

    return Filling()  # type: ignore[no-untyped-call, no-any-return]


_ALLOCATORS = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split()
)


def allocates(target: object) -> bool:
    """Whether an operator only allocates."""
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.name.removeprefix("aten::") in _ALLOCATORS


def writes(target: object) -> bool:
    """Whether an operator writes into its arguments."""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
